"""Test that native int4 packing equals torch's byte by byte, on every instruction set."""

import pytest
import torch

from mycli.runtime.cache.int4 import pack_int4
from mycli.runtime.kernels.cpu.attention import native_pack_int4
from tests.support.random_tensors import normal


@pytest.mark.usefixtures("vectors")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("head_dim", [16, 48, 64, 80, 96, 128, 192, 256, 512])
def test_bytes_are_those_of_torch(head_dim: int, dtype: torch.dtype) -> None:
    values = normal(37, 3, head_dim, seed=head_dim)
    values[1], values[2], values[3], values[4] = 0, values[2] * 1e-38, values[3] * 1e30, values[4].sign()
    values[5, 1, 3], values[6, 0, 7], values[7, 2, 1] = torch.inf, torch.nan, -torch.inf
    given = values.to(dtype)
    assert torch.equal(torch.as_tensor(native_pack_int4(given)), pack_int4(given))
    turned = given.transpose(0, 1)
    assert torch.equal(torch.as_tensor(native_pack_int4(turned)), pack_int4(turned))


def test_what_it_does_not_take_is_left_to_torch() -> None:
    assert "int4-vector-types" in str(native_pack_int4(torch.ones(2, 20)))
    assert "int4-vector-types" in str(native_pack_int4(torch.ones(2, 16, dtype=torch.float16)))
