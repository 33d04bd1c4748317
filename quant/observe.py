"""Second moments of the inputs of a block's linears, collected while calibration tokens pass through it.

Nothing is padded, so every token counts, and counts once. Knows blocks and their inputs, nothing of what is solved.
"""

import torch
from torch import Tensor, nn

from mycli.quant.streaming import Surroundings, batches
from mycli.runtime.errors import ModelError
from mycli.runtime.linear import Linear
from mycli.runtime.transformer import Block


class _Reached(Exception):
    """The input was seen; the rest of the block need not run."""


class Hessian:
    """The mean of x x^T over rows x of `size` numbers, summed in fp32 on `device`."""

    def __init__(self, size: int, device: torch.device) -> None:
        self._sum = torch.zeros(size, size, device=device)
        self._rows = 0

    def add(self, inputs: Tensor) -> None:
        """inputs [..., size] of any float dtype. Raises ModelError for NaN or infinity."""
        rows = inputs.reshape(-1, self._sum.shape[0]).float()
        low, high = torch.aminmax(rows)
        if not bool(torch.isfinite(low) & torch.isfinite(high)):
            raise ModelError("activations are NaN or infinite", "--dtype float32")
        self._sum.addmm_(rows.T, rows)
        self._rows += len(rows)

    def mean(self) -> Tensor:
        """fp32 [size, size]; nothing may be added after."""
        return self._sum.div_(max(1, self._rows))


@torch.inference_mode()
def observe(block: Block, product: str, stream: Tensor, surroundings: Surroundings, device: torch.device) -> Tensor:
    """The Hessian fp32 [K, K] of what `product` (one of `Block.INPUTS`) of `block` gets for `stream`.

    stream [windows, context, hidden] is what the block gets. The block runs only as far as it must. Raises ModelError
    that names the layer and the windows where activations are not finite.
    """
    linear = getattr(block, product)
    assert isinstance(linear, Linear)
    hessian = Hessian(linear.in_features, device)

    def look(_: nn.Module, inputs: tuple[Tensor]) -> None:
        hessian.add(inputs[0])
        raise _Reached

    handle = linear.register_forward_pre_hook(look)
    done = 0
    try:
        for part in batches(stream):
            try:
                block(part.to(device), *surroundings, None)
            except _Reached:
                pass
            except ModelError as error:
                windows = f"calibration windows {done} to {done + len(part) - 1}"
                raise ModelError(f"{linear.specs[0].name}: {error.message} in {windows}", error.hint) from None
            done += len(part)
    finally:
        handle.remove()
    return hessian.mean()
