"""Test the dtype table against torch, and the names that config.json may use."""

import pytest

from mycli.runtime.device.placement import dtype_info, torch_dtype
from mycli.runtime.utils.dtypes import DTYPES, FLOATS, DtypeInfo, float_dtype


@pytest.mark.parametrize("info", DTYPES, ids=lambda info: info.name)
def test_the_table_agrees_with_torch(info: DtypeInfo) -> None:
    dtype = torch_dtype(info.name)
    assert torch_dtype(info.safetensors_name) is dtype and dtype.itemsize == info.nbytes and dtype_info(dtype) is info


def test_short_names_of_floats() -> None:
    assert FLOATS == {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


@pytest.mark.parametrize(
    "text, name",
    [
        ("bfloat16", "bfloat16"),
        ("torch.bfloat16", "bfloat16"),
        ("torch.float16", "float16"),
        ("half", "float16"),
        ("float", "float32"),
        ("float64", None),
        ("int8", None),
        ("torch.half", None),
        ("", None),
    ],
)
def test_the_dtype_of_a_config(text: str, name: str | None) -> None:
    assert float_dtype(text) == name
