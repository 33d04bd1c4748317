"""The options of `mycli quantize` that make a recipe."""

from dataclasses import dataclass
from typing import Annotated

from mycli.cli.flags import options
from mycli.quant import solvers
from mycli.quant.recipe import Recipe, method_help, methods
from mycli.runtime.errors import UsageError
from mycli.runtime.quantization.scheme import BITS, GROUP_SIZES

_GROUPS = (*map(str, GROUP_SIZES), "channel")
_SPECS = {name: solvers.spec(name) for name in solvers.names()}
_DEFAULT_GROUP = _SPECS[solvers.DEFAULT].group
_OTHER_GROUPS = [f"{spec.group} for {name}" for name, spec in _SPECS.items() if spec.group != _DEFAULT_GROUP]


@dataclass(frozen=True)
class RecipeFlags:
    """Method, widths and calibration data, as typed."""

    method: Annotated[str, options.words("--method", methods(), f"How the codes are chosen. {method_help()}.")] = (
        solvers.DEFAULT
    )
    bits: Annotated[
        int | None,
        options.option("--bits", "|".join(map(str, BITS)), "Bits per weight, not counting scales.", show_default="4"),
    ] = None
    target_bpw: Annotated[
        float | None,
        options.option(
            "--target-bpw",
            "X",
            "Give sensitive layers more bits, others fewer, for this average per weight, scales included.",
            min=2,
            max=9,
            show_default="--bits for all",
        ),
    ] = None
    group: Annotated[
        str | None,
        options.words(
            "--group",
            _GROUPS,
            "Number of inputs that share a scale.",
            show_default="; ".join([str(_DEFAULT_GROUP), *_OTHER_GROUPS]),
        ),
    ] = None
    scales: Annotated[
        str,
        options.words(
            "--scales",
            ("mse", "absmax"),
            "mse: the scale with the least squared error; absmax: from the largest weight.",
        ),
    ] = "mse"
    head: Annotated[
        str,
        options.words(
            "--head",
            ("keep", "int8", "int4"),
            "An output head that is not tied to the embedding: keep it unquantized, or quantize it.",
        ),
    ] = "keep"
    calib: Annotated[
        str | None,
        options.option(
            "--calib",
            "FILE|hf:DATASET",
            "Calibration data: text, .jsonl or .parquet; hf:org/name[@revision][:path] is downloaded.",
            show_default="a built-in text",
        ),
    ] = None
    samples: Annotated[int, options.count("--samples", "Number of calibration windows.")] = 128
    seq: Annotated[int | None, options.count("--seq", "Tokens per window.", show_default="512")] = None
    seed: Annotated[
        int, options.option("--seed", "N", "Chooses the windows; the same seed gives the same bytes.", min=0)
    ] = 0
    tune: Annotated[
        bool, options.flag("--tune", "Then train against the original model, by block and end to end; 10 times slower.")
    ] = False

    def resolve(self) -> Recipe:
        """Return the recipe. Raises UsageError for unsupported values."""
        group = self.group or str(_SPECS[self.method].group if self.method in _SPECS else _DEFAULT_GROUP)
        if group != "channel" and not group.isdecimal():
            raise UsageError(f"--group {group} is not supported", f"--group takes: {', '.join(_GROUPS)}")
        if self.bits is not None and self.target_bpw is not None:
            raise UsageError("--bits and --target-bpw exclude each other", "use one of the two")
        return Recipe(
            method=self.method,
            bits=4 if self.bits is None else self.bits,
            group=None if group == "channel" else int(group),
            scales=options.choice("--scales", self.scales, ("mse", "absmax")),
            head=options.choice("--head", self.head, ("keep", "int8", "int4")),
            samples=self.samples,
            seq=self.seq,
            seed=self.seed,
            target_bpw=self.target_bpw,
            tune=self.tune,
        )
