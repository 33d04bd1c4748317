"""One decoder layer, written once: its parts as sequences of products that whoever runs them multiplies.

Each part is a generator over the residual stream. It yields a linear with the input that is due to it, is sent what
came out, and returns the stream that leaves. Running a layer multiplies (`complete`); calibration looks at the inputs;
both see the same pass. What a layer is made of is its `LayerSpec`. Does not know caches' insides, batches or kernels.
"""

from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mycli.runtime.checkpoint.reader import Checkpoint
from mycli.runtime.kernels.cpu.layer import CAttentionPart, CExpertsPart, CMlpPart
from mycli.runtime.kernels.registry import ACTIVATION, ROUTING, ROW_WEIGHTS, WEIGHTED_SUM
from mycli.runtime.layers.attention import KeysAndValues
from mycli.runtime.layers.experts import RoutedProduct
from mycli.runtime.layers.linear import Changes, Linear, load_linears
from mycli.runtime.layers.native import (
    Around,
    ExpertModules,
    NativePart,
    NativePass,
    attention_part,
    experts_part,
    mlp_part,
)
from mycli.runtime.layers.norm import RMSNorm, make_norm
from mycli.runtime.layers.recurrent import RecurrentStates, TextStates, make_mixer
from mycli.runtime.layers.rope import RopeTables, rotate
from mycli.runtime.models.experts_spec import ExpertsSpec
from mycli.runtime.models.layer_spec import LayerSpec, PerLayerSpec
from mycli.runtime.models.part_spec import AttentionSpec, MlpSpec, PartSpec, RopeSpec
from mycli.runtime.models.recurrent_spec import RecurrentSpec
from mycli.runtime.quantization.scheme import Packing

Product = Linear | RoutedProduct
Steps = Generator[tuple[Product, Tensor], Tensor, Tensor]  # yields a product and its input, is sent its output


@dataclass(frozen=True)
class PassContext:
    """What all layers of one pass share.

    rope: tables of the new positions by kind of rotation; attention: what the queries of a layer attend to; told: what
    a layer is told of the tokens, [sequences, tokens, width], None where none is; native: for parts that our own code
    runs whole, None where it takes none; states: what recurrent layers go on from.
    """

    rope: Mapping[RopeSpec, RopeTables]
    attention: KeysAndValues
    told: Callable[[int], Tensor] | None = None
    native: NativePass | None = None
    states: RecurrentStates = TextStates()


def complete(steps: Steps, output: Tensor | None = None) -> Tensor:
    """Run a part of a layer to its end, every product multiplied: the stream that leaves it.

    `output` is of the product that was yielded last; None for steps that have not begun.
    """
    try:
        step = next(steps) if output is None else steps.send(output)
        while True:
            linear, x = step
            output = linear(x)
            del step, x  # what is done with is let go of at once: of a prompt these are the largest tensors
            step = steps.send(output)
            del output
    except StopIteration as end:
        result: Tensor = end.value
        return result


def _normed(norm: RMSNorm | None, x: Tensor) -> Tensor:
    if norm is None:
        return x
    y: Tensor = norm(x)
    return y


class LayerPart(nn.Module):
    """A part of a layer on the residual stream: a norm, `products`, a norm, the sum. A subclass says what is between.

    `scalar` [1], where there is one, multiplies the sum. `kept` are linears that no product is: they are never stored
    quantized, and nobody observes them.
    """

    products: tuple[Linear, ...]
    kept: tuple[Linear, ...] = ()

    def __init__(self, spec: PartSpec) -> None:
        super().__init__()
        self.norm = make_norm(spec.norm)
        self.output_norm = make_norm(spec.output_norm)
        self.scalar: Tensor | None = None
        self._residual = spec.residual

    def inner(self, x: Tensor, context: PassContext) -> Steps:
        """x [sequences, tokens, hidden], normed, to what is to be normed and added."""
        raise NotImplementedError

    def run(self, x: Tensor, context: PassContext) -> Tensor:
        """The residual stream x [sequences, tokens, hidden] to the same, in one call where native code takes it."""
        found = None if context.native is None else self.run_native(x, context.native)
        return complete(self.steps(x, context)) if found is None else found

    def run_native(self, x: Tensor, native: NativePass) -> Tensor | None:
        """As `run`, by native code; None where there is none for this part."""
        return None

    def _around(self) -> Around:
        hidden = self.products[-1].out_features
        return Around(self.norm, self.output_norm, self.scalar, self._residual, hidden)

    def _native_part(self, *norms: RMSNorm | None) -> NativePart[Any]:
        """What watches whatever may be replaced: the tensors of its norms, those of `norms` too, and its products."""
        gains = [norm for norm in (self.norm, self.output_norm, *norms) if norm is not None]
        return NativePart(gains, self.products)

    def load_own(self, checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype) -> None:
        """Read what is neither norm nor product."""
        for linear in self.kept:
            linear.load(checkpoint, {}, device, dtype)

    def steps(self, x: Tensor, context: PassContext) -> Steps:
        """The residual stream x [sequences, tokens, hidden] to the same."""
        output = yield from self.inner(_normed(self.norm, x), context)
        return self.sum(x, output)

    def sum(self, x: Tensor, output: Tensor) -> Tensor:
        """The stream x with what `inner` made added to it."""
        output = _normed(self.output_norm, output)
        x = x + (output if self._residual == 1.0 else output * self._residual)
        return x if self.scalar is None else x * self.scalar


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
        self._inner_norms = self.q_norm, self.k_norm, self.v_norm
        self._prepared: NativePart[CAttentionPart] = self._native_part(*self._inner_norms)

    def load_own(self, checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype) -> None:
        """As `LayerPart.load_own`."""
        if self.spec.sinks is not None:
            self.sinks = checkpoint.read(self.spec.sinks).to(device, torch.float32)

    def _prepare(self) -> CAttentionPart:
        return attention_part(self.spec, self._around(), self._inner_norms, self.qkv, self.o)

    def run_native(self, x: Tensor, native: NativePass) -> Tensor | None:
        """As `LayerPart.run_native`."""
        part = self._prepared.get(self._prepare)
        return None if part is None else native.attention(part, self.spec, self._layer, x)

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
        heads = projected.view(*projected.shape[:2], spec.projected, spec.head_dim)
        query, own = heads[:, :, : spec.queries], heads[:, :, spec.queries :]
        if spec.gated:
            query, gate = query.reshape(*query.shape[:2], spec.heads, 2, spec.head_dim).unbind(3)
            return self._attended_to(query, own, context) * gate.flatten(2).sigmoid()
        return self._attended_to(query, own, context)

    def _attended_to(self, query: Tensor, own: Tensor, context: PassContext) -> Tensor:
        """query [sequences, tokens, heads, head_dim], and the keys and values that the layer makes beside it."""
        spec = self.spec
        query = self._turned(query, self.q_norm, context)
        if spec.rope is not None and (scale := context.rope[spec.rope].query_scale) is not None:
            query = query * scale[:, None, None]
        if spec.shares is not None:
            return context.attention.attend(self._layer, query, None, spec, self.sinks)
        key = own[:, :, : spec.kv_heads]
        value = _normed_heads(self.v_norm, own[:, :, spec.kv_heads :] if spec.makes_values else key)
        value = value if spec.clip is None else value.clamp(-spec.clip, spec.clip)
        key = self._turned(key, self.k_norm, context)
        return context.attention.attend(self._layer, query, (key, value), spec, self.sinks)

    def _turned(self, x: Tensor, norm: RMSNorm | None, context: PassContext) -> Tensor:
        """Queries or keys [sequences, tokens, heads, head_dim], normed and rotated in the layer's order."""
        if not self.spec.norms_rotated:
            x = _normed_heads(norm, x)
        if self.spec.clip is not None:
            x = x.clamp(-self.spec.clip, self.spec.clip)
        if self.spec.rope is not None:
            tables = context.rope[self.spec.rope]
            x = rotate(x, tables.cos, tables.sin, tables.interleaved)
        return _normed_heads(norm, x) if self.spec.norms_rotated else x


def _normed_heads(norm: RMSNorm | None, x: Tensor) -> Tensor:
    """x [sequences, tokens, heads, head_dim], over each head or, where the norm is as wide, over all of them at
    once."""
    if norm is None or norm.weight.shape[0] == x.shape[-1]:
        return _normed(norm, x)
    return _normed(norm, x.flatten(-2)).view_as(x)


class Recurrent(LayerPart):
    """What stands in place of attention where a layer keeps a state."""

    def __init__(self, spec: RecurrentSpec, layer: int) -> None:
        super().__init__(spec)
        self.mixer = make_mixer(spec, layer)
        self.products = (self.mixer.projection, self.mixer.out)

    def load_own(self, checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype) -> None:
        """As `LayerPart.load_own`."""
        self.mixer.load(checkpoint, device, dtype)

    def inner(self, x: Tensor, context: PassContext) -> Steps:
        """As `LayerPart.inner`."""
        projected = yield self.mixer.projection, x
        mixed = self.mixer(x, projected, context.states)
        del x, projected
        return (yield self.mixer.out, mixed)


class Mlp(LayerPart):
    """The MLP, as `MlpSpec` describes it."""

    def __init__(self, spec: MlpSpec) -> None:
        super().__init__(spec)
        self.spec = spec
        self.gate_up = Linear(spec.gate_up)
        self.down = Linear((spec.down,))
        self.products = (self.gate_up, self.down)
        self._activate = ACTIVATION[spec.activation]
        self._prepared: NativePart[CMlpPart] = self._native_part()

    def _prepare(self) -> CMlpPart:
        return mlp_part(self.spec, self._around(), self.gate_up, self.down)

    def run_native(self, x: Tensor, native: NativePass) -> Tensor | None:
        """As `LayerPart.run_native`."""
        part = self._prepared.get(self._prepare)
        return None if part is None else native.mlp(part, x)

    def inner(self, x: Tensor, context: PassContext) -> Steps:
        """As `LayerPart.inner`."""
        gate_up = yield self.gate_up, x
        del x
        activated = self._activate(gate_up)
        del gate_up
        return (yield self.down, activated)


class Experts(LayerPart):
    """A mixture of experts, as `ExpertsSpec` describes it. The shared expert comes first, then all others at once."""

    def __init__(self, spec: ExpertsSpec) -> None:
        super().__init__(spec)
        self.spec = spec
        self.router = Linear((spec.router,))
        self.shared = None if spec.shared is None else Mlp(spec.shared.mlp)
        gate = None if spec.shared is None else spec.shared.gate
        self.shared_gate = None if gate is None else Linear((gate,))
        self.kept = (self.router,) if self.shared_gate is None else (self.router, self.shared_gate)
        changes = Changes()
        self._gate_up = tuple(Linear(expert.gate_up, changes) for expert in spec.experts)
        self._down = tuple(Linear((expert.down,), changes) for expert in spec.experts)
        own = () if self.shared is None else self.shared.products
        self.products = (*own, *(each for pair in zip(self._gate_up, self._down, strict=True) for each in pair))
        self.experts = nn.ModuleList(self.products)
        self.router_norm = make_norm(spec.router_norm)
        self.expert_norm = make_norm(spec.expert_norm)
        self.expert_output_norm = make_norm(spec.expert_output_norm)
        self._scales: Tensor | None = None
        self._activate = ACTIVATION[spec.activation]
        beside = (None, None) if self.shared is None else (self.shared.norm, self.shared.output_norm)
        self._inner_norms = self.router_norm, self.expert_norm, self.expert_output_norm, *beside
        norms = [norm for norm in (self.norm, self.output_norm, *self._inner_norms) if norm is not None]
        self._prepared: NativePart[CExpertsPart] = NativePart(norms, (*self.kept, *own), changes)

    def _prepare(self) -> CExpertsPart:
        shared = None if self.shared is None else (self.shared.gate_up, self.shared.down)
        products = self.router, self._gate_up, self._down, shared, self.shared_gate
        return experts_part(self.spec, self._around(), ExpertModules(self._inner_norms, *products, self._scales))

    def run_native(self, x: Tensor, native: NativePass) -> Tensor | None:
        """As `LayerPart.run_native`."""
        part = self._prepared.get(self._prepare)
        return None if part is None else native.experts(part, x)

    def load_own(self, checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype) -> None:
        """As `LayerPart.load_own`."""
        super().load_own(checkpoint, device, dtype)
        if self.spec.scales is not None:
            self._scales = checkpoint.read(self.spec.scales).to(device, torch.float32)

    def expert_of(self, linear: Linear) -> int | None:
        """Which expert one of `products` belongs to; None for one of the shared expert's."""
        first = len(self.products) - 2 * len(self._gate_up)
        place = self.products.index(linear) - first
        return place // 2 if place >= 0 else None

    def inner(self, x: Tensor, context: PassContext) -> Steps:
        """As `LayerPart.inner`."""
        tokens = x.reshape(-1, x.shape[-1])
        beside = None
        if self.shared is not None:
            beside = yield from self.shared.inner(_normed(self.shared.norm, x), context)
            beside = _normed(self.shared.output_norm, beside)
            if self.shared_gate is not None:
                beside = ROW_WEIGHTS(beside, self.shared_gate(x))
        scores = self.router(_normed(self.router_norm, tokens))
        route = ROUTING(scores, self.spec.top_k, self.spec.normalized)
        route = route if self._scales is None else route.scaled(self._scales)
        gate_up = yield RoutedProduct(self._gate_up, route, gathers=True), _normed(self.expert_norm, tokens)
        activated = self._activate(gate_up)
        del gate_up
        made = yield RoutedProduct(self._down, route, gathers=False), activated
        del activated
        output = _normed(self.expert_output_norm, WEIGHTED_SUM(made, route.places, route.weights)).view_as(x)
        return output if beside is None else output + beside


class PerLayer(LayerPart):
    """What a layer is told of its tokens, through a gate, as `PerLayerSpec` describes it."""

    def __init__(self, spec: PerLayerSpec, layer: int) -> None:
        super().__init__(spec)
        self._layer = layer
        self.gate = Linear((spec.gate,))
        self.projection = Linear((spec.projection,))
        self.products = (self.gate, self.projection)
        self._activate = ACTIVATION[spec.activation]

    def inner(self, x: Tensor, context: PassContext) -> Steps:
        """As `LayerPart.inner`."""
        assert context.told is not None
        gate = yield self.gate, x
        del x
        activated = self._activate(torch.cat((gate, context.told(self._layer)), dim=-1))
        return (yield self.projection, activated)


class Parallel:
    """Two parts that read the same input, normed as the first norms it; both are added to what entered."""

    def __init__(self, first: LayerPart, second: LayerPart) -> None:
        self._first, self._second = first, second
        self.products = (*first.products, *second.products)

    def run(self, x: Tensor, context: PassContext) -> Tensor:
        """As `LayerPart.run`, step by step."""
        return complete(self.steps(x, context))

    def steps(self, x: Tensor, context: PassContext) -> Steps:
        """As `LayerPart.steps`."""
        normed = _normed(self._first.norm, x)
        attended = yield from self._first.inner(normed, context)
        fed = yield from self._second.inner(normed, context)
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
        first = (Parallel(self.mixer, self.mlp),) if spec.parallel else (self.mixer, self.mlp)
        self.parts: tuple[LayerPart | Parallel, ...] = (*first, *others)
        linears = [linear for part in self.parts for linear in part.products]
        self.products = dict(zip(spec.products(), linears, strict=True))
        named = {norm.spec.name: norm for norm in self._norms()}
        self.norms = [named[each.name] for each in spec.norms()]

    def _norms(self) -> Iterator[RMSNorm]:
        return (module for module in self.modules() if isinstance(module, RMSNorm))

    def load(
        self, checkpoint: Checkpoint, packings: Mapping[str, Packing], device: torch.device, dtype: torch.dtype
    ) -> None:
        """Read this layer's tensors."""
        for norm in self._norms():
            norm.load(checkpoint, device, dtype)
        load_linears(self.products.values(), checkpoint, packings, device, dtype)
        for part in (self.mixer, self.mlp):
            part.load_own(checkpoint, device, dtype)
        if self.spec.scalar is not None:
            last = self.per_layer or self.mlp
            last.scalar = checkpoint.read(self.spec.scalar).to(device, dtype)

    def forward(self, x: Tensor, context: PassContext) -> Tensor:
        """x [sequences, tokens, hidden] to the same."""
        for part in self.parts:
            x = part.run(x, context)
        return x
