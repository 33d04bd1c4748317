"""Second moments of the inputs of a block's linears, collected while calibration tokens pass through it.

Nothing is padded, so every token counts, and counts once. Knows blocks and their inputs, nothing of what is solved.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mycli.quant.refit import Moments
from mycli.quant.streaming import Surroundings, batches
from mycli.runtime.errors import ModelError
from mycli.runtime.linear import Linear
from mycli.runtime.transformer import Block

HELD = 8  # every so many windows, one is kept apart to judge by


class _Reached(Exception):
    """The input was seen; the rest of the block need not run."""


@dataclass(frozen=True)
class View:
    """A block and the residual stream [windows, context, hidden], on the host, that it gets."""

    block: Block
    stream: Tensor


def require_finite(activations: Tensor) -> None:
    """Raises ModelError for NaN or infinity."""
    low, high = torch.aminmax(activations)
    if not bool(torch.isfinite(low) & torch.isfinite(high)):
        raise ModelError("activations are NaN or infinite", "the model does not hold on this text; try other --calib")


@torch.inference_mode()
def inputs(block: Block, product: str, x: Tensor, surroundings: Surroundings) -> Tensor:
    """What `product`, one of `Block.INPUTS`, gets for x [windows, context, hidden]: [windows, context, K].

    The block runs only as far as it must.
    """
    linear = getattr(block, product)
    assert isinstance(linear, Linear)
    seen: list[Tensor] = []

    def look(_: nn.Module, arguments: tuple[Tensor]) -> None:
        seen.append(arguments[0])
        raise _Reached

    handle = linear.register_forward_pre_hook(look)
    try:
        block(x, *surroundings, None)
    except _Reached:
        pass
    finally:
        handle.remove()
    return seen[0].view(*x.shape[:2], -1)


@torch.inference_mode()
def observe(
    quantized: View, original: View, product: str, surroundings: Surroundings, device: torch.device
) -> tuple[Moments, Moments]:
    """Moments of what `product` gets in both models: of most windows, and of the windows held apart.

    Raises ModelError that names the layer and the windows where activations are not finite.
    """
    linear = getattr(quantized.block, product)
    assert isinstance(linear, Linear)
    fitted, held = (Moments.zeros(linear.in_features, device) for _ in range(2))
    done = 0
    for ours, theirs in zip(batches(quantized.stream), batches(original.stream), strict=True):
        x = inputs(quantized.block, product, ours.to(device), surroundings).float()
        y = inputs(original.block, product, theirs.to(device), surroundings).float()
        try:
            require_finite(x)
            require_finite(y)
        except ModelError as error:
            windows = f"calibration windows {done} to {done + len(x) - 1}"
            raise ModelError(f"{linear.specs[0].name}: {error.message} in {windows}", error.hint) from None
        apart = torch.arange(done, done + len(x)) % HELD == HELD - 1
        for moments, chosen in ((fitted, ~apart), (held, apart)):
            moments.add(x[chosen].flatten(0, 1), y[chosen].flatten(0, 1))
        done += len(x)
    return fitted, held
