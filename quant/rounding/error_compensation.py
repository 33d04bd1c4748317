"""Targets W* x ~ W y for the inputs x of the quantized model and y of the original, to compensate earlier errors."""

from dataclasses import dataclass

import torch
from torch import Tensor

from mycli.runtime.errors import Declined
from mycli.runtime.kernels.cpu.rounded import add_rounded_outer, rounded_product, rounds
from mycli.runtime.kernels.registry import DENSE_PRODUCT

# Ridge regression on calibration tokens: the first step of Qronos (arXiv 2505.11695), for all columns together.
RIDGE = 0.01  # share of the mean of diag(H), the least damping of the solvers
# From this width on, sums took two thirds of the time of all moments, so only what is needed is summed: the lower
# triangle of the Hessian, in strips of rows up to the diagonal, and the product of the weight with the drift. Narrower
# inputs keep the plain sums of torch, so that the results for small models stay the same byte for byte; the native
# sums are of the lower triangle at every width.
_WIDE = 2048
_STRIPS = 8
_NATIVE_STRIPS = 32


@dataclass(frozen=True)
class Moments:
    """Sums over tokens: `hessian` of x x^T, fp32 [K, K], and `drift` of (y - x) x^T [K, K] or W (y - x) x^T [N, K].

    weight: W; None for a drift [K, K]. The columns of `hessian` after the end of a strip of rows are undefined until
    `complete`; strip: the number of rows.
    """

    hessian: Tensor
    drift: Tensor
    strip: int
    weight: Tensor | None = None

    @classmethod
    def zeros(cls, size: int, device: torch.device, weight: Tensor | None = None) -> "Moments":
        """Return empty sums for inputs of `size`; `weight` [N, size]: the factor of the drift."""
        rows = size if weight is None else drift_rows(len(weight), size)
        weight = None if rows == size else weight
        strips = _NATIVE_STRIPS if device.type == "cpu" and rounds() else _STRIPS if size >= _WIDE else 1
        zeros = torch.zeros(size, size, device=device), torch.zeros(rows, size, device=device)
        return cls(*zeros, -(-size // strips), weight)

    def add(self, inputs: Tensor, originals: Tensor | None = None) -> None:
        """Add rows [n, K] of a model's inputs, and those of the original if drift is wanted."""
        if add_rounded_outer(self.hessian, inputs, inputs, self.strip) is not None:
            for start, end in self._strips():
                self.hessian[start:end, :end].addmm_(inputs[:, start:end].T, inputs[:, :end])
        if originals is None or torch.equal(originals, inputs):  # both streams enter the first block
            return
        change = originals - inputs
        change = change if self.weight is None else DENSE_PRODUCT(change, self.weight)
        if add_rounded_outer(self.drift, change, inputs, len(self.drift)) is not None:
            self.drift.addmm_(change.T, inputs)

    def complete(self) -> "Moments":
        """Fill the upper triangle of the Hessian from the lower one."""
        for start, end in self._strips():
            self.hessian[start:end, end:] = self.hessian[end:, start:end].T
        return self

    def _strips(self) -> list[tuple[int, int]]:
        size = len(self.hessian)
        return [(start, min(start + self.strip, size)) for start in range(0, size, self.strip)]


def drift_rows(rows: int, columns: int) -> int:
    """Return the number of rows of the drift that is summed for a weight of `rows` x `columns`."""
    # A token costs columns^2 multiplications for the drift itself, 2 rows x columns for its product with the weight.
    return rows if columns >= _WIDE and 2 * rows < columns else columns


def refit(weight: Tensor, fitted: Moments, held_out: Moments) -> tuple[Tensor, float]:
    """Return the target fp32 [N, K] for weight [N, K], and the share of the correction that it takes, 0 to 1."""
    target = weight.float()
    damped = fitted.hessian.clone()
    damped.diagonal().add_(RIDGE * damped.diagonal().mean())
    factor, failed = torch.linalg.cholesky_ex(damped)
    del damped
    if failed:
        return target, 0.0
    solution = torch.cholesky_solve(fitted.drift.T, factor).T
    step = target @ solution if fitted.weight is None else solution
    # The direction fits the calibration sample; its length is the best one for the held-out windows, so that noise of
    # the sample is not corrected.
    length = float(((step @ held_out.hessian) * step).sum(dtype=torch.float64))
    drift = target @ held_out.drift if held_out.weight is None else held_out.drift
    agreement = float((drift * step).sum(dtype=torch.float64))
    if not length > 0:
        return target, 0.0
    share = min(1.0, max(0.0, agreement / length))
    return target + share * step, share


def output_size(weight: Tensor, hessian: Tensor) -> float:
    """Return ||W X||^2 of weight [N, K] for inputs X of second moments `hessian` fp32 [K, K]."""
    # The Hessian is symmetric, so its transpose takes its place.
    rows = weight.float().contiguous()
    product = rounded_product(rows, hessian)
    product = rows @ hessian if isinstance(product, Declined) else product
    return float(product.mul_(rows).sum(dtype=torch.float64))
