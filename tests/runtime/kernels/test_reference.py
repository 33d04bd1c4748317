"""Test the plain reference kernels that no other test checks directly against written-out arithmetic."""

import math

import torch

from mycli.runtime.kernels.reference import gelu_multiply, layer_norm, relu_square, rms_norm


def test_activations_and_norms() -> None:
    x = torch.randn(3, 8, dtype=torch.float64)
    gate, up = x.chunk(2, dim=-1)
    curve = 0.5 * gate * (1 + torch.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)))
    assert torch.allclose(gelu_multiply(x), curve * up)
    assert torch.equal(relu_square(x), torch.where(x > 0, x * x, 0.0))
    gain, centred = torch.randn(8, dtype=torch.float64), x - x.mean(-1, keepdim=True)
    expected = centred / (centred.square().mean(-1, keepdim=True) + 1e-3).sqrt() * gain
    assert torch.allclose(layer_norm(x, gain, 1e-3), expected)


def test_a_gain_in_fp32_is_not_rounded_first() -> None:
    """The rounding of a gain 1 + w to bf16 would lose most of w."""
    x, gain = torch.ones(1, 1, 64, dtype=torch.bfloat16) * 300, 1 + torch.full((64,), 0.0021)
    assert rms_norm(x * 3, gain, 1e-6).dtype == torch.bfloat16
    exact = 3 * 300 / math.sqrt(900**2 + 1e-6) * gain
    assert torch.equal(rms_norm(x * 3, gain, 1e-6)[0, 0], exact.bfloat16())
