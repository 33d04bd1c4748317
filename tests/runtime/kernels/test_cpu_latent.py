"""The product of each head with its own weight in native code, and what it leaves to torch."""

import pytest
import torch

from mycli.runtime.errors import Declined
from mycli.runtime.kernels.cpu.latent import native_head_product
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
