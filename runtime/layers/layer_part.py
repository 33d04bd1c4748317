"""The base of a layer's parts: each is written once, as a generator of products.

The generator yields a linear and its input, is sent the output, and returns the new residual stream. Running a layer
multiplies (`complete`); calibration reads the inputs instead. Both walk the same forward pass.
"""

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from mycli.runtime.kernels.routed import Route
from mycli.runtime.layers.attention import AttentionContext
from mycli.runtime.layers.linear import Linear, RoutedProduct
from mycli.runtime.layers.norm import make_norm, normed
from mycli.runtime.layers.recurrent import PromptStates, RecurrentStates
from mycli.runtime.layers.rope import RopeTables
from mycli.runtime.layers.weights import CheckpointWeights
from mycli.runtime.models.part_spec import PartSpec, RopeSpec

Product = Linear | RoutedProduct
Steps = Generator[tuple[Product, Tensor], Tensor, Tensor]  # yields a product and its input, is sent its output


@dataclass(frozen=True)
class PassContext:
    """The state that all layers of a pass share.

    rope: tables of the new positions; attention: keys and values; per_layer_inputs: of a layer, [sequences, tokens,
    width]; states: of recurrent layers; route: of the layer's experts, where the router reads the layer's input.
    """

    rope: Mapping[RopeSpec, RopeTables]
    attention: AttentionContext
    per_layer_inputs: Callable[[int], Tensor] | None = None
    states: RecurrentStates = PromptStates()
    route: Route | None = None


def complete(steps: Steps, output: Tensor | None = None) -> Tensor:
    """Run a part to its end, multiplying every product; return the new residual stream.

    output: of the product yielded last; None for steps that have not begun.
    """
    try:
        step = next(steps) if output is None else steps.send(output)
        while True:
            linear, x = step
            output = linear(x)
            del step, x  # freed before the next product: of a prompt these are the largest tensors
            step = steps.send(output)
            del output
    except StopIteration as end:
        result: Tensor = end.value
        return result


class LayerPart(nn.Module):
    """A part of a layer: a norm, what the subclass computes (`inner`), a norm, the sum with the residual stream.

    `products`: its linears in order of execution; `unquantized`: linears that are dense in memory (routers, gates)
    and not calibrated; `scalar` [1], if any, multiplies the sum, and `gain` [hidden] the residual stream before it.
    """

    products: tuple[Linear, ...]
    unquantized: tuple[Linear, ...] = ()
    sums_last_product = False  # whether `sum` takes the output of the last product as it is

    def __init__(self, spec: PartSpec, normed_residual: bool = False) -> None:
        """normed_residual: see `AttentionSpec`."""
        super().__init__()
        self.norm = make_norm(spec.norm)
        self.output_norm = make_norm(spec.output_norm)
        self.scalar: Tensor | None = None
        self.gain: Tensor | None = None
        self.residual = spec.residual_scale
        self._normed_residual = normed_residual

    @property
    def resident_products(self) -> tuple[Linear, ...]:
        """The products whose weights stay in memory: all but the experts of a `StreamedExperts`."""
        return self.products

    def load_own(self, weights: CheckpointWeights) -> None:
        """Read the tensors that are neither norms nor `resident_products`."""
        for linear in self.unquantized:
            linear.load(weights, dense=True)

    def inner(self, x: Tensor, context: PassContext) -> Steps:
        """Compute the part between its norms from x [sequences, tokens, hidden]."""
        raise NotImplementedError

    def steps(self, x: Tensor, context: PassContext) -> Steps:
        """Yield the products from the residual stream x [sequences, tokens, hidden] to the next one."""
        if self._normed_residual:
            x = normed(self.norm, x)
            output = yield from self.inner(x, context)
        else:  # without a name for the norm's output, which `inner` frees after its first product
            output = yield from self.inner(normed(self.norm, x), context)
        return self.sum(x, output)

    def sum(self, x: Tensor, output: Tensor) -> Tensor:
        output = normed(self.output_norm, output)
        x = x if self.gain is None else x * self.gain
        x = x + (output if self.residual == 1.0 else output * self.residual)
        return x if self.scalar is None else x * self.scalar
