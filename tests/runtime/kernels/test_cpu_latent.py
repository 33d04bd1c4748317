"""Test products by heads in native code, and what it and latent attention leave to torch."""

import pytest
import torch

from mycli.runtime.cache.kv_cache import Stored
from mycli.runtime.errors import Declined
from mycli.runtime.kernels.cpu.latent import native_head_product, native_latent_attention
from mycli.runtime.kernels.paged import Ragged
from mycli.runtime.kernels.reference import head_product


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_heads_are_multiplied_natively(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(*shape, generator=generator).to(dtype) for shape in ((5, 3, 64), (3, 32, 64)))
    y = native_head_product(x, weight)
    assert not isinstance(y, Declined) and y.dtype == dtype
    assert torch.allclose(y.float(), head_product(x.float(), weight.float()), rtol=2e-2, atol=2e-1)


@pytest.mark.parametrize("dtypes", [(torch.float16, torch.float16), (torch.bfloat16, torch.float32)])
def test_other_dtypes_are_declined(dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    x, weight = torch.zeros(5, 3, 64, dtype=dtypes[0]), torch.zeros(3, 32, 64, dtype=dtypes[1])
    assert isinstance(native_head_product(x, weight), Declined)


def test_cached_vectors_of_another_size_are_declined() -> None:
    one = torch.ones(1, dtype=torch.int32)
    ragged = Ragged(torch.tensor([0, 1], dtype=torch.int32), one, one[None] - 1)
    query, rotated_query = torch.zeros(1, 4, 32), torch.zeros(1, 4, 16)
    latents, rotated = Stored(torch.zeros(1, 1, 16, 32)), Stored(torch.zeros(1, 1, 16, 8))
    declined = native_latent_attention(query, rotated_query, latents, rotated, ragged, 1.0)
    assert declined == Declined("cache-vector-size", {"expected": 16, "size": 8})
