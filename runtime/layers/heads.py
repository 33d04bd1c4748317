"""Arranges heads so that kernels and caches of plain attention compute other kinds."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from mycli.runtime.layers.linear import Linear
from mycli.runtime.layers.weights import CheckpointWeights
from mycli.runtime.models.part_spec import KEY_BIAS_WIDTH, AttentionSpec, DifferentialSpec, KeyBiasSpec


class DifferentialHeads:
    """The pairs of heads of a `DifferentialSpec`, each a head of twice the size; see `AttentionSpec`.

    A pair of keys lies side by side, and so do its values. A query is zero next to the key that it does not belong to.
    Half of the products of queries and keys are with zeros; in return each value is cached and read once.
    """

    def __init__(self, spec: AttentionSpec, differential: DifferentialSpec) -> None:
        self.spec, self.differential = spec, differential
        self._subtracted = 0.0

    def load(self, weights: CheckpointWeights) -> None:
        q_1, k_1, q_2, k_2 = (weights.checkpoint.read(name).float() for name in self.differential.lambdas)
        difference = torch.exp((q_1 * k_1).sum()) - torch.exp((q_2 * k_2).sum())
        self._subtracted = float(difference) + self.differential.initial

    def arranged(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return rotated queries, keys and values [sequences, tokens, heads, head_dim / 2] as pairs."""
        pairs, size = self.spec.kv_heads, self.spec.projected_dim
        outer = query.shape[:2]
        first, second = query.view(*outer, 2, pairs, -1, size).unbind(2)
        both = torch.stack((functional.pad(first, (0, size)), functional.pad(second, (size, 0))), dim=3)
        key, value = (heads.view(*outer, 2, pairs, size).transpose(2, 3).flatten(3) for heads in (key, value))
        return both.flatten(2, 4), key, value

    def difference(self, attended: Tensor) -> Tensor:
        """Return the difference of the outputs of each pair of queries: [sequences, tokens, heads * head_dim / 2]."""
        first, second = attended.view(*attended.shape[:-1], self.spec.kv_heads, 2, -1).unbind(-2)
        return (first - self._subtracted * second).flatten(2)


class KeyBias(nn.Module):
    """The biases of a `KeyBiasSpec`, as a further value of each key, which a constant of every query multiplies."""

    def __init__(self, spec: AttentionSpec, bias: KeyBiasSpec) -> None:
        super().__init__()
        self.spec, self.bias = spec, bias
        self.linear = Linear((bias.linear,))
        assert spec.scale is not None
        # A power of two: exact in every dtype. The stored biases have the size of a normed key's values.
        self._constant = 2.0 ** round(-math.log2(spec.scale))
        self._stored = 1.0 / (spec.scale * self._constant)
        self._rate = torch.empty(spec.kv_heads, device="meta")

    def load(self, weights: CheckpointWeights) -> None:
        self._rate = weights.read(self.bias.rate, torch.float32)

    def extended(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values with `KEY_BIAS_WIDTH` further values."""
        # In fp64: the last bits of vectorized fp32 functions depend on where a value lies in its tensor.
        steps = functional.softplus(self.linear(value.flatten(2)).double())
        biases = (torch.exp(self._rate * steps) * self._stored).to(key.dtype).unsqueeze(-1)
        constant = query.new_full((*query.shape[:-1], 1), self._constant)
        more = (0, KEY_BIAS_WIDTH - 1)
        keys = torch.cat((key, functional.pad(biases, more)), dim=-1)
        queries = torch.cat((query, functional.pad(constant, more)), dim=-1)
        return queries, keys, functional.pad(value, (0, KEY_BIAS_WIDTH))

    def values(self, attended: Tensor) -> Tensor:
        """Return the outputs [sequences, tokens, heads * head_dim] without the further values."""
        heads = attended.view(*attended.shape[:-1], self.spec.heads, self.spec.head_dim)
        return heads[..., : self.spec.projected_dim].flatten(-2)
