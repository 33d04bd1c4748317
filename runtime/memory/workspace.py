"""Predicts what a pass holds besides weights and cache: values of a layer, masks, scores and keys that are copied."""

from math import prod

from mycli.runtime.memory.plan import MemoryPlan, cache_positions
from mycli.runtime.models.experts_spec import ExpertsSpec
from mycli.runtime.models.layer_spec import LayerSpec
from mycli.runtime.models.part_spec import AttentionSpec
from mycli.runtime.quantization.int4_vectors import FUSED_INT4_HEADS

MAX_PROMPT_HEAD = 256  # widest head of the GPU kernel for prompts


def head_widths(layer: LayerSpec) -> tuple[int, int]:
    attention = layer.attention  # widths of all query heads and of all key heads
    return attention.query_heads * attention.head_dim, attention.kv_heads * attention.head_dim


def pass_values(layer: LayerSpec) -> int:
    """Return the values per token at the peak of a forward pass."""
    hidden = hidden_width(layer)
    mixer = mlp = 0
    if layer.mixer is not None and not isinstance(layer.mixer, AttentionSpec):
        mixer = layer.mixer.forward_values()
    elif layer.mixer is not None:
        query, key = head_widths(layer)
        # q, k, v as projected; q and k rotated; the output of the heads; the projected output
        mixer = (query + 2 * key) + (query + key) + query + hidden
    # MLP: gate and up; silu(gate); their product; the output
    if layer.mlp is not None:
        mlp = _expert_values(layer.mlp, hidden) if isinstance(layer.mlp, ExpertsSpec) else 4 * layer.mlp.size + hidden
    if layer.state_space is not None:
        mixer = max(mixer, layer.state_space.forward_values() + hidden)
    # The attention output is added after the part next to it.
    waiting = hidden if layer.parallel or layer.state_space is not None else 0
    # All streams as they enter and as predicted, and twice in fp32 while coefficients are applied.
    streams = 0 if layer.streams is None else 6 * layer.streams.count * hidden
    # The residual stream, its normalized copy, and the larger of mixer and MLP: one is freed before the other begins.
    return 2 * hidden + waiting + streams + max(mixer, mlp)


def hidden_width(layer: LayerSpec) -> int:
    *_, last = layer.parts[0].products().values()
    return last[0].out_features


def _expert_values(spec: ExpertsSpec, hidden: int) -> int:
    # Scores in two dtypes; for each (token, expert) pair gate, up and their product, or product and output; the sums;
    # the output of the shared expert.
    pairs = spec.top_k * max(3 * spec.size, spec.size + hidden) + hidden
    shared = 0 if spec.shared is None else 4 * spec.shared.mlp.size
    return 2 * len(spec.experts) + max(pairs + (hidden if shared else 0), shared + hidden)


def _read_in_place(plan: MemoryPlan, spec: AttentionSpec) -> bool:
    # Whether a kernel attends to the cache as it lies, without masks and written scores.
    unpacked = plan.kv != "int4" or spec.head_dim in FUSED_INT4_HEADS
    return plan.gpu and plan.value_bytes == 2 and spec.head_dim <= MAX_PROMPT_HEAD and unpacked


def _layer_in_place(plan: MemoryPlan, layer: int) -> bool:
    spec = plan.config.layer(layer)
    return spec.latent is None and (not isinstance(spec.mixer, AttentionSpec) or _read_in_place(plan, spec.mixer))


def dense_cache_bytes(plan: MemoryPlan) -> int:
    # One layer's keys and values, converted or gathered for the attention of a prompt.
    read_in_place = plan.kv == "auto" or (plan.kv == "bf16" and plan.value_bytes == 2)
    if read_in_place and plan.batch == 1:
        return 0
    layers = [layer for layer in range(plan.config.layers) if not _layer_in_place(plan, layer)]
    largest = max((sum(map(prod, plan.config.cache_shapes(layer))) for layer in layers), default=0)
    return largest * cache_positions(plan.context) * plan.value_bytes


def mask_bytes(plan: MemoryPlan) -> int:
    if plan.config.bidirectional:
        return _whole_text_bytes(plan)
    return _gpu_mask_bytes(plan) if plan.gpu else _cpu_mask_bytes(plan)


def _whole_text_bytes(plan: MemoryPlan) -> int:
    # Each length has a boolean mask for each window, of which one is computed from distances in 4 bytes and later also
    # in the dtype of activations, and biases of the scores for each head, from distances in 8 bytes, five at a time.
    config, square = plan.config, plan.context**2
    pairs = plan.context * plan.chunk  # no less than the sum of the squared lengths in a pass
    windows = [window for window in config.distinct_windows if window is not None and window < plan.context]
    masks = len(windows) * pairs + (4 * square if windows else 0)
    if config.positions is None or config.positions.distances is None:
        return masks
    return masks + config.heads * pairs * plan.value_bytes + 5 * 8 * square


def _gpu_mask_bytes(plan: MemoryPlan) -> int:
    # Where the kernel for prompts does not attend, windows and chunks have masks: a boolean one each over the keys that
    # a pass sees, one at a time also in the dtype of activations, with keys and values repeated for all heads. Softcaps
    # and sinks write out scores three times in fp32, for the query heads of one KV head, with a boolean mask. Latent
    # attention writes out those of one head five times: those of the head before are still held.
    def keys(spec: AttentionSpec) -> int:
        return plan.context if spec.window is None else min(plan.context, spec.window + plan.chunk - 1)

    every = [spec for spec in plan.config.attentions if isinstance(spec, AttentionSpec)]
    specs = [spec for spec in every if not _read_in_place(plan, spec)]
    windowed = [spec for spec in specs if (spec.window or spec.chunk or plan.context) < plan.context]
    masks = sum({(spec.window, spec.chunk): keys(spec) for spec in windowed}.values()) * plan.chunk
    largest = max(map(keys, windowed), default=0) * plan.chunk * plan.value_bytes
    repeated = [2 * spec.heads * spec.head_dim * keys(spec) * plan.value_bytes for spec in windowed]
    written = [spec for spec in specs if spec.softcap is not None or spec.sinks is not None]
    scores = [keys(spec) * plan.chunk * (3 * 4 * (spec.heads // spec.kv_heads) + 1) for spec in written]
    if any(spec.latent is not None for spec in plan.config.layer_specs):
        scores.append(plan.context * plan.chunk * (5 * 4 + 1))
    return masks + largest + max(repeated, default=0) + max(scores, default=0)


def _cpu_mask_bytes(plan: MemoryPlan) -> int:
    # Each distinct window has a boolean mask and one in the dtype of activations. Capped scores are written out three
    # times in fp32, for the query heads of one KV head. The first chunk needs no mask.
    config = plan.config
    capped = [spec for spec in config.attentions if spec.softcap is not None]
    scores = 3 * 4 * max((spec.heads // spec.kv_heads for spec in capped), default=0)
    if plan.context == plan.chunk:
        return plan.chunk * plan.context * scores
    return plan.chunk * plan.context * (len(config.distinct_windows) + plan.value_bytes + scores)
