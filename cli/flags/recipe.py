"""The options of `mycli quantize` that make a recipe."""

from dataclasses import dataclass
from typing import Annotated

from mycli.cli.flags import options
from mycli.quant import solvers
from mycli.quant.ggml.mixes import DEFAULT_MIX, MIXES
from mycli.quant.ggml.recipe import GgufRecipe
from mycli.quant.recipe import HEADS, Recipe, method_help, methods
from mycli.runtime.errors import UsageError
from mycli.runtime.quantization.scheme import BITS, GROUP_SIZES

_GROUPS = (*map(str, GROUP_SIZES), "channel")
_SPECS = {name: solvers.spec(name) for name in solvers.names()}
_DEFAULT_GROUP = _SPECS[solvers.DEFAULT].group
_FOR_GGUF = ("--bits", "--format", "--target-size", "--calib", "--samples", "--seq", "--seed")
_OTHER_GROUPS = [f"{spec.group} for {name}" for name, spec in _SPECS.items() if spec.group != _DEFAULT_GROUP]


@dataclass(frozen=True)
class RecipeFlags:
    """Method, widths and calibration data, as typed."""

    method: Annotated[str, options.words("--method", methods(), f"How the codes are chosen. {method_help()}.")] = (
        solvers.DEFAULT
    )
    bits: Annotated[
        str | None,
        options.words(
            "--bits",
            (*map(str, BITS), *MIXES),
            "Bits per weight, not counting scales; or the type of a GGUF file, as llama-quantize names it.",
            metavar=f"{'|'.join(map(str, BITS))}|q4_k_m|...",
            show_default="4",
            parser=lambda text: str(text).lower(),  # llama-quantize writes types in capitals
        ),
    ] = None
    format: Annotated[
        str | None,
        options.words(
            "--format",
            ("folder", "gguf"),
            "A folder of safetensors, or one GGUF file, in K-quants and IQ types.",
            show_default="folder; gguf for a GGUF type",
        ),
    ] = None
    target_size: Annotated[
        int | None,
        options.size("--target-size", "Make a GGUF file of at most this size: more bits for sensitive layers."),
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
            HEADS,
            "An output head that is not tied to the embedding: int8, int4, or keep it unquantized; auto: int8 if the"
            " quality measurement shows no loss.",
        ),
    ] = "auto"
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
    hessian: Annotated[
        str,
        options.words(
            "--hessian",
            ("layer", "model"),
            "What errors of the weights count by: the outputs of their layer, or, with gradients, of the whole model.",
        ),
    ] = "layer"
    tune: Annotated[
        bool, options.flag("--tune", "Then train against the original model, by block and end to end; 10 times slower.")
    ] = False
    tune_codes: Annotated[
        bool,
        options.flag(
            "--tune-codes",
            "As --tune, but train codes end to end too, with 20 bytes of memory for each weight; for 2 bits with 256"
            " windows or more.",
        ),
    ] = False

    def resolve(self) -> Recipe:
        """Return the recipe. Raises UsageError for unsupported values."""
        group = self.group or str(_SPECS[self.method].group if self.method in _SPECS else _DEFAULT_GROUP)
        if group != "channel" and not group.isdecimal():
            raise UsageError(f"--group {group} is not supported", f"--group takes: {', '.join(_GROUPS)}")
        if self.bits is not None and self.bits not in map(str, BITS):
            choices = ", ".join([*map(str, BITS), *MIXES])
            problem = f"{self.bits} bits are" if self.bits.isdecimal() else f"--bits {self.bits} is"
            raise UsageError(f"{problem} not supported", code="choose-bits", data={"choices": choices})
        if self.bits is not None and self.target_bpw is not None:
            raise UsageError("--bits and --target-bpw exclude each other", "use one of the two")
        return Recipe(
            method=self.method,
            bits=4 if self.bits is None else int(self.bits),
            group=None if group == "channel" else int(group),
            scales=options.choice("--scales", self.scales, ("mse", "absmax")),
            head=options.choice("--head", self.head, HEADS),
            samples=self.samples,
            seq=self.seq,
            seed=self.seed,
            target_bpw=self.target_bpw,
            tune=self.tune or self.tune_codes,
            tune_codes=self.tune_codes,
            hessian=options.choice("--hessian", self.hessian, ("layer", "model")),
        )

    @property
    def is_gguf(self) -> bool:
        return self.format == "gguf" or self.target_size is not None or (self.bits or "") in MIXES

    def resolve_gguf(self) -> GgufRecipe:
        """Return the recipe of a GGUF file. Raises UsageError for options that it does not have."""
        if self.format == "folder":
            raise UsageError("--format folder excludes GGUF types and --target-size", "use --format gguf")
        for name in options.given_options(self):
            if name not in _FOR_GGUF:
                raise UsageError(f"{name} does not apply to GGUF, whose types decide it", f"omit {name}")
        if self.bits is not None and self.target_size is not None:
            raise UsageError("--bits and --target-size exclude each other", "use one of the two")
        if self.bits is not None and self.bits not in MIXES:
            raise UsageError(f"--bits {self.bits}: not a GGUF type", f"--bits takes: {', '.join(MIXES)}")
        return GgufRecipe(self.bits or DEFAULT_MIX, self.samples, self.seq, self.seed, self.target_size)
