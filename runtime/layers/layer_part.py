"""What the parts of a layer have in common: a generator over the residual stream, and who runs it.

It yields a linear with the input that is due to it, is sent what came out, and returns the stream that leaves. Running
a layer multiplies (`complete`); calibration looks at the inputs; both see the same pass. Does not know what any part
computes.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mycli.runtime.checkpoint.reader import Checkpoint
from mycli.runtime.kernels.cpu.layer import CPart
from mycli.runtime.layers.attention import KeysAndValues
from mycli.runtime.layers.linear import Linear, RoutedProduct
from mycli.runtime.layers.native.parts import NativePart, Preparable
from mycli.runtime.layers.native.tensors import Around
from mycli.runtime.layers.norm import RMSNorm, make_norm
from mycli.runtime.layers.recurrent import RecurrentStates, TextStates
from mycli.runtime.layers.rope import RopeTables
from mycli.runtime.models.part_spec import PartSpec, RopeSpec

Product = Linear | RoutedProduct
Steps = Generator[tuple[Product, Tensor], Tensor, Tensor]  # yields a product and its input, is sent its output


@dataclass(frozen=True)
class PassContext:
    """What all layers of one pass share.

    rope: tables of the new positions by kind of rotation; attention: what the queries of a layer attend to; told: what
    a layer is told of the tokens, [sequences, tokens, width], None where none is; states: what recurrent layers go on
    from.
    """

    rope: Mapping[RopeSpec, RopeTables]
    attention: KeysAndValues
    told: Callable[[int], Tensor] | None = None
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


def normed(norm: RMSNorm | None, x: Tensor) -> Tensor:
    """x through a norm, or as it is where there is none."""
    if norm is None:
        return x
    y: Tensor = norm(x)
    return y


class LayerPart(nn.Module, Preparable):
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
        self._residual = spec.residual_scale

    def inner(self, x: Tensor, context: PassContext) -> Steps:
        """x [sequences, tokens, hidden], normed, to what is to be normed and added."""
        raise NotImplementedError

    def run(self, x: Tensor, context: PassContext) -> Tensor:
        """The residual stream x [sequences, tokens, hidden] to the same, step by step."""
        return complete(self.steps(x, context))

    def _around(self) -> Around:
        hidden = self.products[-1].out_features
        return Around(self.norm, self.output_norm, self.scalar, self._residual, hidden)

    def _native_part(self, *norms: RMSNorm | None, others: Sequence[tuple[object, str]] = ()) -> NativePart[CPart]:
        """What watches whatever may be replaced: the tensors of its norms, those of `norms` too, its products, and
        `others`, attributes."""
        gains = [norm for norm in (self.norm, self.output_norm, *norms) if norm is not None]
        return NativePart(gains, (*self.products, *self.kept), others=others)

    def load_own(self, checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype) -> None:
        """Read what is neither norm nor product."""
        for linear in self.kept:
            linear.load(checkpoint, {}, device, dtype)

    def steps(self, x: Tensor, context: PassContext) -> Steps:
        """The residual stream x [sequences, tokens, hidden] to the same."""
        output = yield from self.inner(normed(self.norm, x), context)
        return self.sum(x, output)

    def sum(self, x: Tensor, output: Tensor) -> Tensor:
        """The stream x with what `inner` made added to it."""
        output = normed(self.output_norm, output)
        x = x + (output if self._residual == 1.0 else output * self._residual)
        return x if self.scalar is None else x * self.scalar
