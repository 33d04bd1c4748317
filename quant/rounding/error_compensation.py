"""Targets W* x ~ W y for the inputs x of the quantized model and y of the original, to compensate earlier errors."""

from dataclasses import dataclass

import torch
from torch import Tensor

# Ridge regression on calibration tokens: the first step of Qronos (arXiv 2505.11695), for all columns together.
RIDGE = 0.01  # share of the mean of diag(H), the least damping of the solvers


@dataclass(frozen=True)
class Moments:
    """Sums over rows: `hessian` of x x^T, `drift` of (y - x) x^T, both fp32 [K, K]."""

    hessian: Tensor
    drift: Tensor

    @classmethod
    def zeros(cls, size: int, device: torch.device) -> "Moments":
        return cls(torch.zeros(size, size, device=device), torch.zeros(size, size, device=device))

    def add(self, inputs: Tensor, originals: Tensor) -> None:
        self.hessian.addmm_(inputs.T, inputs)
        self.drift.addmm_((originals - inputs).T, inputs)


def refit(weight: Tensor, fitted: Moments, held_out: Moments) -> tuple[Tensor, float]:
    """The target fp32 [N, K] for weight [N, K], and the share of the correction that it takes, 0 to 1."""
    target = weight.float()
    damped = fitted.hessian.clone()
    damped.diagonal().add_(RIDGE * damped.diagonal().mean())
    factor, failed = torch.linalg.cholesky_ex(damped)
    del damped
    if failed:
        return target, 0.0
    step = target @ torch.cholesky_solve(fitted.drift.T, factor).T
    # The direction fits the calibration sample; its length is the best one for the held-out windows, so that noise of
    # the sample is not corrected.
    length = float(((step @ held_out.hessian) * step).sum(dtype=torch.float64))
    agreement = float(((target @ held_out.drift) * step).sum(dtype=torch.float64))
    if not length > 0:
        return target, 0.0
    share = min(1.0, max(0.0, agreement / length))
    return target + share * step, share
