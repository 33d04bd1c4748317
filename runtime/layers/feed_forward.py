"""The second half of a layer: an MLP, or a mixture of experts. What they are made of is declared (`runtime.models`)."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from mycli.runtime.checkpoint.reader import Checkpoint
from mycli.runtime.kernels.cpu.layer import CExpertsPart, CMlpPart, Fetch
from mycli.runtime.kernels.registry import ACTIVATION, ROUTING, ROW_WEIGHTS, WEIGHTED_SUM
from mycli.runtime.kernels.routed import Route
from mycli.runtime.layers.expert_slots import ExpertSlots, ExpertSource
from mycli.runtime.layers.layer_part import LayerPart, PassContext, Steps, normed
from mycli.runtime.layers.linear import Changes, ExpertLinears, Linear, RoutedProduct
from mycli.runtime.layers.native.experts import ExpertModules, experts_part, put_expert
from mycli.runtime.layers.native.parts import NativePart, mlp_part
from mycli.runtime.layers.native.tensors import NotNative
from mycli.runtime.layers.norm import make_norm
from mycli.runtime.models.experts_spec import ExpertsSpec
from mycli.runtime.models.part_spec import MlpSpec


class Mlp(LayerPart):
    """The MLP, as `MlpSpec` describes it."""

    def __init__(self, spec: MlpSpec) -> None:
        super().__init__(spec)
        self.spec = spec
        self.gate_up = Linear(spec.gate_up)
        self.down = Linear((spec.down,))
        self.products = (self.gate_up, self.down)
        self._activate = ACTIVATION[spec.activation]
        self._prepared = self._native_part()

    def prepare(self) -> CMlpPart:
        """As `Preparable.prepare`."""
        return mlp_part(self.spec, self._around(), self.gate_up, self.down)

    def inner(self, x: Tensor, context: PassContext) -> Steps:
        """As `LayerPart.inner`."""
        gate_up = yield self.gate_up, x
        del x
        activated = self._activate(gate_up)
        del gate_up
        return (yield self.down, activated)


class Experts(LayerPart):
    """A mixture of experts, as `ExpertsSpec` describes it. The shared expert comes first, then all others at once.

    Or piece by piece, where only some of them are in memory (`keep_some`).
    """

    def __init__(self, spec: ExpertsSpec) -> None:
        super().__init__(spec)
        self.spec = spec
        self.router = Linear((spec.router,))
        self.shared = None if spec.shared is None else Mlp(spec.shared.mlp)
        gate = None if spec.shared is None else spec.shared.gate
        self.shared_gate = None if gate is None else Linear((gate,))
        self.kept = (self.router,) if self.shared_gate is None else (self.router, self.shared_gate)
        changes = Changes()
        self._gate_up = ExpertLinears.of((Linear(expert.gate_up, changes) for expert in spec.experts), changes)
        self._down = ExpertLinears.of((Linear((expert.down,), changes) for expert in spec.experts), changes)
        own = self.resident = () if self.shared is None else self.shared.products
        self.products = (*own, *(each for pair in zip(self._gate_up, self._down, strict=True) for each in pair))
        self.experts = nn.ModuleList(self.products)
        self.router_norm = make_norm(spec.router_norm)
        self.expert_norm = make_norm(spec.expert_norm)
        self.expert_output_norm = make_norm(spec.expert_output_norm)
        self._scales: Tensor | None = None
        self.correction: Tensor | None = None
        self._activate = ACTIVATION[spec.activation]
        beside = (None, None) if self.shared is None else (self.shared.norm, self.shared.output_norm)
        self._inner_norms = self.router_norm, self.expert_norm, self.expert_output_norm, *beside
        self._slots: ExpertSlots | None = None
        norms = [norm for norm in (self.norm, self.output_norm, *self._inner_norms) if norm is not None]
        self._prepared = NativePart(norms, (*self.kept, *own), changes)

    def keep_some(self, source: ExpertSource) -> None:
        """Have as many experts in memory as `source` says, and read the others when they are chosen."""
        self._gate_up, self._down = self._gate_up.come_and_go(), self._down.come_and_go()  # as `_fetched` tells
        self._slots = ExpertSlots(source, self._gate_up, self._down)

    def prepare(self) -> CExpertsPart:
        """As `Preparable.prepare`."""
        fetch = None
        if self._slots is not None:
            if not self._slots.alike:
                raise NotNative("takes experts that are stored alike")
            fetch = Fetch(lambda hit: self._fetched(part, hit))
        shared = None if self.shared is None else (self.shared.gate_up, self.shared.down)
        products = self.router, self._gate_up, self._down, shared, self.shared_gate
        modules = ExpertModules(self._inner_norms, *products, self._scales, self.correction, fetch)
        part = experts_part(self.spec, self._around(), modules)
        return part

    def _fetched(self, part: CExpertsPart, hit: Sequence[int]) -> Iterator[Sequence[int]]:
        """As `ExpertSlots.pieces`; `part` is told where they lie."""
        assert self._slots is not None
        for places in self._slots.pieces(hit):
            for expert in (hit[place] for place in places):
                put_expert(part.gate_up, expert, self._gate_up[expert])
                put_expert(part.down, expert, self._down[expert])
            yield places

    def load_own(self, checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype) -> None:
        """As `LayerPart.load_own`."""
        super().load_own(checkpoint, device, dtype)
        if self.spec.expert_scales is not None:
            self._scales = checkpoint.read(self.spec.expert_scales).to(device, torch.float32)
        if self.spec.correction_bias is not None:
            self.correction = checkpoint.read(self.spec.correction_bias[0]).flatten().to(device, torch.float32)

    def in_memory(self) -> tuple[ExpertLinears, ExpertLinears] | None:
        """Gate and up of each expert, and down of each; None where only some of them are in memory."""
        return (self._gate_up, self._down) if self._slots is None else None

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
            beside = yield from self.shared.inner(normed(self.shared.norm, x), context)
            beside = normed(self.shared.output_norm, beside)
            if self.shared_gate is not None:
                beside = ROW_WEIGHTS(beside, self.shared_gate(x))
        scores = self.router(normed(self.router_norm, tokens))
        route = ROUTING(scores, self.spec.routing, self.correction)
        route = route if self._scales is None else route.scaled(self._scales)
        made = yield from self._feed(route, normed(self.expert_norm, tokens))
        output = normed(self.expert_output_norm, WEIGHTED_SUM(made, route.places, route.weights)).view_as(x)
        return output if beside is None else output + beside

    def _feed(self, route: Route, entering: Tensor) -> Steps:
        """What the experts of `route` make of their tokens of `entering` [tokens, hidden]: [pairs, hidden]."""
        if self._slots is None:
            return (yield from self._feed_some(route, entering))
        made: Tensor | None = None
        for places in self._slots.pieces(route.hit):
            part, pairs = route.part(places)
            own = yield from self._feed_some(part, entering)
            made = own.new_empty(len(route.tokens), own.shape[1]) if made is None else made
            made[pairs] = own
        assert made is not None
        return made

    def _feed_some(self, route: Route, entering: Tensor) -> Steps:
        gate_up = yield RoutedProduct(self._gate_up, route, gathers=True), entering
        activated = self._activate(gate_up)
        del gate_up
        return (yield RoutedProduct(self._down, route, gathers=False), activated)
