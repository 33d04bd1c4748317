"""The recipe of a quantization, and which linears of a model it quantizes how. Shapes only; imports no torch."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

from mycli.quant import solvers, transforms
from mycli.quant.solvers import SolverSpec
from mycli.runtime.checkpoint import formats
from mycli.runtime.errors import UsageError
from mycli.runtime.models.config import ModelConfig
from mycli.runtime.models.part_spec import LinearSpec
from mycli.runtime.quantization.scheme import BITS, GROUP_SIZES, Packing

if TYPE_CHECKING:  # torch takes seconds to import
    from mycli.quant.rounding.grid import Search

Head = Literal["auto", "keep", "int8", "int4"]
HEADS: tuple[Head, ...] = get_args(Head)
Hessian = Literal["layer", "model"]

DEFAULT_SEQ = 512  # 128 windows are 64 Ki tokens: several per input of the largest layers, minutes on a CPU
_GROUPS = ", ".join(map(str, GROUP_SIZES))


def methods() -> list[str]:
    """Every method: the solvers, the transforms, and each transform before each solver that uses data."""
    specs = {name: solvers.spec(name) for name in solvers.names()}
    with_data = [name for name, spec in specs.items() if spec.needs_data and not spec.stands_alone]
    pairs = [f"{transform}+{solver}" for transform in transforms.names() for solver in with_data]
    return sorted(specs, key=lambda name: name != solvers.DEFAULT) + transforms.names() + pairs


def method_help() -> str:
    phrases = {name: solvers.spec(name).help for name in solvers.names()}
    phrases |= {name: transforms.spec(name).help for name in transforms.names()}
    return "; ".join(f"{name}: {phrases[name]}" for name in methods() if name in phrases)


@dataclass(frozen=True)
class Recipe:
    """Everything that decides the bytes of a quantized model, except the source and the user's calibration text.

    `method`: one of `methods()`. `group`: inputs per scale, None for one scale per output row. Norms, biases and
    embeddings stay unquantized. `head`: "auto" stores an untied head in 8 bits if the report shows that it costs
    little, and leaves it unquantized without a report. Methods that use data see `samples` windows of `seq` tokens
    (None: `DEFAULT_SEQ` or the model's context, if shorter), drawn with `seed`.
    `target_bpw`: mean bits per quantized weight, scales included; `widths` then holds the bits of each product of each
    block in order of execution (see `mixed_precision`) and replaces `bits`. `tune`: train codes and scales of
    each block once it is solved (`quant.tuning.block`), and scales and gains of all at the end
    (`quant.tuning.end_to_end`), with `tune_codes` their codes too.

    Raises UsageError for values that do not fit together.
    """

    method: str = solvers.DEFAULT
    bits: int = 4
    group: int | None = 128
    scales: "Search" = "mse"
    head: Head = "auto"
    samples: int = 128
    seq: int | None = None
    seed: int = 0
    target_bpw: float | None = None
    widths: tuple[int, ...] | None = None
    tune: bool = False
    tune_codes: bool = False  # only with `tune`
    hessian: Hessian = "layer"  # errors count by the outputs of their layer, or of the model

    def __post_init__(self) -> None:
        if self.solver not in solvers.names():
            choices = ", ".join(methods())
            raise UsageError(f"method {self.method!r} is unknown", code="choose-method", data={"choices": choices})
        spec, name = self.solver_spec, self.solver
        if self.bits not in BITS:
            choices = ", ".join(map(str, BITS))
            raise UsageError(f"{self.bits} bits are not supported", code="choose-bits", data={"choices": choices})
        if self.group is not None and self.group not in GROUP_SIZES:
            raise UsageError(f"group {self.group} is not supported", code="choose-group", data={"choices": _GROUPS})
        if spec.stands_alone and self.transform is not None:
            message = f"method {self.method}: {name} cannot be combined with a transform"
            raise UsageError(message, code="method-alone", data={"name": name})
        if self.bits not in spec.bits or (self.target_bpw is not None and len(spec.bits) == 1):
            raise UsageError(f"{name} supports only {', '.join(map(str, spec.bits))} bits", code="method-bits")
        if self.group is None and not spec.row_scales:
            raise UsageError(f"{name} has no scales per output row", code="choose-block", data={"choices": _GROUPS})
        if spec.stands_alone and self.head not in ("auto", "keep"):
            raise UsageError(f"head {self.head}: {name} leaves the head unquantized", code="keep-head")
        if self.hessian == "model" and not spec.takes_output_moments:
            message = f"method {self.method} has no Hessian of the whole model"
            raise UsageError(message, code="hessian-method", data={"method": solvers.DEFAULT})
        if self.tune_codes and not self.tune:
            raise UsageError("codes of the whole model are trained only where blocks are", code="tune-codes")
        if self.tune and not self.needs_data:
            raise UsageError(
                f"tuning needs calibration data, which method {self.method} does not use",
                code="tune-with-data",
                data={"method": solvers.DEFAULT},
            )

    @property
    def record(self) -> dict[str, Any]:
        """Return the fields as a JSON object."""
        return {**asdict(self), "group": "channel" if self.group is None else self.group}

    @property
    def transform(self) -> str | None:
        first = self.method.partition("+")[0]
        return first if first in transforms.names() else None

    @property
    def solver(self) -> str:
        return self.method if self.transform is None else self.method.partition("+")[2] or solvers.ROUNDING

    @property
    def solver_spec(self) -> SolverSpec:
        return solvers.spec(self.solver)

    @property
    def needs_data(self) -> bool:
        return self.transform is not None or self.solver_spec.needs_data

    @property
    def name(self) -> str:
        """The part of a model's name that describes the recipe, such as rtn-int4-g128; defaults are left out."""
        scales = "-absmax" if self.scales == "absmax" else ""
        head = "" if self.head == "auto" else f"-head-{self.head}"
        tuned = "-model" if self.hessian == "model" else ""
        tuned += "-tuned" if self.tune else ""
        tuned += "-codes" if self.tune_codes else ""
        if len(self.solver_spec.bits) == 1:
            return f"{self.solver}{scales}-g{self.group}"
        packing = Packing(self.bits, self.group).name
        if self.target_bpw is not None:
            packing = packing.replace(f"int{self.bits}", f"mix{self.target_bpw:g}")
        return f"{self.method.replace('+', '-')}{scales}-{packing}{head}{tuned}"

    def packings(self, config: ModelConfig) -> dict[str, Packing]:
        """The packing of each quantized linear, in order of execution; with an "auto" head the one to measure.

        Raises UsageError if the group size does not divide the inputs of one, or for quantizing a tied head.
        """
        groups = [group for layer in range(config.layers) for group in config.layer(layer).products().values()]
        widths = self.widths or (self.bits,) * len(groups)
        linears = [(linear, bits) for bits, group in zip(widths, groups, strict=True) for linear in group]
        head = self.head
        if head == "auto":
            # No reader loads a packed embedding, and a head in addition to a tied one would only add bytes.
            head = "keep" if config.tie_embeddings or self.solver_spec.stands_alone else "int8"
        if head != "keep":
            if config.tie_embeddings:
                message = f"head {head}: this model uses its embedding as head, and embeddings stay unquantized"
                raise UsageError(message, code="keep-head")
            linears.append((config.head(), int(head.removeprefix("int"))))
        self._require_divisible([linear for linear, _ in linears])
        layout = formats.load_writable(self.solver_spec.layout)
        return {linear.name: layout.planned_packing(linear, bits, self.group, config.dtype) for linear, bits in linears}

    def _require_divisible(self, linears: Sequence[LinearSpec]) -> None:
        for linear in linears:
            if self.group is not None and linear.in_features % self.group:
                fitting = [size for size in GROUP_SIZES if all(other.in_features % size == 0 for other in linears)]
                raise UsageError(
                    f"a group of {self.group} does not divide the {linear.in_features} inputs of {linear.name}",
                    code="other-group",
                    data={"group": max(fitting, default="channel")},
                )
