"""One decoder layer: its parts in order, each a generator of products; see `LayerSpec`."""

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional

from mycli.runtime.kernels.registry import ACTIVATION, ROW_WEIGHTS
from mycli.runtime.layers.feed_forward import Experts, Mlp
from mycli.runtime.layers.latent import LatentAttention
from mycli.runtime.layers.layer_part import LayerPart, PassContext, Steps, complete
from mycli.runtime.layers.linear import Linear, load_linears
from mycli.runtime.layers.norm import RMSNorm, make_norm, normed
from mycli.runtime.layers.recurrent import make_mixer
from mycli.runtime.layers.rope import rotate
from mycli.runtime.layers.weights import CheckpointWeights
from mycli.runtime.models.experts_spec import ExpertsSpec
from mycli.runtime.models.latent_spec import LatentAttentionSpec
from mycli.runtime.models.layer_spec import LaurelSpec, LayerSpec, PerLayerSpec, StreamsSpec
from mycli.runtime.models.part_spec import AttentionSpec, MlpSpec
from mycli.runtime.models.recurrent_spec import RecurrentSpec
from mycli.runtime.utils.dtypes import PromptCopy

if TYPE_CHECKING:
    from mycli.runtime.layers.heads import DifferentialHeads, KeyBias
    from mycli.runtime.layers.streamed_experts import ExpertReads


class Attention(LayerPart):
    sums_last_product = True

    def __init__(self, spec: AttentionSpec, layer: int) -> None:
        super().__init__(spec, spec.normed_residual)
        self.spec = spec
        self._layer = layer
        self.qkv = Linear(spec.products()["qkv"], stacked_on_gpu=True)
        self.q_norm = make_norm(spec.q_norm)
        self.k_norm = make_norm(spec.k_norm)
        self.v_norm = make_norm(spec.v_norm)
        self.inner_norm = make_norm(spec.inner_norm)
        self.o = Linear((spec.o,))
        self.products = (self.qkv, self.o)
        self.head_gate = None if spec.head_gate is None else Linear((spec.head_gate.linear,))
        self.differential: DifferentialHeads | None = None
        self.key_bias: KeyBias | None = None
        if spec.differential is not None or spec.key_bias is not None:
            from mycli.runtime.layers import heads  # two families have them

            self.differential = None if spec.differential is None else heads.DifferentialHeads(spec, spec.differential)
            self.key_bias = None if spec.key_bias is None else heads.KeyBias(spec, spec.key_bias)
        dense = (self.head_gate, None if self.key_bias is None else self.key_bias.linear)
        self.unquantized = tuple(linear for linear in dense if linear is not None)
        self.sinks: Tensor | None = None

    def load_own(self, weights: CheckpointWeights) -> None:
        super().load_own(weights)
        if self.spec.sinks is not None:
            self.sinks = weights.read(self.spec.sinks, torch.float32)
        for rearranged in (self.differential, self.key_bias):
            if rearranged is not None:
                rearranged.load(weights)

    @property
    def kv_layer(self) -> int:
        """Index of the layer whose keys and values this layer reads."""
        return self._layer if self.spec.kv_source is None else self.spec.kv_source

    def inner(self, x: Tensor, context: PassContext) -> Steps:
        projected = yield self.qkv, x
        gate = None if self.head_gate is None else self.head_gate(x)
        del x
        if self.spec.value_gate is not None:
            width = self.spec.value_gate.linear.out_features
            projected, gate = projected[..., :-width], projected[..., -width:]
        attended = self._split_and_attend(projected, context)
        del projected
        if gate is not None:
            attended = self._gated(attended, gate)
        if self.inner_norm is not None:
            shape, size = attended.shape, self.inner_norm.spec.size
            attended = self.inner_norm(attended.reshape(*shape[:-1], -1, size)).view(shape)
        return (yield self.o, attended)

    def _gated(self, attended: Tensor, gate: Tensor) -> Tensor:
        spec = self.spec
        assert spec.gate is not None
        if spec.head_gate is not None:
            gate = gate.repeat_interleave(attended.shape[-1] // spec.heads, dim=-1)
        if spec.gate.activation == "sigmoid":
            return ROW_WEIGHTS(attended, gate)
        return attended * functional.softplus(gate.float()).to(attended.dtype)

    def _split_and_attend(self, projected: Tensor, context: PassContext) -> Tensor:
        spec = self.spec
        if spec.value_dim is not None:
            projected = self._padded_values(projected, spec.value_dim)
        heads = projected.view(*projected.shape[:2], -1, spec.projected_dim)
        query, key_value = heads[:, :, : spec.query_heads], heads[:, :, spec.query_heads :]
        if spec.value_dim is not None:
            attended = self._attend(query, key_value, context)
            return attended.view(*attended.shape[:2], spec.heads, -1)[..., : spec.value_dim].flatten(-2)
        if spec.gated:
            query, gate = query.reshape(*query.shape[:2], spec.heads, 2, spec.head_dim).unbind(3)
            return ROW_WEIGHTS(self._attend(query, key_value, context), gate.flatten(2))
        return self._attend(query, key_value, context)

    def _padded_values(self, projected: Tensor, value_dim: int) -> Tensor:
        # One size for keys and values: all kernels and caches take it, and zeros change no sum.
        width = self.spec.kv_heads * value_dim
        values = projected[..., -width:].view(*projected.shape[:2], self.spec.kv_heads, value_dim)
        padded = functional.pad(values, (0, self.spec.projected_dim - value_dim)).flatten(-2)
        return torch.cat((projected[..., :-width], padded), dim=-1)

    def _attend(self, query: Tensor, key_value: Tensor, context: PassContext) -> Tensor:
        spec = self.spec
        query = self._norm_and_rotate(query, self.q_norm, context)
        if spec.rope is not None and (scale := context.rope[spec.rope].query_scale) is not None:
            query = query * scale[:, None, None]
        if spec.kv_source is not None:
            return context.attention.attend(self._layer, query, None, spec, self.sinks)
        key, value = key_value.tensor_split(2, dim=2) if spec.has_v_proj else (key_value, key_value)
        value = _norm_heads(self.v_norm, value)
        value = value if spec.value_scale == 1.0 else value * spec.value_scale
        value = value if spec.clip is None else value.clamp(-spec.clip, spec.clip)
        key = self._norm_and_rotate(key, self.k_norm, context)
        if self.differential is not None:
            query, key, value = self.differential.arranged(query, key, value)
        if self.key_bias is not None:
            query, key, value = self.key_bias.extended(query, key, value)
        attended = context.attention.attend(self._layer, query, (key, value), spec, self.sinks)
        if self.key_bias is not None:
            return self.key_bias.values(attended)
        return attended if self.differential is None else self.differential.difference(attended)

    def _norm_and_rotate(self, x: Tensor, norm: RMSNorm | None, context: PassContext) -> Tensor:
        if not self.spec.norm_after_rope:
            x = _norm_heads(norm, x)
        if self.spec.clip is not None:
            x = x.clamp(-self.spec.clip, self.spec.clip)
        if self.spec.rope is not None:
            tables = context.rope[self.spec.rope]
            x = rotate(x, tables.cos, tables.sin, tables.interleaved)
        return _norm_heads(norm, x) if self.spec.norm_after_rope else x


def _norm_heads(norm: RMSNorm | None, x: Tensor) -> Tensor:
    if norm is None or norm.spec.size == x.shape[-1]:
        return normed(norm, x)
    return normed(norm, x.flatten(-2)).view_as(x)


class Recurrent(LayerPart):
    sums_last_product = True

    def __init__(self, spec: RecurrentSpec, layer: int) -> None:
        super().__init__(spec)
        self.mixer = make_mixer(spec, layer)
        self.layer = layer
        self.products = (self.mixer.projection, self.mixer.out)
        self.unquantized = self.mixer.unquantized

    def load_own(self, weights: CheckpointWeights) -> None:
        super().load_own(weights)
        self.mixer.load(weights)

    def inner(self, x: Tensor, context: PassContext) -> Steps:
        projected = yield self.mixer.projection, x
        mixed = self.mixer(x, projected, context.states)
        del x, projected
        return (yield self.mixer.out, mixed)


class PerLayer(LayerPart):
    """The gated per-layer input of Gemma 3n and 4, as a `PerLayerSpec` declares it."""

    def __init__(self, spec: PerLayerSpec, layer: int) -> None:
        super().__init__(spec)
        self.spec, self.layer = spec, layer
        self.gate = Linear((spec.gate,))
        self.projection = Linear((spec.projection,))
        self.products = (self.gate, self.projection)
        self._activate = ACTIVATION[spec.activation, True]

    def inner(self, x: Tensor, context: PassContext) -> Steps:
        assert context.per_layer_inputs is not None
        gate = yield self.gate, x
        del x
        activated = self._activate(torch.cat((gate, context.per_layer_inputs(self.layer)), dim=-1))
        return (yield self.projection, activated)


class Parallel:
    """Attention, and an MLP, experts or a recurrent mixer, that read the same input; both outputs are added to it.

    The other part reads it through a norm of its own if it has one, as recurrent mixers do, else through attention's.
    """

    def __init__(self, attention: Attention, other: Mlp | Experts | Recurrent) -> None:
        self.attention, self.other = attention, other
        self.products = (*attention.products, *other.products)

    def steps(self, x: Tensor, context: PassContext) -> Steps:
        entering = normed(self.attention.norm, x)
        attended = yield from self.attention.inner(entering, context)
        if self.other.norm is not None:
            entering = self.other.norm(x)
        other = yield from self.other.inner(entering, context)
        return self.other.sum(self.attention.sum(x, attended), other)


class AlternatingUpdates(nn.Module):
    """The parts of a layer with several residual streams, of which they read and change one; see `StreamsSpec`."""

    def __init__(
        self, spec: StreamsSpec, laurel: LaurelSpec, attention: Attention, mlp: Mlp | Experts, per_layer: PerLayer
    ) -> None:
        super().__init__()
        self.spec = spec
        self.attention, self.mlp, self.per_layer = attention, mlp, per_layer
        self.laurel_norm, self.norm = RMSNorm(laurel.norm), RMSNorm(spec.norm)
        self.left, self.right = Linear((laurel.left,)), Linear((laurel.right,))
        self.router, self.prediction, self.correction = (Linear((linear,)) for linear in spec.linears)
        self.scale: Tensor | None = None
        self.products = (*attention.products, *mlp.products, *per_layer.products)
        self.unquantized = (self.left, self.right, self.router, self.prediction, self.correction)

    def load_own(self, weights: CheckpointWeights) -> None:
        """Read the tensors that belong to none of the parts."""
        for linear in self.unquantized:
            linear.load(weights, dense=True)
        if self.spec.scales:
            self.scale = weights.read(self.spec.scale)

    def steps(self, x: Tensor, context: PassContext) -> Steps:
        """Yield the products of all parts; x: the streams side by side, [sequences, tokens, count * hidden]."""
        predicted = self._predict(x.view(*x.shape[:-1], self.spec.count, -1))
        del x
        active = predicted[..., self.spec.active, :]
        entering = normed(self.attention.norm, active)
        attended = yield from self.attention.inner(entering, context)
        laurel = entering + self.laurel_norm(self.right(self.left(entering)))
        output = yield from self.mlp.steps((self.attention.sum(active, attended) + laurel) * 2.0**-0.5, context)
        change = (output - active).float().unsqueeze(-2)
        corrected = predicted.float() + (self._coefficients(output, self.correction) + 1.0).unsqueeze(-1) * change
        corrected = corrected.to(output.dtype)
        gating = corrected[..., self.spec.active, :]
        added = yield from self.per_layer.inner(gating if self.scale is None else gating * self.scale, context)
        others = corrected[..., 1:, :] + normed(self.per_layer.output_norm, added).unsqueeze(-2)
        return torch.cat((corrected[..., :1, :], others), dim=-2).flatten(-2)

    def _predict(self, streams: Tensor) -> Tensor:
        count, active = self.spec.count, streams[..., self.spec.active, :]
        coefficients = self._coefficients(active, self.prediction)
        coefficients = coefficients.view(*coefficients.shape[:-1], count, count)
        total = streams.float()
        for index in range(count):
            total = total + coefficients[..., index, None] * streams[..., None, index, :].float()
        return total.to(streams.dtype)

    def _coefficients(self, x: Tensor, linear: Linear) -> Tensor:
        # Stream by stream, here and above: the bits of a row must not depend on the others, and products of so few
        # inputs have no kernel that promises that.
        routed = torch.tanh(self.router(normed(self.norm, x)).float())
        weight = linear.weight().float()
        products = [routed[..., index, None] * weight[:, index] for index in range(self.spec.count)]
        return sum(products[1:], products[0])


BlockPart = LayerPart | Parallel | AlternatingUpdates


def _mixer(spec: LayerSpec) -> Attention | LatentAttention | Recurrent | None:
    if isinstance(spec.mixer, AttentionSpec):
        return Attention(spec.mixer, spec.index)
    if isinstance(spec.mixer, LatentAttentionSpec):
        return LatentAttention(spec.mixer, spec.index)
    return None if spec.mixer is None else Recurrent(spec.mixer, spec.index)


def _second_half(spec: LayerSpec, streamed: "tuple[int, ExpertReads] | None") -> Mlp | Experts | None:
    if spec.mlp is None:
        return None
    if isinstance(spec.mlp, MlpSpec):
        return Mlp(spec.mlp)
    if streamed is not None and streamed[0] < len(spec.mlp.experts):
        from mycli.runtime.layers.streamed_experts import StreamedExperts

        return StreamedExperts(spec.mlp, *streamed)
    return Experts(spec.mlp)


class Block(nn.Module):
    """One layer: `parts` in order, `products` by name in order of execution, `norms` that have a tensor."""

    def __init__(self, spec: LayerSpec, streamed: "tuple[int, ExpertReads] | None" = None) -> None:
        """streamed: number of experts kept in memory, and the counts of reading the others; None keeps all."""
        super().__init__()
        self.spec = spec
        self.mixer = _mixer(spec)
        self.state_space = None if spec.state_space is None else Recurrent(spec.state_space, spec.index)
        self.mlp = _second_half(spec, streamed)
        self.per_layer = None if spec.per_layer is None else PerLayer(spec.per_layer, spec.index)
        first: tuple[BlockPart | None, ...] = (self.mixer, self.mlp)
        if spec.parallel or self.state_space is not None:
            other = self.mlp if self.state_space is None else self.state_space
            assert isinstance(self.mixer, Attention) and other is not None
            first = (Parallel(self.mixer, other), None if spec.parallel else self.mlp)
        self.streams = None
        if spec.streams is not None:
            assert isinstance(self.mixer, Attention) and spec.laurel and self.mlp and self.per_layer
            self.streams = AlternatingUpdates(spec.streams, spec.laurel, self.mixer, self.mlp, self.per_layer)
        parts = (*first, self.per_layer) if self.streams is None else (self.streams,)
        self.parts = tuple(part for part in parts if part is not None)
        linears = [linear for part in self.parts for linear in part.products]
        self.products = dict(zip(spec.products(), linears, strict=True))
        named = {norm.spec: norm for norm in self._norms()}
        self.norms = [named[norm] for norm in spec.norms()]

    def _norms(self) -> Iterator[RMSNorm]:
        return (module for module in self.modules() if isinstance(module, RMSNorm))

    def keep_prompt_copies(self, kind: PromptCopy, dtype: torch.dtype) -> int:
        """Keep copies of packed weights for prompts; return how many products have none."""
        return sum(not linear.keep_prompt_copy(kind, dtype) for linear in self.products.values())

    def load(self, weights: CheckpointWeights) -> None:
        modules = (self.mixer, self.state_space, self.mlp, self.per_layer)
        parts = [part for part in modules if part is not None]
        for norm in self._norms():
            norm.load(weights)
        resident = (linear for part in parts for linear in part.resident_products)
        load_linears(resident, weights)
        for part in parts:
            part.load_own(weights)
        if self.streams is not None:
            self.streams.load_own(weights)
        for part, name in zip(parts, self.spec.residual_gains or (), strict=False):
            part.gain = weights.read(name)
        if self.spec.layer_scalar is not None:
            parts[-1].scalar = weights.read(self.spec.layer_scalar)

    def freeze(self) -> None:
        """Prepare the weights of experts and of latent attention, which do not change from now on."""
        if isinstance(self.mlp, Experts):
            self.mlp.freeze()
        if isinstance(self.mixer, LatentAttention):
            self.mixer.freeze()

    @property
    def early_router(self) -> bool:
        return isinstance(self.spec.mlp, ExpertsSpec) and self.spec.mlp.early_router

    def routed(self, x: Tensor, context: PassContext) -> PassContext:
        """Return the context of this layer's parts, for the residual stream x that enters the layer."""
        if not (self.early_router and isinstance(self.mlp, Experts)):
            return context
        return replace(context, route=self.mlp.route(x.reshape(-1, x.shape[-1])))

    def forward(self, x: Tensor, context: PassContext) -> Tensor:
        context = self.routed(x, context)
        for part in self.parts:
            x = complete(part.steps(x, context))
        return x
