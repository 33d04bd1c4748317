"""Checks that a model fits before it is loaded, finds the change that makes it fit, and chooses a packing that fits."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from mycli.runtime.errors import ResourceError, UsageError
from mycli.runtime.memory.estimate import estimate, longest_context
from mycli.runtime.memory.plan import DEFAULT_CONTEXT, MemoryPlan
from mycli.runtime.models.config import ModelConfig
from mycli.runtime.quantization.scheme import BITS, GROUP_SIZES, Packing
from mycli.runtime.utils.units import distinct_sizes, human_bytes

SHORTEST_CONTEXT = 256  # tokens; too few for a prompt and a reply


@dataclass(frozen=True)
class PackingScheme:
    """The packing of the blocks' linears, and of the head; None: dense."""

    packing: Packing | None = None
    head: Packing | None = None

    def name(self, config: ModelConfig) -> str:
        return self.packing.name if self.packing else config.dtype

    def packings(self, config: ModelConfig) -> dict[str, Packing]:
        """Return the packing of each linear. Raises UsageError if a group size does not divide, or for a tied head."""
        result: dict[str, Packing] = {}
        for layer in range(config.layers if self.packing else 0):
            for spec in (spec for group in config.layer(layer).products().values() for spec in group):
                result[spec.name] = _checked(self.packing, spec.name, spec.in_features)
        if self.head and config.tie_embeddings:
            raise UsageError("the head of this model is its embedding, which is not quantized", code="keep-head")
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
    """Return dense, then fewer and fewer bits, each with the largest group that divides every linear's inputs."""
    groups = (group for layer in config.layer_specs for group in layer.products().values())
    inputs = {spec.in_features for group in groups for spec in group}
    fitting = [size for size in sorted(GROUP_SIZES, reverse=True) if all(k % size == 0 for k in inputs)]
    group = fitting[0] if fitting else None
    return [PackingScheme(), *(PackingScheme(Packing(bits, group)) for bits in BITS)]


def fit(
    plan: MemoryPlan, free: int, context: int | None, choices: Sequence[PackingScheme]
) -> tuple[MemoryPlan, PackingScheme] | None:
    """Return the first of `choices`, best first, that fits `context` tokens in `free` bytes; None if none does.

    If `context` is None, the default context decides, and is then extended to what fits; if no choice fits it, the last
    one with the longest context that does. A dense choice leaves the packings of `plan` as they are.
    """

    def under(scheme: PackingScheme, tokens: int) -> MemoryPlan:
        return replace(plan, packings=scheme.packings(plan.config) or plan.packings, context=tokens)

    target = context or min(DEFAULT_CONTEXT, plan.config.max_context)
    for scheme in choices:
        if estimate(under(scheme, target)).total <= free:
            return under(scheme, context or longest_context(under(scheme, target), free)), scheme
    longest = longest_context(under(choices[-1], target), free)
    if context or longest < min(SHORTEST_CONTEXT, plan.config.max_context):
        return None
    return under(choices[-1], longest), choices[-1]


@dataclass(frozen=True)
class _Change:
    # A remedy: the plan that it leads to, with the code and data of the error that proposes it.
    plan: MemoryPlan
    code: str
    data: Mapping[str, object] = field(default_factory=dict)


def _changes(plan: MemoryPlan, free: int) -> Iterator[_Change]:
    # Cheapest for the user first. A context of less than a quarter is proposed last.
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


def preflight(plan: MemoryPlan, free: int, place: str) -> None:
    """Raise ResourceError if `plan` does not fit, with the smallest change that does.

    `free`: bytes that are free while this process runs; `place`: the name of the memory (`cuda:0`, `main memory`).
    """
    result = estimate(plan)
    if result.needed > free:
        raise shortage(plan, free + result.runtime, place)


def shortage(plan: MemoryPlan, free: int, place: str) -> ResourceError:
    """Return the error for a plan that does not fit, with the smallest change that does."""
    result = estimate(plan)
    needed, left = distinct_sizes(result.total, free)
    problem = (
        f"{place}: {needed} needed ({human_bytes(result.weights + result.embeddings)} weights, "
        f"{human_bytes(result.cache)} cache of {plan.context} tokens), {left} free"
    )
    if result.total <= free:  # another program uses the memory, or the estimate is wrong
        return ResourceError(
            f"{problem}, but memory ran out", code="free-memory-or-less-context", data={"place": place}
        )
    for change in _changes(plan, free):
        if estimate(change.plan).total <= free:
            return ResourceError(problem, code=change.code, data=change.data)
    missing = human_bytes(result.total - free)
    return ResourceError(problem, f"no single change is enough: free {missing} more, or use a smaller model")
