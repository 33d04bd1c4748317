"""Counts the weights of one layer, and the values per token that a pass over it holds, from its declaration."""

from math import prod

from mycli.runtime.models.experts_spec import ExpertsSpec
from mycli.runtime.models.layer_spec import LayerSpec


def weight_values(layer: LayerSpec) -> int:
    return sum(prod(shape) for _, shape in layer.tensors())


def _heads(layer: LayerSpec) -> tuple[int, int]:
    attention = layer.attention
    return attention.query_heads * attention.head_dim, attention.kv_heads * attention.head_dim


def pass_values(layer: LayerSpec) -> int:
    """Return the values per token at the peak of a forward pass."""
    hidden = _hidden(layer)
    if layer.recurrent is not None:
        mixer = layer.recurrent.forward_values()
    else:
        query, key = _heads(layer)
        # q, k, v as projected; q and k rotated; the output of the heads; the projected output
        mixer = (query + 2 * key) + (query + key) + query + hidden
    # MLP: gate and up; silu(gate); their product; the output
    mlp = _expert_values(layer.mlp, hidden) if isinstance(layer.mlp, ExpertsSpec) else 4 * layer.mlp.size + hidden
    waiting = hidden if layer.parallel else 0  # the attention output is added after the MLP
    # The residual stream, its normalized copy, and the larger of mixer and MLP: one is freed before the other begins.
    return 2 * hidden + waiting + max(mixer, mlp)


def _hidden(layer: LayerSpec) -> int:
    return (layer.attention.o if layer.recurrent is None else layer.recurrent.out).out_features


def _expert_values(spec: ExpertsSpec, hidden: int) -> int:
    # Scores in two dtypes; for each (token, expert) pair gate, up and their product, or product and output; the sums;
    # the output of the shared expert.
    pairs = spec.top_k * max(3 * spec.size, spec.size + hidden) + hidden
    shared = 0 if spec.shared is None else max(4 * spec.shared.mlp.size, 2 * hidden)
    return 2 * len(spec.experts) + max(pairs + (hidden if shared else 0), shared + hidden)


def inner_width(layer: LayerSpec) -> int:
    """Return the MLP's intermediate size, summed over the experts that one token uses."""
    if not isinstance(layer.mlp, ExpertsSpec):
        return layer.mlp.size
    shared = 0 if layer.mlp.shared is None else layer.mlp.shared.mlp.size
    return layer.mlp.top_k * layer.mlp.size + shared


def observed_values(layer: LayerSpec, product: str) -> int:
    """Return the values per token while the inputs of a product are collected in two models."""
    hidden, inner = _hidden(layer), inner_width(layer)
    product = product.rpartition(".")[2]  # all tokens may go to one expert
    if layer.recurrent is not None:
        mixer, mixed = layer.recurrent.forward_values(), layer.recurrent.out.in_features
    else:
        query, key = _heads(layer)
        mixer, mixed = query + 2 * key + 3 * query, hidden
    per_layer = 0 if layer.per_layer is None else layer.per_layer.gate.out_features
    # Values that the product's input is computed from, and the width of that input; it is squared and summed in fp32.
    sources = {"qkv": hidden, "o": mixer, "gate_up": mixer, "down": 4 * inner, "per_layer_gate": 4 * inner}
    sources |= {"recurrent_in": hidden, "recurrent_out": mixer}
    width = {"down": inner, "per_layer_projection": per_layer, "recurrent_out": mixed}.get(product, hidden)
    return 2 * hidden + max(width + sources.get(product, 4 * per_layer), 5 * width)


def trained_values(layer: LayerSpec) -> int:
    """Return the values per token of a forward and backward pass: saved activations and the widest gradients."""
    hidden = _hidden(layer)
    if layer.recurrent is not None:
        return 12 * hidden + layer.recurrent.training_values() + 8 * inner_width(layer)
    query, key = _heads(layer)
    return 12 * hidden + 5 * query + 8 * key + 8 * inner_width(layer)
