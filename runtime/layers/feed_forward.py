"""The second half of a layer: an MLP, or a mixture of experts (MoE)."""

from statistics import NormalDist

import torch
from torch import Tensor, nn

from mycli.runtime.kernels.registry import ACTIVATION, ROUTING, ROW_WEIGHTS, WEIGHTED_SUM, XIELU
from mycli.runtime.kernels.routed import Route
from mycli.runtime.layers.layer_part import LayerPart, PassContext, Steps
from mycli.runtime.layers.linear import ExpertLinears, Linear, RoutedProduct
from mycli.runtime.layers.norm import make_norm, normed
from mycli.runtime.layers.weights import CheckpointWeights
from mycli.runtime.models.experts_spec import ExpertsSpec
from mycli.runtime.models.part_spec import MlpSpec


class Mlp(LayerPart):
    sums_last_product = True

    def __init__(self, spec: MlpSpec) -> None:
        super().__init__(spec, spec.normed_residual)
        self.spec = spec
        self.gate_up = Linear(spec.gate_up)
        self.down = Linear((spec.down,))
        self.inner_norm = make_norm(spec.inner_norm)
        self.products = (self.gate_up, self.down)
        self._activation_parameters: tuple[Tensor, ...] = ()

    def load_own(self, weights: CheckpointWeights) -> None:
        self._activation_parameters = tuple(weights.read(name) for name, _ in self.spec.parameters)

    def _activate(self, gate_up: Tensor) -> Tensor:
        if self.spec.activation == "xielu":
            return XIELU(gate_up, self._activation_parameters)
        if self.spec.gate_scale != 1.0 or self.spec.sparsity:
            gate, up = gate_up.chunk(2, dim=-1)
            gate = _above_threshold(gate, self.spec.sparsity) if self.spec.sparsity else gate * self.spec.gate_scale
            gate_up = torch.cat((gate, up), dim=-1)
        if self.spec.activation == "gelu" and self.spec.gated:  # of encoders alone: it has no kernel of its own
            gate, up = gate_up.chunk(2, dim=-1)
            return ACTIVATION["gelu", False](gate.contiguous()) * up
        return ACTIVATION[self.spec.activation, self.spec.gated](gate_up)

    def inner(self, x: Tensor, context: PassContext) -> Steps:
        gate_up = yield self.gate_up, x
        del x
        activated = self._activate(gate_up)
        del gate_up
        return (yield self.down, normed(self.inner_norm, activated))


def _above_threshold(gate: Tensor, share: float) -> Tensor:
    """Return what each gate [..., size] is above a threshold, 0 below it; see `MlpSpec.sparsity`."""
    exact = gate.float()
    deviation, mean = torch.std_mean(exact, dim=-1, keepdim=True, correction=0)
    return torch.relu(exact - (mean + NormalDist().inv_cdf(share) * deviation)).to(gate.dtype)


class Experts(LayerPart):
    """The mixture of experts that an `ExpertsSpec` declares; the shared expert, if any, is computed first."""

    def __init__(self, spec: ExpertsSpec) -> None:
        super().__init__(spec, spec.normed_residual)
        self.spec = spec
        self.router = Linear((spec.router,))
        self.shared = None if spec.shared is None else Mlp(spec.shared.mlp)
        gate = None if spec.shared is None else spec.shared.gate
        self.shared_gate = None if gate is None else Linear((gate,))
        self.enter, self.leave = (None if linear is None else Linear((linear,)) for linear in (spec.enter, spec.leave))
        dense = (self.router, self.shared_gate, self.enter, self.leave)
        self.unquantized = tuple(linear for linear in dense if linear is not None)
        self.gate_up = ExpertLinears(Linear(expert.gate_up) for expert in spec.experts)
        self.down = ExpertLinears(Linear((expert.down,)) for expert in spec.experts)
        self.shared_products = () if self.shared is None else self.shared.products
        pairs = zip(self.gate_up, self.down, strict=True)
        self.products = (*self.shared_products, *(linear for pair in pairs for linear in pair))
        self.experts = nn.ModuleList(self.products)
        self.router_norm = make_norm(spec.router_norm)
        self.expert_norm = make_norm(spec.expert_norm)
        self.expert_output_norm = make_norm(spec.expert_output_norm)
        self.scales: Tensor | None = None
        self.correction: Tensor | None = None
        self._activate = ACTIVATION[spec.activation, spec.gated]

    def load_own(self, weights: CheckpointWeights) -> None:
        super().load_own(weights)
        if self.spec.expert_scales is not None:
            self.scales = weights.read(self.spec.expert_scales, torch.float32)
        if self.spec.correction_bias is not None:
            self.correction = weights.read(self.spec.correction_bias[0], torch.float32).flatten()

    def freeze(self) -> None:
        self.gate_up.freeze()
        self.down.freeze()

    def expert_of(self, linear: Linear) -> int | None:
        """Return the expert that one of `products` belongs to; None for the shared expert."""
        index = self.products.index(linear) - len(self.shared_products)
        return index // 2 if index >= 0 else None

    def weighted_input(self, linear: Linear, x: Tensor) -> Tensor:
        """Return the input of one linear of an expert for residual streams x [n, hidden], with `weigh_inputs`."""
        expert = self.expert_of(linear)
        assert expert is not None and self.spec.routing.scoring == "sigmoid" and not self.spec.routing.normalize
        tokens = normed(self.norm, x)
        weight = self.router(tokens)[:, expert : expert + 1].float().sigmoid() * self.spec.routing.scale
        weighted = tokens * weight.to(tokens.dtype)
        return weighted if linear is self.gate_up[expert] else self._activate(self.gate_up[expert](weighted))

    def route(self, tokens: Tensor) -> Route:
        """Route `tokens` [tokens, hidden], the input of this part or, with `early_router`, of the layer."""
        scores = self.router(normed(self.router_norm, tokens))
        route = ROUTING(scores, self.spec.routing, self.correction)
        return route if self.scales is None else route.scaled(self.scales)

    def inner(self, x: Tensor, context: PassContext) -> Steps:
        tokens = x.reshape(-1, x.shape[-1])
        shared_output = None
        if self.shared is not None:
            shared_output = yield from self.shared.inner(normed(self.shared.norm, x), context)
            shared_output = normed(self.shared.output_norm, shared_output)
            if self.shared_gate is not None:
                shared_output = ROW_WEIGHTS(shared_output, self.shared_gate(x))
        route = context.route if self.spec.early_router else self.route(tokens)
        assert route is not None
        entering = normed(self.expert_norm, tokens)
        expert_outputs = yield from self.route_tokens(route, entering if self.enter is None else self.enter(entering))
        weights = torch.ones_like(route.weights) if self.spec.weigh_inputs else route.weights
        output = WEIGHTED_SUM(expert_outputs, route.places, weights)
        output = output if self.leave is None else self.leave(output)
        output = normed(self.expert_output_norm, output).view_as(x)
        return output if shared_output is None else output + shared_output

    def route_tokens(self, route: Route, tokens: Tensor) -> Steps:
        """Compute the outputs [pairs, hidden] of the routed experts for `tokens` [tokens, hidden]."""
        if self.spec.weigh_inputs:
            tokens = tokens.index_select(0, route.tokens) * route.pair_weights().to(tokens.dtype).unsqueeze(1)
        gate_up = yield RoutedProduct(self.gate_up, route, gathers=not self.spec.weigh_inputs), tokens
        activated = self._activate(gate_up)
        del gate_up
        return (yield RoutedProduct(self.down, route, gathers=False), activated)
