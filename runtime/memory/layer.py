"""Counts the values per token that a pass over one layer holds, from the layer's declaration."""

from mycli.runtime.models.experts_spec import ExpertsSpec
from mycli.runtime.models.layer_spec import LayerSpec
from mycli.runtime.models.part_spec import AttentionSpec


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
    shared = 0 if spec.shared is None else max(4 * spec.shared.mlp.size, 2 * hidden)
    return 2 * len(spec.experts) + max(pairs + (hidden if shared else 0), shared + hidden)
