"""The native steps between products against torch, for every instruction set the library is built for."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from mycli.runtime.checkpoint.model_folder import ModelFolder
from mycli.runtime.device.placement import Placement
from mycli.runtime.engine.loader import load_model
from mycli.runtime.kernels.cpu.build import Native, native
from mycli.runtime.kernels.cpu.elementwise import FEW, rms_norm, rotate_few, silu_multiply
from mycli.runtime.layers import rope, transformer
from mycli.runtime.layers.batch import Batch
from tests.conftest import PICO
from tests.support.random_tensors import normal

SHAPES = [(1, 1, 16), (1, 3, 256), (2, 8, 2048), (1, 1, 5120), (2, 4, 3, 128)]


def same(found: Tensor | None, expected: Tensor, differing: float = 0.0) -> None:
    """Equal but for a share of values that lie at a tie of bf16, one unit in the last place away."""
    assert found is not None and found.shape == expected.shape and found.dtype == expected.dtype
    away = found != expected
    assert away.float().mean() <= differing
    torch.testing.assert_close(found, expected, rtol=2**-7, atol=1e-30)


def halves(cos: Tensor, sin: Tensor, x: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


@pytest.mark.parametrize("scale", [1e-18, 1e-3, 1.0, 1e15])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_norm(shape: tuple[int, ...], scale: float, library: Native) -> None:
    x, gain = (normal(*shape) * scale).bfloat16(), normal(shape[-1], seed=1).bfloat16()
    same(rms_norm(x, gain, 1e-5, library), functional.rms_norm(x, gain.shape, gain, 1e-5), 0.002)


@pytest.mark.parametrize("shape", [(1, 1, 32), (1, 5, 512), (2, 8, 22016)], ids=str)
def test_activation(shape: tuple[int, ...], library: Native) -> None:
    x = (normal(*shape) * 8).bfloat16()
    gate, up = x.chunk(2, dim=-1)
    same(silu_multiply(x, library), functional.silu(gate) * up, 0.002)


@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize(("sequences", "tokens", "head_dim"), [(1, 1, 64), (2, 3, 128), (1, 16, 32)])
def test_rotation_has_torchs_bits(sequences: int, tokens: int, head_dim: int, heads: int, library: Native) -> None:
    """A part of the projection, as attention gets it; tables are a part of all positions."""
    x = normal(sequences, tokens, heads + 2, head_dim).bfloat16()[:, :, :heads]
    cos, sin = (normal(40, head_dim // 2, seed=seed).bfloat16()[5 : 5 + tokens] for seed in (1, 2))
    same(rotate_few(x, cos, sin, library), halves(cos, sin, x))


def test_a_row_has_the_same_bits_alone_and_among_others(library: Native) -> None:
    x, gain = normal(1, FEW, 256).bfloat16(), normal(256, seed=1).bfloat16()
    cos, sin = normal(FEW, 16, seed=2).bfloat16(), normal(FEW, 16, seed=3).bfloat16()
    heads = x.view(1, FEW, 8, 32)
    for token in range(FEW):
        one = slice(token, token + 1)
        for alone, among in (
            (rms_norm(x[:, one], gain, 1e-6, library), rms_norm(x, gain, 1e-6, library)),
            (silu_multiply(x[:, one], library), silu_multiply(x, library)),
            (rotate_few(heads[:, one], cos[one], sin[one], library), rotate_few(heads, cos, sin, library)),
        ):
            assert alone is not None and among is not None and torch.equal(alone, among[:, one])


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_is_no_number_stays_one(value: float, library: Native) -> None:
    x = normal(1, 2, 64).bfloat16()
    x[0, 1, 3] = value
    normed, active = rms_norm(x, torch.ones(64).bfloat16(), 1e-5, library), silu_multiply(x, library)
    assert normed is not None and active is not None
    assert normed[0, 0].isfinite().all() and normed[0, 1, 3].isnan()
    expected = functional.silu(x[..., :32]) * x[..., 32:]
    assert torch.equal(active[0, 1, 3].isnan(), expected[0, 1, 3].isnan()) and not active[0, 1, 3].isfinite()
    assert active[0, 0].isfinite().all()


def test_a_reply_is_made_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms, rotations and activations of every layer, in bf16 on this machine."""
    if isinstance(native(), str):
        pytest.skip(str(native()))
    taken: Counter[str] = Counter()

    def counted(name: str, function: Callable[..., Tensor | None]) -> Callable[..., Tensor | None]:
        def call(*arguments: Any) -> Tensor | None:
            result = function(*arguments)
            taken[name] += result is not None
            return result

        return call

    for module, name, function in (
        (transformer, "rms_norm", rms_norm),
        (transformer, "silu_multiply", silu_multiply),
        (rope, "rotate_few", rotate_few),
    ):
        monkeypatch.setattr(module, name, counted(name, function))
    runner = load_model(ModelFolder.open(PICO), Placement(torch.device("cpu"), torch.bfloat16))
    layers = runner.config.layers
    runner.run(Batch(torch.tensor([[5]]), 0), runner.make_cache(16))
    assert taken == {"rms_norm": 2 * layers + 1, "silu_multiply": layers, "rotate_few": 2 * layers}


def test_what_it_leaves_to_torch(library: Native) -> None:
    gain = torch.ones(64).bfloat16()
    x = normal(1, 2, 64).bfloat16()
    others = [x.float(), x.half(), x[0], normal(1, FEW + 1, 64).bfloat16(), normal(1, 2, 128).bfloat16()[..., ::2]]
    for one in (*others, x.clone().requires_grad_()):
        assert rms_norm(one, gain, 1e-5, library) is None and silu_multiply(one, library) is None
    assert rms_norm(x, gain.float(), 1e-5, library) is None
    assert rms_norm(x[..., :24].contiguous(), gain[:24], 1e-5, library) is None
    cos = sin = normal(2, 40).bfloat16()
    assert rotate_few(normal(1, 2, 3, 80).bfloat16(), cos, sin, library) is None  # half a head is no multiple of 16
    cos = sin = normal(2, 32).bfloat16()
    turned = normal(1, 3, 2, 64).bfloat16().transpose(1, 2)  # heads are not side by side
    assert rotate_few(turned, cos, sin, library) is None
