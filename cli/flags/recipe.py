"""What `mycli quantize` makes, as options: a record that resolves itself to a recipe."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from mycli.cli.flags import options
from mycli.runtime.errors import UsageError
from mycli.runtime.quantization.scheme import NF4_GROUP

if TYPE_CHECKING:  # torch takes seconds to import
    from mycli.quant.recipe import Recipe


@dataclass(frozen=True)
class RecipeFlags:
    """What is made, and the text it is calibrated on."""

    method: Annotated[
        str,
        options.word_option(
            words=("gptq", "awq", "awq+gptq", "rtn", "nf4"),
            help="How codes are chosen: awq rescales inputs, gptq makes up for errors; "
            "rtn only rounds, and needs no data; nf4 is QLoRA's, for bitsandbytes.",
        ),
    ] = "gptq"
    bits: Annotated[
        int | None, typer.Option(metavar="8|4|3|2", help="Bits per weight, without its scales.", show_default="4")
    ] = None
    target_bpw: Annotated[
        float | None,
        typer.Option(
            "--target-bpw",
            min=2,
            max=9,
            metavar="X",
            help="Mix widths to reach this many bits per quantized weight, scales included, by what each layer costs.",
            show_default="--bits for all",
        ),
    ] = None
    group: Annotated[
        str | None,
        options.word_option(
            words=("32", "64", "128", "channel"),
            help="Inputs that share a scale.",
            show_default="128; 64 for nf4",
        ),
    ] = None
    scales: Annotated[
        str,
        options.word_option(
            words=("mse", "absmax"),
            help="Signed scales of least error, or the largest weight's.",
        ),
    ] = "mse"
    head: Annotated[
        str,
        options.word_option(
            words=("keep", "int8", "int4"),
            help="What to do with a separate output head.",
        ),
    ] = "keep"
    calib: Annotated[
        str | None,
        typer.Option(
            "--calib",
            metavar="FILE|hf:DATASET",
            help="Text, .jsonl or .parquet to calibrate on; hf:org/name[@revision][:path] is fetched.",
            show_default="a mixed text in the package",
        ),
    ] = None
    samples: Annotated[int, options.count_option("--samples", help="Windows to calibrate on.")] = 128
    seq: Annotated[int | None, options.count_option("--seq", help="Tokens in a window.", show_default="512")] = None
    seed: Annotated[
        int, typer.Option("--seed", metavar="N", min=0, help="Draws the windows; the same seed gives the same bytes.")
    ] = 0
    tune: Annotated[
        bool,
        typer.Option(
            "--tune", help="Then train towards the original: each block, then the whole. Takes ten times as long."
        ),
    ] = False

    def resolve(self) -> "Recipe":
        """The recipe. Raises UsageError for a value that it does not know."""
        from mycli.quant.recipe import Recipe

        group = self.group or (str(NF4_GROUP) if self.method == "nf4" else "128")
        if group != "channel" and not group.isdecimal():
            raise UsageError(f"--group {group}: not a group size", "choose from 32, 64, 128, channel")
        if self.bits is not None and self.target_bpw is not None:
            raise UsageError("--bits and --target-bpw each say how wide weights are", "give one of them")
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
