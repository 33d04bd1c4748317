"""Whether vLLM or SGLang can run a packed model with tensor parallelism: the shape rules of their Marlin kernels.

Follows vLLM 0.32 (`marlin_utils.py`: MIN_THREAD_N 64, MIN_THREAD_K 128, groups of -1, 32, 64, 128; SGLang has the same
constants) and its head rules. q, k, v and gate, up are split by rows (outputs), o and down by columns (inputs).
"""

from collections.abc import Mapping
from dataclasses import dataclass

from mycli.runtime.models.config import ModelConfig
from mycli.runtime.models.part_spec import LinearSpec
from mycli.runtime.quantization.scheme import Packing

MIN_K = 128
MIN_N = 64
MARLIN_BITS = (4, 8)
BY_INPUTS = ("o", "down")


@dataclass(frozen=True)
class Obstacle:
    """A reason against a split. where: a set of fused linears or a config field; layers: number of layers with it."""

    where: str
    problem: str
    layers: int = 1


def _head_problems(config: ModelConfig, ranks: int) -> list[Obstacle]:
    result = []
    if config.attentions and config.heads % ranks:
        result.append(Obstacle("num_attention_heads", f"{config.heads} heads cannot be divided by {ranks}"))
    # With more ranks than KV heads each head is copied to the same number of ranks.
    if config.attentions and config.kv_heads % ranks and ranks % config.kv_heads:
        result.append(Obstacle("num_key_value_heads", f"{config.kv_heads} KV heads cannot be divided among {ranks}"))
    return result


def _per_rank(config: ModelConfig, key: str, specs: tuple[LinearSpec, ...], ranks: int) -> tuple[int, int]:
    inputs, outputs = specs[0].in_features, sum(spec.out_features for spec in specs)
    if key in BY_INPUTS:
        return inputs // ranks, outputs
    if key == "latent_in":  # every rank computes the whole latent
        return inputs, outputs
    if key == "qkv":  # whole heads, and at least one KV head
        return inputs, (config.heads // ranks + 2 * max(config.kv_heads // ranks, 1)) * config.head_dim
    return inputs, outputs // ranks


def _set_problems(
    config: ModelConfig,
    key: str,
    specs: tuple[LinearSpec, ...],
    size: int,
    packings: Mapping[str, Packing],
    ranks: int,
) -> list[str]:
    kinds = {packings.get(spec.name) for spec in specs}
    if len(kinds) > 1:
        return ["the fused linears differ in scheme: " + ", ".join(sorted(p.name if p else "dense" for p in kinds))]
    if key in ("gate_up", "down") and size % ranks:
        return [f"{size} cannot be divided by {ranks}"]
    packing = kinds.pop()
    if packing is None:
        return []
    inputs, outputs = _per_rank(config, key, specs, ranks)
    problems = []
    if packing.bits not in MARLIN_BITS:
        problems.append(f"{packing.bits} bits (Marlin takes 4 and 8)")
    if inputs % MIN_K:
        problems.append(f"{inputs} inputs per rank, not a multiple of {MIN_K}")
    elif packing.group_size and inputs % packing.group_size:
        problems.append(f"{inputs} inputs per rank, not a multiple of the group {packing.group_size}")
    if outputs % MIN_N:
        problems.append(f"{outputs} outputs per rank, not a multiple of {MIN_N}")
    return problems


def obstacles(config: ModelConfig, packings: Mapping[str, Packing], ranks: int) -> list[Obstacle]:
    """Return every reason why `ranks` GPUs cannot share the model, each once for all layers; empty if they can.

    With `ranks` 1: whether one GPU can run it with these kernels.
    """
    layers: dict[tuple[str, str], set[int]] = {}  # a mixture has a problem once for each expert
    for layer in range(config.layers):
        mlp = config.layer(layer).mlp
        size = 0 if mlp is None else mlp.size
        for key, specs in config.layer(layer).products().items():
            name = "+".join(spec.name.rpartition(".")[2] for spec in specs)
            for problem in _set_problems(config, key.rpartition(".")[2], specs, size, packings, ranks):
                layers.setdefault((name, problem), set()).add(layer)
    linears = [Obstacle(where, problem, len(indices)) for (where, problem), indices in layers.items()]
    # The head is split by rows after its vocabulary was padded to a multiple of 64, so only its inputs can be wrong.
    head = config.head()
    if head.name in packings and head.in_features % MIN_K:
        linears.append(Obstacle(head.name, f"{head.in_features} inputs, not a multiple of {MIN_K}"))
    return _head_problems(config, ranks) + linears
