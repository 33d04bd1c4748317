"""Adam (arXiv 1412.6980), the same bits as torch's on the CPU."""

# Using `torch.optim` or `torch.utils.checkpoint` imports torch's compiler: 150 MiB and a second, and an error raised
# within it keeps every caller's tensors alive in a reference cycle.

from collections.abc import Sequence

import torch
from torch import Tensor

BETAS = (0.9, 0.95)
EPSILON = 1e-8


class Adam:
    def __init__(self, rates: Sequence[tuple[Sequence[Tensor], float]]) -> None:
        self._leaves = [(leaf, rate) for group, rate in rates for leaf in group]
        self._means = [torch.zeros_like(leaf) for leaf, _ in self._leaves]
        self._squares = [torch.zeros_like(leaf) for leaf, _ in self._leaves]
        self._steps = 0

    @torch.no_grad()
    def step(self, share: float) -> None:
        """Move every leaf that has a gradient by `share` of its rate, and clear the gradient."""
        self._steps += 1
        beta1, beta2 = BETAS
        unbiased, root = 1 - beta1**self._steps, (1 - beta2**self._steps) ** 0.5
        for (leaf, rate), mean, square in zip(self._leaves, self._means, self._squares, strict=True):
            if leaf.grad is None:
                continue
            mean.lerp_(leaf.grad, 1 - beta1)
            square.mul_(beta2).addcmul_(leaf.grad, leaf.grad, value=1 - beta2)
            deviation = square.sqrt().div_(root).add_(EPSILON)
            leaf.addcdiv_(mean, deviation, value=-rate * share / unbiased)
            leaf.grad = None
