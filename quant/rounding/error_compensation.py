"""Targets that make up for what was lost before: W* with W* x ~ W y, x the input that the quantized model gives a
linear, y the one that the original gives it.

That is ridge regression on calibration tokens (the first step of Qronos, arXiv 2505.11695, for all columns at once).
How much of the correction to trust is decided by tokens it was not fitted to. Knows moments and matrices, not where
they come from.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

RIDGE = 0.01  # share of the mean of diag(H), as the least damping of the solvers


@dataclass(frozen=True)
class Moments:
    """Sums over rows: `hessian` of x x^T, `drift` of (y - x) x^T, both fp32 [K, K]."""

    hessian: Tensor
    drift: Tensor

    @classmethod
    def zeros(cls, size: int, device: torch.device) -> "Moments":
        """Of no rows."""
        return cls(torch.zeros(size, size, device=device), torch.zeros(size, size, device=device))

    def add(self, inputs: Tensor, originals: Tensor) -> None:
        """inputs x and originals y fp32 [rows, K]."""
        self.hessian.addmm_(inputs.T, inputs)
        self.drift.addmm_((originals - inputs).T, inputs)


def refit(weight: Tensor, fitted: Moments, held: Moments) -> tuple[Tensor, float]:
    """The target fp32 [N, K] for weight [N, K], and how much of the correction it takes, 0 to 1.

    The direction comes from `fitted`, its length is the best for `held`. Nothing is corrected where neither says so.
    """
    wanted = weight.float()
    damped = fitted.hessian.clone()
    damped.diagonal().add_(RIDGE * damped.diagonal().mean())
    factor, failed = torch.linalg.cholesky_ex(damped)
    del damped
    if failed:
        return wanted, 0.0
    step = wanted @ torch.cholesky_solve(fitted.drift.T, factor).T
    length = float(((step @ held.hessian) * step).sum(dtype=torch.float64))
    agreement = float(((wanted @ held.drift) * step).sum(dtype=torch.float64))
    if not length > 0:
        return wanted, 0.0
    share = min(1.0, max(0.0, agreement / length))
    return wanted + share * step, share
