"""Test the native elementwise steps against torch, for every instruction set of the library."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from mycli.runtime.checkpoint.open_folder import open_model_folder
from mycli.runtime.device.placement import Placement
from mycli.runtime.engine.loading.loader import load_model
from mycli.runtime.engine.passes.cpu import NATIVE_ROWS
from mycli.runtime.errors import Declined
from mycli.runtime.kernels.cpu.elementwise import (
    native_gelu,
    native_gelu_multiply,
    native_gelu_tanh,
    native_layer_norm,
    native_relu_square_multiply,
    native_rms_norm,
    native_rotate,
    native_silu_multiply,
    native_weigh_rows,
)
from mycli.runtime.kernels.cpu.library import build
from mycli.runtime.kernels.cpu.library.build import Native
from mycli.runtime.kernels.reference import (
    gelu,
    gelu_multiply,
    gelu_tanh,
    layer_norm,
    relu_square_multiply,
    rms_norm,
    rotate_heads,
    silu_multiply,
    weigh_rows,
)
from tests.support.engines import whole
from tests.support.paths import PICO
from tests.support.random_tensors import normal

pytestmark = pytest.mark.usefixtures("vectors")

SHAPES = [(5, 64), (1, 1, 16), (1, 50, 96), (1, 3, 256), (2, 8, 2048), (1, 1, 5120), (2, 4, 3, 128)]


def same(found: Tensor | str, expected: Tensor, differing: float = 0.0) -> None:
    """Assert equality except for a share of values at a bf16 tie, which may differ by one unit in the last place."""
    assert isinstance(found, Tensor) and found.shape == expected.shape and found.dtype == expected.dtype
    away = found != expected
    assert away.float().mean() <= differing
    torch.testing.assert_close(found, expected, rtol=2**-7, atol=1e-30)


@pytest.mark.parametrize("gain_type", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("scale", [1e-18, 1e-3, 1.0, 1e15])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_norm(shape: tuple[int, ...], scale: float, gain_type: torch.dtype) -> None:
    """The gains of fp32 are 1 + w with a small w, so rounding them to bf16 would be visible."""
    x, gain = (normal(*shape) * scale).bfloat16(), normal(shape[-1], seed=1)
    gain = gain.bfloat16() if gain_type is torch.bfloat16 else 1 + gain * 2**-6
    same(native_rms_norm(x, gain, 1e-5), rms_norm(x, gain, 1e-5), 0.002)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("offset", [0.0, 100.0])
@pytest.mark.parametrize("shape", [(1, 16), (3, 40, 48), (1, 1, 4096)], ids=str)
def test_layer_norm(shape: tuple[int, ...], offset: float, dtype: torch.dtype) -> None:
    """The mean is subtracted before squaring, so that values far from zero keep their precision."""
    x, gain = (normal(*shape) + offset).to(dtype), normal(shape[-1], seed=1).to(dtype)
    found, expected = native_layer_norm(x, gain, 1e-5), layer_norm(x.double(), gain.double(), 1e-5)
    assert isinstance(found, Tensor) and found.dtype == dtype
    step = 2**-8 if dtype == torch.bfloat16 else 2**-20
    torch.testing.assert_close(found.double(), expected, rtol=1.01 * step, atol=4e-6 * max(offset, 1.0))
    bias = normal(shape[-1], seed=2).to(dtype)
    found, expected = native_layer_norm(x, gain, 1e-5, bias), expected + bias.double()
    assert isinstance(found, Tensor)
    torch.testing.assert_close(found.double(), expected, rtol=1.01 * step, atol=4e-6 * max(offset, 1.0))


def test_layer_norm_with_a_gain_of_fp32() -> None:
    """Check that a gain of 1 + w and its bias stay in fp32 (Nemotron)."""
    x, gain, bias = normal(3, 48).bfloat16(), 1 + normal(48, seed=1) * 2**-6, normal(48, seed=2) * 2**-6
    same(native_layer_norm(x, gain, 1e-5, bias), layer_norm(x, gain, 1e-5, bias), 0.002)


@pytest.mark.parametrize("shape", [(3, 32), (1, 5, 512), (2, 40, 96)], ids=str)
def test_activations_without_or_with_another_gate(shape: tuple[int, ...]) -> None:
    x = (normal(*shape) * 2).bfloat16()
    same(native_relu_square_multiply(x), relu_square_multiply(x), 0.0)
    found, expected = native_gelu_tanh(x), gelu_tanh(x)
    assert isinstance(found, Tensor)
    kept = x > -2  # torch's 1 + tanh loses values below -3, as in test_gelu
    same(found[kept], expected[kept], 0.002)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 4.0, 1e15])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_exact_gelu(dtype: torch.dtype, scale: float) -> None:
    """Compare with fp64, also where the values of negative inputs are tiny and torch's are zero."""
    x = (normal(7, 96) * scale).to(dtype)
    found, exact = native_gelu(x), x.double() * torch.special.erfc(x.double() * -(0.5**0.5)) / 2
    assert isinstance(found, Tensor)
    torch.testing.assert_close(found.double(), exact, rtol=5e-6 if dtype == torch.float32 else 2**-8, atol=1e-36)
    torch.testing.assert_close(found.float(), gelu(x.float()), rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_weights_of_values(dtype: torch.dtype) -> None:
    """The gate is per value, not per row."""
    x, gate = normal(3, 5, 48).to(dtype), (normal(3, 5, 48, seed=1) * 6).to(dtype)
    found, expected = native_weigh_rows(x, gate), weigh_rows(x, gate)
    if dtype == torch.bfloat16:
        same(found, expected, 0.01)
    else:
        assert isinstance(found, Tensor)
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("shape", [(1, 16), (1, 5, 128), (1, 40, 48)], ids=str)
def test_weights_of_rows(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Check that each row has the same bits alone and that non-finite values are detected in their own row only."""
    x, gate = normal(*shape).to(dtype), (normal(*shape[:-1], 1, seed=1) * 6).to(dtype)
    gate.view(-1)[-1] = torch.nan
    found = native_weigh_rows(x, gate)
    assert isinstance(found, Tensor)
    assert found.view(-1, shape[-1])[-1].isnan().all()
    expected = weigh_rows(x, gate)
    if dtype == torch.bfloat16:
        same(found.nan_to_num(3), expected.nan_to_num(3), 0.01)
    else:
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7, equal_nan=True)
    last = native_weigh_rows(x[..., -1:, :], gate[..., -1:, :])
    assert isinstance(last, Tensor) and torch.equal(last.nan_to_num(3), found[..., -1:, :].nan_to_num(3))


@pytest.mark.parametrize("shape", [(3, 32), (1, 1, 32), (1, 5, 512), (2, 40, 512), (2, 8, 22016)], ids=str)
def test_activation(shape: tuple[int, ...]) -> None:
    x = (normal(*shape) * 8).bfloat16()
    same(native_silu_multiply(x), silu_multiply(x), 0.002)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 8.0, 1e15])
@pytest.mark.parametrize("shape", [(3, 32), (1, 1, 32), (1, 5, 512), (2, 40, 512), (2, 8, 22016)], ids=str)
def test_gelu(shape: tuple[int, ...], scale: float) -> None:
    """Compare with the exact value below -3, where torch's 1 + tanh loses gates and ours does not."""
    x = (normal(*shape) * scale).bfloat16()
    found, size = native_gelu_multiply(x), shape[-1] // 2
    kept = x[..., :size] > -2
    expected = gelu_multiply(x)
    assert isinstance(found, Tensor)
    same(found[kept], expected[kept], 0.002)
    gate, up = x.double().chunk(2, dim=-1)
    true = gate * torch.sigmoid(2 * (2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3))
    torch.testing.assert_close(found.double(), true * up, rtol=2**-7, atol=1e-35)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 8.0])
@pytest.mark.parametrize("shape", [(3, 32), (1, 1, 32), (2, 40, 512)], ids=str)
def test_steps_in_fp32(shape: tuple[int, ...], scale: float) -> None:
    x, gain = normal(*shape) * scale, normal(shape[-1], seed=1)
    wide = x.double()
    for found, expected in (
        (native_rms_norm(x, gain, 1e-5), rms_norm(wide, gain.double(), 1e-5)),
        (native_silu_multiply(x), silu_multiply(wide)),
        (native_gelu_multiply(x), gelu_multiply(wide)),
    ):
        assert isinstance(found, Tensor) and found.dtype == torch.float32
        torch.testing.assert_close(found.double(), expected, rtol=3e-6, atol=1e-6 * scale)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize(
    ("sequences", "tokens", "head_dim", "dim"),
    [(1, 1, 64, 64), (2, 3, 128, 128), (1, 16, 32, 32), (2, 30, 64, 64), (1, 1, 128, 96), (2, 5, 72, 32)],
)
def test_rotation_has_torchs_bits(
    sequences: int, tokens: int, head_dim: int, dim: int, heads: int, interleaved: bool, dtype: torch.dtype
) -> None:
    """The input is a slice of the projection; the tables cover a slice of positions and part of a head."""
    x = normal(sequences, tokens, heads + 2, head_dim).to(dtype)[:, :, :heads]
    cos, sin = (normal(40, dim // 2, seed=seed).to(dtype)[5 : 5 + tokens] for seed in (1, 2))
    same(native_rotate(x, cos, sin, interleaved), rotate_heads(x, cos, sin, interleaved))


def test_a_row_has_the_same_bits_alone_and_among_others() -> None:
    """The row counts cover one thread and work shared by several."""
    tokens = 40
    x, gain = normal(1, tokens, 256).bfloat16(), normal(256, seed=1)
    cos, sin = normal(tokens, 16, seed=2).bfloat16(), normal(tokens, 16, seed=3).bfloat16()
    heads = x.view(1, tokens, 8, 32)
    for token in range(tokens):
        one = slice(token, token + 1)
        for alone, among in (
            (native_rms_norm(x[:, one], gain.bfloat16(), 1e-6), native_rms_norm(x, gain.bfloat16(), 1e-6)),
            (native_rms_norm(x[:, one], gain, 1e-6), native_rms_norm(x, gain, 1e-6)),
            (native_silu_multiply(x[:, one]), native_silu_multiply(x)),
            (native_gelu_multiply(x[:, one]), native_gelu_multiply(x)),
            (native_rms_norm(x[:, one].float(), gain, 1e-6), native_rms_norm(x.float(), gain, 1e-6)),
            (native_silu_multiply(x[:, one].float()), native_silu_multiply(x.float())),
            (native_gelu_multiply(x[:, one].float()), native_gelu_multiply(x.float())),
            (native_rotate(heads[:, one], cos[one], sin[one]), native_rotate(heads, cos, sin)),
            (native_rotate(heads[:, one], cos[one], sin[one], True), native_rotate(heads, cos, sin, True)),
        ):
            assert isinstance(alone, Tensor) and isinstance(among, Tensor) and torch.equal(alone, among[:, one])


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_is_no_number_stays_one(value: float) -> None:
    x, gain = normal(1, 2, 64).bfloat16(), torch.ones(64)
    x[0, 1, 3] = value
    normed = native_rms_norm(x, gain, 1e-5)
    assert isinstance(normed, Tensor) and normed[0, 0].isfinite().all() and normed[0, 1, 3].isnan()
    for found, expected in (
        (native_silu_multiply(x), silu_multiply(x)),
        (native_gelu_multiply(x), gelu_multiply(x)),
    ):
        assert isinstance(found, Tensor) and found[0, 0].isfinite().all()
        torch.testing.assert_close(found[0, 1, 3], expected[0, 1, 3], equal_nan=True)


def test_a_reply_is_made_with_them(vectors: Native, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run norms, rotary and activations of every layer in bf16, with more rows than one native call takes."""
    taken: Counter[str] = Counter()

    def counting(name: str) -> Any:
        def call(*arguments: Any) -> Any:
            taken[name] += 1
            return getattr(vectors, name)(*arguments)

        return call

    watched = replace(vectors, **{name: counting(name) for name in ("norm", "gate", "rotate")})
    monkeypatch.setattr(build, "native", lambda: watched)
    runner = load_model(open_model_folder(PICO), Placement(torch.device("cpu"), torch.bfloat16))
    layers = runner.config.layers
    whole(runner.model, torch.tensor([[5] * (NATIVE_ROWS + 1)]))
    assert taken == {"norm": 2 * layers + 1, "gate": layers, "rotate": 2 * layers}


def test_what_it_leaves_to_torch() -> None:
    gain = torch.ones(64).bfloat16()
    x = normal(1, 2, 64).bfloat16()
    others = [x.double(), x.half(), normal(1, 2, 128).bfloat16()[..., ::2]]
    for one in (*others, x.clone().requires_grad_()):
        for declined in (
            native_rms_norm(one, gain, 1e-5),
            native_silu_multiply(one),
            native_gelu_multiply(one),
        ):
            assert isinstance(declined, Declined)
    assert "norm-gain-layout" in str(native_rms_norm(x, gain.half(), 1e-5))
    assert "norm-gain-layout" in str(native_rms_norm(x.float(), gain, 1e-5))
    assert "norm-gain-layout" in str(native_rms_norm(x, torch.ones(128)[::2], 1e-5))
    assert "no-gradient" in str(native_rms_norm(x, gain.float().requires_grad_(), 1e-5))
    assert "rows-not-whole-vectors" in str(native_rms_norm(x[..., :24].contiguous(), gain[:24], 1e-5))
    cos = sin = normal(2, 40).bfloat16()
    assert "rows-not-whole-vectors" in str(native_rotate(normal(1, 2, 3, 80).bfloat16(), cos, sin))  # half a head
    cos = sin = normal(2, 32).bfloat16()
    assert "rotary-table-shapes" in str(native_rotate(normal(1, 2, 3, 48).bfloat16(), cos, sin))
    apart = normal(1, 3, 2, 64).bfloat16().transpose(1, 2)  # heads are not adjacent
    assert "rotary-layout" in str(native_rotate(apart, cos, sin))
