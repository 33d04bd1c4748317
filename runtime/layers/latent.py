"""Multi-head latent attention (MLA, arXiv 2405.04434): all heads read one cached latent vector per token.

Passes over a cache multiply queries by the key rows of kv_b and attend to the latents themselves, prompts and replies
alike: a row's bits then depend on neither. Whole prompts without a cache, as in calibration, expand keys and values.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from mycli.runtime.kernels.reference import DenseMatmul
from mycli.runtime.kernels.registry import HEAD_PRODUCT, PORTABLE_HEAD_PRODUCT, ROW_WEIGHTS
from mycli.runtime.layers.attention import PromptAttention
from mycli.runtime.layers.layer_part import LayerPart, PassContext, Steps
from mycli.runtime.layers.linear import Linear
from mycli.runtime.layers.norm import RMSNorm, make_norm, normed
from mycli.runtime.layers.rope import rotate
from mycli.runtime.models.latent_spec import LatentAttentionSpec


@dataclass(frozen=True)
class AbsorbedWeight:
    """kv_b as decoding multiplies it: `keys` [heads, rank, nope_dim], `values` [heads, value_dim, rank]; a `Matmul`."""

    keys: Tensor
    values: Tensor

    @classmethod
    def of(cls, weight: Tensor, spec: LatentAttentionSpec) -> "AbsorbedWeight":
        heads = weight.reshape(spec.heads, spec.nope_dim + spec.value_dim, spec.rank)
        keys, values = heads[:, : spec.nope_dim], heads[:, spec.nope_dim :]
        return cls(keys.transpose(1, 2).contiguous(), values.contiguous())

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        return torch.nn.functional.linear(x, self.dequantize())

    # The layout that replaces kv_b is exact, so nothing is lost for those that read the linear's weight.
    def dequantize(self) -> Tensor:
        return torch.cat((self.keys.transpose(1, 2), self.values), dim=1).flatten(0, 1)


class LatentAttention(LayerPart):
    """The attention that a `LatentAttentionSpec` declares."""

    sums_last_product = True

    def __init__(self, spec: LatentAttentionSpec, layer: int) -> None:
        super().__init__(spec)
        self.spec = spec
        self.layer = layer
        self.inputs = Linear(spec.inputs)
        self.q_norm = make_norm(spec.q_norm)
        self.q_b = None if spec.q_b is None else Linear((spec.q_b,))
        self.kv_norm = RMSNorm(spec.kv_norm)
        self.kv_b = Linear((spec.kv_b,))
        self.o = Linear((spec.o,))
        self.gate = None if spec.gate is None else Linear((spec.gate,))
        self.unquantized = () if self.gate is None else (self.gate,)
        query = () if self.q_b is None else (self.q_b,)
        self.products = (self.inputs, *query, self.kv_b, self.o)

    def freeze(self) -> None:
        """Keep kv_b as decoding multiplies it, and only so; the weights do not change from now on."""
        self.kv_b.replace(self.absorbed)

    @property
    def kv_layer(self) -> int:
        """Index of the layer whose latents this layer reads: its own."""
        return self.layer

    @property
    def absorbed(self) -> AbsorbedWeight:
        matmul = self.kv_b.matmul
        if isinstance(matmul, AbsorbedWeight):
            return matmul
        # Not frozen, as in tests and under quantization: computed from the weights as they are now.
        dtype = self.kv_norm.weight.dtype
        if dtype == torch.float32 and not isinstance(matmul, DenseMatmul):
            # Decoded weights have the dtype of their scales, of 11 bits in a GGUF file; products by fp32 are exact.
            unit = torch.eye(self.spec.rank, device=self.kv_norm.weight.device)
            return AbsorbedWeight.of(self.kv_b(unit).T, self.spec)
        # Decoded weights may be fp32, whatever the dtype of activations.
        return AbsorbedWeight.of(self.kv_b.weight().to(dtype), self.spec)

    def inner(self, x: Tensor, context: PassContext) -> Steps:
        projected = yield self.inputs, x
        query, latent, rotated = self._split(projected)
        if self.q_b is not None:
            query = yield self.q_b, normed(self.q_norm, query)
        query_rest, query_rotated = self._rotated_query(query, context)
        latent, rotated = self.kv_norm(latent), self._rotate(rotated.unsqueeze(2), context).squeeze(2)
        # Whole prompts expand: calibration needs the input of kv_b and gradients, and makes no promise about bits.
        # Passes over a cache absorb, prompts too: expanding those would be 3.4 times as fast in attention for DeepSeek,
        # but a prompt's rows would then have other bits than the same rows after a prefix hit or as drafts.
        if isinstance(context.attention, PromptAttention):
            latent, rotated = context.attention.cached(latent), context.attention.cached(rotated)
            expanded = yield self.kv_b, latent
            query = torch.cat((query_rest, query_rotated), dim=-1)
            attended = context.attention.attend_expanded(self.spec, query, expanded, rotated)
        else:
            attended = self._attend_absorbed(query_rest, query_rotated, latent, rotated, context)
        if self.gate is not None:
            weights = self.gate(x).repeat_interleave(self.spec.value_dim, dim=-1)
            attended = ROW_WEIGHTS(attended, weights)
        return (yield self.o, attended)

    def _split(self, projected: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        spec = self.spec
        width = spec.inputs[0].out_features
        query, latent, rotated = torch.split(projected, [width, spec.rank, spec.rope_dim], dim=-1)
        return query, latent, rotated

    def _rotated_query(self, query: Tensor, context: PassContext) -> tuple[Tensor, Tensor]:
        spec = self.spec
        heads = query.view(*query.shape[:2], spec.heads, spec.head_dim)
        if spec.rope is not None and (scale := context.rope[spec.rope].query_scale) is not None:
            heads = heads * scale[:, None, None]
        rest, rotated = torch.split(heads, [spec.nope_dim, spec.rope_dim], dim=-1)
        return rest, self._rotate(rotated, context)

    def _rotate(self, x: Tensor, context: PassContext) -> Tensor:
        if self.spec.rope is None:
            return x
        tables = context.rope[self.spec.rope]
        return rotate(x, tables.cos, tables.sin, tables.interleaved)

    def _attend_absorbed(
        self, query_rest: Tensor, query_rotated: Tensor, latent: Tensor, rotated: Tensor, context: PassContext
    ) -> Tensor:
        weight = self.absorbed
        multiply = PORTABLE_HEAD_PRODUCT if self.o.portable else HEAD_PRODUCT
        query = multiply(query_rest[0], weight.keys)
        read = context.attention.attend_latent(
            self.layer, self.spec, (query, query_rotated[0]), (latent[0], rotated[0])
        )
        return multiply(read, weight.values).flatten(1)[None]
