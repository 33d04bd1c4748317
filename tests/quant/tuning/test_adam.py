"""Test Adam against torch's, bit for bit."""

import math

import torch

from mycli.quant.tuning.adam import BETAS, Adam


def leaves() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(size, generator=generator).requires_grad_() for size in ((5, 7), (3,), (64, 33))]


def test_it_takes_the_steps_of_torch_with_a_rate_for_each_group() -> None:
    ours, theirs = leaves(), leaves()
    mine = Adam([(ours[:2], 0.01), (ours[2:], 0.003)])
    reference = torch.optim.Adam([{"params": theirs[:2], "lr": 0.01}, {"params": theirs[2:], "lr": 0.003}], betas=BETAS)
    generator = torch.Generator().manual_seed(1)
    for step in range(30):
        share = (1 + math.cos(math.pi * step / 30)) / 2
        for group, rate in zip(reference.param_groups, (0.01, 0.003), strict=True):
            group["lr"] = rate * share
        for one, other in zip(ours, theirs, strict=True):
            one.grad = torch.randn(one.shape, generator=generator)
            other.grad = one.grad.clone()
        mine.step(share)
        reference.step()
        assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True)), f"step {step}"
        assert all(leaf.grad is None for leaf in ours)


def test_a_leaf_without_a_gradient_stays() -> None:
    moved, still = torch.zeros(2, requires_grad=True), torch.zeros(2, requires_grad=True)
    moved.grad = torch.ones(2)
    Adam([([moved, still], 0.1)]).step(1.0)
    torch.testing.assert_close(moved.detach(), torch.full((2,), -0.1))
    assert not still.any()
