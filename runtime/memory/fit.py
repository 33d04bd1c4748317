"""What to change so that a model fits: the preflight of every load with its remedy, and the choice of a scheme.

Knows plans and their estimates. Does not import torch and does not know how much memory is free: the caller says.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from mycli.runtime.errors import ResourceError, UsageError
from mycli.runtime.memory.estimate import Estimate, estimate, longest_context
from mycli.runtime.memory.plan import DEFAULT_CONTEXT, MemoryPlan
from mycli.runtime.models.config import ModelConfig
from mycli.runtime.quantization.scheme import BITS, GROUP_SIZES, Packing
from mycli.runtime.utils.units import distinct_sizes, human_bytes

SHORTEST_CONTEXT = 256  # tokens; less is of no use to anybody


@dataclass(frozen=True)
class PackingScheme:
    """A way of holding the linears of the blocks, and of the head; None: dense."""

    packing: Packing | None = None
    head: Packing | None = None

    def name(self, config: ModelConfig) -> str:
        """int4-g128, or the dtype of a dense model."""
        return self.packing.name if self.packing else config.dtype

    def packings(self, config: ModelConfig) -> dict[str, Packing]:
        """The packing of each linear.

        Raises UsageError naming the first that the group size does not divide, or for a tied head: it is the embedding.
        """
        result: dict[str, Packing] = {}
        for layer in range(config.layers if self.packing else 0):
            for spec in (spec for group in config.layer(layer).products().values() for spec in group):
                result[spec.name] = _checked(self.packing, spec.name, spec.in_features)
        if self.head and config.tie_embeddings:
            raise UsageError("the head of this model is its embedding, which is kept", code="keep-head")
        if self.head:
            result[config.head().name] = _checked(self.head, config.head().name, config.hidden_size)
        return result


def _checked(packing: Packing | None, name: str, in_features: int) -> Packing:
    assert packing is not None
    if packing.group_size and in_features % packing.group_size:
        raise UsageError(
            f"{packing.name}: a group of {packing.group_size} does not divide the {in_features} inputs of {name}",
            "choose a smaller group, or channel",
        )
    return packing


def schemes(config: ModelConfig) -> list[PackingScheme]:
    """Dense first, then fewer and fewer bits, each with the largest group that divides every linear's inputs."""
    groups = (group for layer in config.layer_specs for group in layer.products().values())
    inputs = {spec.in_features for group in groups for spec in group}
    fitting = [size for size in sorted(GROUP_SIZES, reverse=True) if all(k % size == 0 for k in inputs)]
    group = fitting[0] if fitting else None
    return [PackingScheme(), *(PackingScheme(Packing(bits, group)) for bits in BITS)]


def fit(
    plan: MemoryPlan, free: int, context: int | None, choices: Sequence[PackingScheme]
) -> tuple[MemoryPlan, PackingScheme] | None:
    """The first of `choices` (best first) that holds `context` tokens in `free` bytes; None where none does.

    With `context` None, the usual context decides and is then stretched as far as memory goes; where nothing holds the
    usual one, the last choice with whatever it holds. A dense choice keeps the packings that `plan` has.
    """

    def under(scheme: PackingScheme, tokens: int) -> MemoryPlan:
        return replace(plan, packings=scheme.packings(plan.config) or plan.packings, context=tokens)

    wanted = context or min(DEFAULT_CONTEXT, plan.config.max_context)
    for scheme in choices:
        if estimate(under(scheme, wanted)).total <= free:
            return under(scheme, context or longest_context(under(scheme, wanted), free)), scheme
    longest = longest_context(under(choices[-1], wanted), free)
    if context or longest < min(SHORTEST_CONTEXT, plan.config.max_context):
        return None
    return under(choices[-1], longest), choices[-1]


@dataclass(frozen=True)
class _Change:
    """One thing to ask for otherwise, as the code and data of an error, and the plan that it leads to."""

    plan: MemoryPlan
    code: str
    data: Mapping[str, object] = field(default_factory=dict)


def _changes(plan: MemoryPlan, free: int) -> Iterator[_Change]:
    """Changes in the order of what they cost a person."""
    longest = longest_context(plan, free)
    shorter = _Change(replace(plan, context=longest), code="set-context", data={"context": longest})
    if longest >= max(SHORTEST_CONTEXT, plan.context // 4):
        yield shorter
    if plan.draft is not None:
        yield _Change(replace(plan, draft=None), code="leave-out-draft")
    if plan.batch > 1:
        yield _Change(replace(plan, batch=1), code="one-sequence")
    for scheme in () if plan.packings else schemes(plan.config):
        if (packing := scheme.packing) is not None:
            packed = replace(plan, packings=scheme.packings(plan.config))
            group = packing.group_size or "channel"
            yield _Change(packed, code="quantize", data={"bits": packing.bits, "group": group})
    if longest >= SHORTEST_CONTEXT:
        yield shorter


def preflight(plan: MemoryPlan, free: int, place: str, started: bool = True) -> Estimate:
    """The estimate of `plan`, or ResourceError with needed against free, and the smallest change that fits.

    `place` says whose memory (`cuda:0`, `main memory`). `started`: torch runs already, and on a GPU has its context, so
    `free` no longer holds what the process itself takes.
    """
    result = estimate(plan)
    if started:
        free += result.runtime
    if result.total > free:
        raise shortage(plan, free, place)
    return result


def shortage(plan: MemoryPlan, free: int, place: str) -> ResourceError:
    """What `plan` needs against the `free` bytes of `place`, with the smallest change that fits.

    Where it should fit by these numbers, memory has run out all the same: something else takes it.
    """
    result = estimate(plan)
    needed, left = distinct_sizes(result.total, free)
    problem = (
        f"{place}: {needed} needed ({human_bytes(result.weights + result.embeddings)} weights, "
        f"{human_bytes(result.cache)} cache of {plan.context} tokens), {left} free"
    )
    if result.total <= free:
        return ResourceError(f"{problem}, and it ran out", code="free-memory-or-less-context", data={"place": place})
    for change in _changes(plan, free):
        if estimate(change.plan).total <= free:
            return ResourceError(problem, code=change.code, data=change.data)
    missing = human_bytes(result.total - free)
    return ResourceError(problem, f"no single change is enough: free {missing} more, or choose a smaller model")
