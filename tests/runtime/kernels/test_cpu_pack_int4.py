"""Test that native int4 packing equals torch's bit by bit, on every instruction set."""

import pytest
import torch

from mycli.runtime.cache.kv_cache import PACKED, Stored
from mycli.runtime.errors import Declined
from mycli.runtime.kernels.cpu.attention import native_stored
from tests.support.random_tensors import normal


def bits(stored: Stored | Declined) -> list[list[int]]:
    assert isinstance(stored, Stored) and stored.scales is not None
    return [stored.data.tolist(), stored.scales.view(torch.int16).tolist()]


@pytest.mark.usefixtures("vectors")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("head_dim", [16, 48, 64, 80, 96, 128, 192, 256, 512])
def test_codes_and_scales_are_those_of_torch(head_dim: int, dtype: torch.dtype) -> None:
    values = normal(37, 3, head_dim, seed=head_dim)
    values[1], values[2], values[3], values[4] = 0, values[2] * 1e-38, values[3] * 1e30, values[4].sign()
    values[5, 1, 3], values[6, 0, 7], values[7, 2, 1] = torch.inf, torch.nan, -torch.inf
    given = values.to(dtype)
    assert bits(native_stored(given, PACKED)) == bits(Stored.of(given, PACKED))
    turned = given.transpose(0, 1)
    assert bits(native_stored(turned, PACKED)) == bits(Stored.of(turned, PACKED))


def test_what_it_does_not_take_is_left_to_torch() -> None:
    assert "int4-vector-types" in str(native_stored(torch.ones(2, 20), PACKED))
    assert "int4-vector-types" in str(native_stored(torch.ones(2, 16, dtype=torch.float16), PACKED))
    assert "int4-vector-types" in str(native_stored(torch.ones(2, 16), torch.int8))
