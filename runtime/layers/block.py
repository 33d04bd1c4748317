"""One decoder layer, written once: its parts as sequences of products that whoever runs them multiplies.

What it is made of is its `LayerSpec`. Does not know caches' insides, batches or kernels.
"""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from mycli.runtime.checkpoint.reader import Checkpoint
from mycli.runtime.kernels.cpu.layer import CAttentionPart, CParallelPart, CPart, CPerLayerPart
from mycli.runtime.kernels.registry import ACTIVATION, ROW_WEIGHTS
from mycli.runtime.layers.expert_slots import ExpertSource
from mycli.runtime.layers.feed_forward import Experts, Mlp
from mycli.runtime.layers.layer_part import LayerPart, PassContext, Steps, complete, normed
from mycli.runtime.layers.linear import Linear, load_linears
from mycli.runtime.layers.native.parts import NativePart, Preparable, ReadyPart, attention_part, per_layer_part
from mycli.runtime.layers.native.recurrent import CRecurrentPart, recurrent_part
from mycli.runtime.layers.norm import RMSNorm, make_norm
from mycli.runtime.layers.recurrent import make_mixer
from mycli.runtime.layers.rope import rotate
from mycli.runtime.models.layer_spec import LayerSpec, PerLayerSpec
from mycli.runtime.models.part_spec import AttentionSpec, MlpSpec
from mycli.runtime.models.recurrent_spec import RecurrentSpec
from mycli.runtime.quantization.scheme import Packing


class Attention(LayerPart):
    """Attention with grouped queries, as `AttentionSpec` describes it."""

    def __init__(self, spec: AttentionSpec, layer: int) -> None:
        super().__init__(spec)
        self.spec = spec
        self._layer = layer
        self.qkv = Linear(spec.qkv)
        self.q_norm = make_norm(spec.q_norm)
        self.k_norm = make_norm(spec.k_norm)
        self.v_norm = make_norm(spec.v_norm)
        self.o = Linear((spec.o,))
        self.products = (self.qkv, self.o)
        self.sinks: Tensor | None = None
        self.inner_norms = self.q_norm, self.k_norm, self.v_norm
        self._prepared = self._native_part(*self.inner_norms)  # sinks come with products

    def load_own(self, checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype) -> None:
        """As `LayerPart.load_own`."""
        if self.spec.sinks is not None:
            self.sinks = checkpoint.read(self.spec.sinks).to(device, torch.float32)

    def prepare(self) -> CAttentionPart:
        """As `Preparable.prepare`."""
        return attention_part(self.spec, self._around(), self.inner_norms, self.qkv, self.o, self.sinks)

    @property
    def reads(self) -> int:
        """Of which layer the keys and values are."""
        return self._layer if self.spec.kv_source is None else self.spec.kv_source

    def placed(self, part: CPart) -> ReadyPart:
        """As `Preparable.placed`."""
        return ReadyPart(part, self.reads, self.spec.rope)

    def inner(self, x: Tensor, context: PassContext) -> Steps:
        """As `LayerPart.inner`."""
        projected = yield self.qkv, x
        del x
        attended = self._attended(projected, context)
        del projected
        return (yield self.o, attended)

    def _attended(self, projected: Tensor, context: PassContext) -> Tensor:
        """Heads side by side [sequences, tokens, `projected` * head_dim] to [..., heads * head_dim]."""
        spec = self.spec
        heads = projected.view(*projected.shape[:2], spec.projected_heads, spec.head_dim)
        query, own = heads[:, :, : spec.query_heads], heads[:, :, spec.query_heads :]
        if spec.gated:
            query, gate = query.reshape(*query.shape[:2], spec.heads, 2, spec.head_dim).unbind(3)
            return ROW_WEIGHTS(self._attended_to(query, own, context), gate.flatten(2))
        return self._attended_to(query, own, context)

    def _attended_to(self, query: Tensor, own: Tensor, context: PassContext) -> Tensor:
        """query [sequences, tokens, heads, head_dim], and the keys and values that the layer makes beside it."""
        spec = self.spec
        query = self._turned(query, self.q_norm, context)
        if spec.rope is not None and (scale := context.rope[spec.rope].query_scale) is not None:
            query = query * scale[:, None, None]
        if spec.kv_source is not None:
            return context.attention.attend(self._layer, query, None, spec, self.sinks)
        key = own[:, :, : spec.kv_heads]
        value = _normed_heads(self.v_norm, own[:, :, spec.kv_heads :] if spec.has_v_proj else key)
        value = value if spec.clip is None else value.clamp(-spec.clip, spec.clip)
        key = self._turned(key, self.k_norm, context)
        return context.attention.attend(self._layer, query, (key, value), spec, self.sinks)

    def _turned(self, x: Tensor, norm: RMSNorm | None, context: PassContext) -> Tensor:
        """Queries or keys [sequences, tokens, heads, head_dim], normed and rotated in the layer's order."""
        if not self.spec.norm_after_rope:
            x = _normed_heads(norm, x)
        if self.spec.clip is not None:
            x = x.clamp(-self.spec.clip, self.spec.clip)
        if self.spec.rope is not None:
            tables = context.rope[self.spec.rope]
            x = rotate(x, tables.cos, tables.sin, tables.interleaved)
        return _normed_heads(norm, x) if self.spec.norm_after_rope else x


def _normed_heads(norm: RMSNorm | None, x: Tensor) -> Tensor:
    """x [sequences, tokens, heads, head_dim], over each head or, where the norm is as wide, over all of them at
    once."""
    if norm is None or norm.weight.shape[0] == x.shape[-1]:
        return normed(norm, x)
    return normed(norm, x.flatten(-2)).view_as(x)


class Recurrent(LayerPart):
    """What stands in place of attention where a layer keeps a state."""

    def __init__(self, spec: RecurrentSpec, layer: int) -> None:
        super().__init__(spec)
        self.mixer = make_mixer(spec, layer)
        self._layer = layer
        self.products = (self.mixer.projection, self.mixer.out)
        self.kept = self.mixer.kept
        self._prepared = self._native_part(*self.mixer.norms, others=self.mixer.tensors)

    def load_own(self, checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype) -> None:
        """As `LayerPart.load_own`."""
        super().load_own(checkpoint, device, dtype)
        self.mixer.load(checkpoint, device)

    def prepare(self) -> CRecurrentPart:
        """As `Preparable.prepare`."""
        return recurrent_part(self.mixer, self._around())

    def placed(self, part: CPart) -> ReadyPart:
        """As `Preparable.placed`."""
        return ReadyPart(part, self._layer, mixer=self.mixer)

    def inner(self, x: Tensor, context: PassContext) -> Steps:
        """As `LayerPart.inner`."""
        projected = yield self.mixer.projection, x
        mixed = self.mixer(x, projected, context.states)
        del x, projected
        return (yield self.mixer.out, mixed)


class PerLayer(LayerPart):
    """What a layer is told of its tokens, through a gate, as `PerLayerSpec` describes it."""

    def __init__(self, spec: PerLayerSpec, layer: int) -> None:
        super().__init__(spec)
        self._layer = layer
        self.gate = Linear((spec.gate,))
        self.projection = Linear((spec.projection,))
        self.products = (self.gate, self.projection)
        self._activate = ACTIVATION[spec.activation]
        self._spec = spec
        self._prepared = self._native_part()

    def prepare(self) -> CPerLayerPart:
        """As `Preparable.prepare`."""
        return per_layer_part(self._spec, self._around(), self._layer, self.gate, self.projection)

    def inner(self, x: Tensor, context: PassContext) -> Steps:
        """As `LayerPart.inner`."""
        assert context.told is not None
        gate = yield self.gate, x
        del x
        activated = self._activate(torch.cat((gate, context.told(self._layer)), dim=-1))
        return (yield self.projection, activated)


class Parallel(Preparable):
    """Attention and an MLP that read the same input, normed as the first norms it; both are added to what entered."""

    def __init__(self, first: Attention, second: Mlp) -> None:
        self._first, self._second = first, second
        self.products = (*first.products, *second.products)
        norms = first.norm, first.output_norm, *first.inner_norms, second.norm, second.output_norm
        watched = [norm for norm in norms if norm is not None]
        self._prepared = NativePart(watched, self.products)

    def prepare(self) -> CParallelPart:
        """As `Preparable.prepare`."""
        return CParallelPart(self._first.prepare(), self._second.prepare())

    def placed(self, part: CPart) -> ReadyPart:
        """As `Preparable.placed`."""
        return self._first.placed(part)

    def run(self, x: Tensor, context: PassContext) -> Tensor:
        """As `LayerPart.run`."""
        return complete(self.steps(x, context))

    def steps(self, x: Tensor, context: PassContext) -> Steps:
        """As `LayerPart.steps`."""
        entering = normed(self._first.norm, x)
        attended = yield from self._first.inner(entering, context)
        fed = yield from self._second.inner(entering, context)
        return self._second.sum(self._first.sum(x, attended), fed)


class Block(nn.Module):
    """One layer: `parts` in order, `products` by name in order of execution, `norms` that have a tensor."""

    def __init__(self, spec: LayerSpec) -> None:
        super().__init__()
        self.spec = spec
        self.mixer: Attention | Recurrent
        if spec.recurrent is None:
            self.mixer = Attention(spec.attention, spec.index)
        else:
            self.mixer = Recurrent(spec.recurrent, spec.index)
        self.mlp = Mlp(spec.mlp) if isinstance(spec.mlp, MlpSpec) else Experts(spec.mlp)
        self.per_layer = None if spec.per_layer is None else PerLayer(spec.per_layer, spec.index)
        others = () if self.per_layer is None else (self.per_layer,)
        self.parts: tuple[LayerPart | Parallel, ...] = (self.mixer, self.mlp, *others)
        if spec.parallel:
            assert isinstance(self.mixer, Attention) and isinstance(self.mlp, Mlp)
            self.parts = (Parallel(self.mixer, self.mlp), *others)
        linears = [linear for part in self.parts for linear in part.products]
        self.products = dict(zip(spec.products(), linears, strict=True))
        named = {norm.spec.name: norm for norm in self._norms()}
        self.norms = [named[each.name] for each in spec.norms()]

    def _norms(self) -> Iterator[RMSNorm]:
        return (module for module in self.modules() if isinstance(module, RMSNorm))

    def load(
        self,
        checkpoint: Checkpoint,
        packings: Mapping[str, Packing],
        device: torch.device,
        dtype: torch.dtype,
        some: ExpertSource | None = None,
    ) -> None:
        """Read this layer's tensors; of experts as many as `some` says, where it is given and there are more."""
        for norm in self._norms():
            norm.load(checkpoint, device, dtype)
        mlp = self.mlp
        if some is not None and isinstance(mlp, Experts) and some.slots < len(mlp.spec.experts):
            chosen = set(mlp.products) - set(mlp.resident)
            others = (linear for linear in self.products.values() if linear not in chosen)
            load_linears(others, checkpoint, packings, device, dtype)
            mlp.keep_some(some)
        else:
            load_linears(self.products.values(), checkpoint, packings, device, dtype)
        for part in (self.mixer, self.mlp):
            part.load_own(checkpoint, device, dtype)
        if self.spec.layer_scalar is not None:
            last = self.per_layer or self.mlp
            last.scalar = checkpoint.read(self.spec.layer_scalar).to(device, dtype)

    def forward(self, x: Tensor, context: PassContext) -> Tensor:
        """x [sequences, tokens, hidden] to the same."""
        for part in self.parts:
            x = part.run(x, context)
        return x
