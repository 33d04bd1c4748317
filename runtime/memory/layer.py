"""How many values one layer holds, and how many a pass over it keeps alive for each token, by its declaration.

The one place where these sums are made: the estimate, the preflight of a load, and the plan of a quantization multiply
them by tokens and bytes. Knows a `LayerSpec`. Does not import torch.
"""

from math import prod

from mycli.runtime.models.experts_spec import ExpertsSpec
from mycli.runtime.models.layer_spec import LayerSpec


def weight_values(layer: LayerSpec) -> int:
    """All of its tensors, unquantized."""
    return sum(prod(shape) for _, shape in layer.tensors())


def _heads(layer: LayerSpec) -> tuple[int, int]:
    """Widths of all query heads and of all key heads."""
    attention = layer.attention
    return attention.query_heads * attention.head_dim, attention.kv_heads * attention.head_dim


def pass_values(layer: LayerSpec) -> int:
    """Of each token at the peak of a pass: the residual stream, its normed copy, and the larger half.

    Attention: q, k, v as projected; q and k rotated; the heads' output; the projected output.
    MLP: gate and up; silu(gate); their product; the output.
    """
    hidden = _hidden(layer)
    if layer.recurrent is not None:
        mixer = layer.recurrent.forward_values()
    else:
        query, key = _heads(layer)
        mixer = (query + 2 * key) + (query + key) + query + hidden
    mlp = _expert_values(layer.mlp, hidden) if isinstance(layer.mlp, ExpertsSpec) else 4 * layer.mlp.size + hidden
    beside = hidden if layer.parallel else 0  # what attention made waits for the MLP
    return 2 * hidden + beside + max(mixer, mlp)


def _hidden(layer: LayerSpec) -> int:
    return (layer.attention.o if layer.recurrent is None else layer.recurrent.out).out_features


def _expert_values(spec: ExpertsSpec, hidden: int) -> int:
    """Of each token at the peak of a pass through experts: scores in two types, and of each pair gate and up and what
    becomes of them, or that and its output, or that and the sums; beside them what the shared expert made."""
    pairs = spec.top_k * max(3 * spec.size, spec.size + hidden) + hidden
    shared = 0 if spec.shared is None else max(4 * spec.shared.mlp.size, 2 * hidden)
    return 2 * len(spec.experts) + max(pairs + (hidden if shared else 0), shared + hidden)


def inner_width(layer: LayerSpec) -> int:
    """How many values a token has between the products of the MLP, of all the experts that it goes through together."""
    if not isinstance(layer.mlp, ExpertsSpec):
        return layer.mlp.size
    shared = 0 if layer.mlp.shared is None else layer.mlp.shared.mlp.size
    return layer.mlp.top_k * layer.mlp.size + shared


def observed_values(layer: LayerSpec, product: str) -> int:
    """Of each token while a product's inputs are observed in two models: the inputs, what made the last of them, and
    what becomes of them before they are summed."""
    hidden, inner = _hidden(layer), inner_width(layer)
    product = product.rpartition(".")[2]  # at most all tokens go to one expert
    if layer.recurrent is not None:
        mixer, mixed = layer.recurrent.forward_values(), layer.recurrent.out.in_features
    else:
        query, key = _heads(layer)
        mixer, mixed = query + 2 * key + 3 * query, hidden
    told = 0 if layer.per_layer is None else layer.per_layer.gate.out_features
    made = {"qkv": hidden, "o": mixer, "gate_up": mixer, "down": 4 * inner, "per_layer_gate": 4 * inner}
    made |= {"recurrent_in": hidden, "recurrent_out": mixer}
    width = {"down": inner, "per_layer_projection": told, "recurrent_out": mixed}.get(product, hidden)
    return 2 * hidden + max(width + made.get(product, 4 * told), 5 * width)


def trained_values(layer: LayerSpec) -> int:
    """Of each token in a forward and backward pass: all that is saved from norm to norm, and the gradients of the
    widest part."""
    hidden = _hidden(layer)
    if layer.recurrent is not None:
        return 12 * hidden + layer.recurrent.training_values() + 8 * inner_width(layer)
    query, key = _heads(layer)
    return 12 * hidden + 5 * query + 8 * key + 8 * inner_width(layer)
