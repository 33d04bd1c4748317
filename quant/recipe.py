"""What a person asks of quantization, and which linears of a model it concerns. Knows shapes; touches no tensor."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from mycli.quant import solvers, transforms
from mycli.quant.rounding.grid import Search
from mycli.runtime.checkpoint.formats.bitsandbytes import planned_packing
from mycli.runtime.errors import UsageError
from mycli.runtime.models.config import ModelConfig
from mycli.runtime.models.part_spec import LinearSpec
from mycli.runtime.quantization.scheme import BITS, GROUP_SIZES, Packing

Head = Literal["keep", "int8", "int4"]

DEFAULT_SEQ = 512  # 64 Ki tokens in all: several for every input of the largest layers, within minutes on a CPU


@dataclass(frozen=True)
class Recipe:
    """All that decides the bytes of the result, besides the source and a calibration text of one's own.

    `method`: a solver; a transform, after which weights are rounded; or both, as awq+gptq; or one whose codes are those
    of a table, which stands alone and leaves nothing else to choose but the group. `group` None: one scale per output
    row. Norms, biases and embeddings are kept (but for what a transform folds); so is the head, unless `head`
    says how many bits it gets. Methods that need data see `samples` windows of `seq` tokens, drawn with `seed`; `seq`
    None takes `DEFAULT_SEQ`, or the model's context where that is shorter. `target_bpw`: bits per weight of the
    quantized linears together, scales included; `widths` then says the bits of each product of each block, in order of
    execution (see `quant.mixed_precision`), and `bits` nothing. `tune`: codes and scales of each block are trained once
    it is solved (`quant.tuning.block`), and in the end scales and gains of all (`quant.tuning.end_to_end`).
    """

    method: str = "gptq"
    bits: int = 4
    group: int | None = 128
    scales: Search = "mse"
    head: Head = "keep"
    samples: int = 128
    seq: int | None = None
    seed: int = 0
    target_bpw: float | None = None
    widths: tuple[int, ...] | None = None
    tune: bool = False

    def __post_init__(self) -> None:
        if self.bits not in BITS:
            choices = ", ".join(map(str, BITS))
            raise UsageError(f"{self.bits} bits: not a width", code="choose-bits", data={"choices": choices})
        if self.group is not None and self.group not in GROUP_SIZES:
            choices = ", ".join(map(str, GROUP_SIZES))
            raise UsageError(f"group {self.group}: not a group size", code="choose-group", data={"choices": choices})
        if self.of_table:
            self._require_alone()

    def _require_alone(self) -> None:
        """Raises UsageError for what a method with a table of its own cannot be combined with."""
        name = self.solver
        if self.transform is not None:
            raise UsageError(f"method {self.method}: {name} stands alone", code="table-alone", data={"name": name})
        if self.bits != 4 or self.target_bpw is not None:
            raise UsageError(f"{name} always has 4 bits", code="table-bits")
        if self.group is None:
            choices = ", ".join(map(str, GROUP_SIZES))
            raise UsageError(f"{name} has no scales per output row", code="choose-block", data={"choices": choices})
        if self.head != "keep":
            raise UsageError(f"head {self.head}: readers of {name} expect the head as it is", code="keep-head")
        if self.tune:
            raise UsageError(f"tuning needs calibration, which method {name} does not do", code="tune-gptq")

    @property
    def of_table(self) -> bool:
        """Whether the codes are not integers, but those of a table that belongs to the method."""
        return self.solver in solvers.names() and solvers.load(self.solver).CODES != "int"

    @property
    def name(self) -> str:
        """States facts, as `rtn-int4-g128`; what is not the default is said too."""
        scales = "-absmax" if self.scales == "absmax" else ""
        head = "" if self.head == "keep" else f"-head-{self.head}"
        tuned = "-tuned" if self.tune else ""
        packing = Packing(self.bits, self.group).name
        if self.of_table:
            return f"{self.solver}{scales}-g{self.group}"
        if self.target_bpw is not None:
            packing = packing.replace(f"int{self.bits}", f"mix{self.target_bpw:g}")
        return f"{self.method.replace('+', '-')}{scales}-{packing}{head}{tuned}"

    @property
    def transform(self) -> str | None:
        """The one of `quant.transforms` that rescales inputs before anything is solved, None for none."""
        first = self.method.partition("+")[0]
        return first if first in transforms.names() else None

    @property
    def solver(self) -> str:
        """The one of `quant.solvers` that chooses the codes: behind a transform plain rounding, unless one is named."""
        return self.method if self.transform is None else self.method.partition("+")[2] or "rtn"

    def packings(self, config: ModelConfig) -> dict[str, Packing]:
        """The packing of each linear that gets one, in order of execution.

        Raises UsageError where the group size does not divide the inputs of one of them, or a tied head is asked for.
        """
        groups = [group for layer in range(config.layers) for group in config.block_linears(layer).values()]
        widths = self.widths or (self.bits,) * len(groups)
        linears = [linear for group in groups for linear in group]
        if self.of_table:
            self._require_divisible(linears)
            assert self.group is not None
            return {linear.name: planned_packing(linear, self.group, config.dtype) for linear in linears}
        packings = {
            linear.name: Packing(bits, self.group)
            for bits, group in zip(widths, groups, strict=True)
            for linear in group
        }
        if self.head != "keep":
            if config.tie_embeddings:
                raise UsageError(
                    f"head {self.head}: the head is the embedding of this model, which is kept", code="keep-head"
                )
            linears.append(config.head())
            packings["lm_head"] = Packing(int(self.head.removeprefix("int")), self.group)
        self._require_divisible(linears)
        return packings

    def _require_divisible(self, linears: Sequence[LinearSpec]) -> None:
        for linear in linears:
            if self.group is not None and linear.in_features % self.group:
                fitting = [size for size in GROUP_SIZES if all(each.in_features % size == 0 for each in linears)]
                raise UsageError(
                    f"a group of {self.group} does not divide the {linear.in_features} inputs of {linear.name}",
                    code="other-group",
                    data={"group": max(fitting, default="channel")},
                )
