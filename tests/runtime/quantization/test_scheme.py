"""Sizes of a number format, and which shapes it fits."""

import pytest

from mycli.runtime.errors import ModelError
from mycli.runtime.quantization.scheme import BITS, GROUP_SIZES, Packing


@pytest.mark.parametrize("group", [*GROUP_SIZES, None])
@pytest.mark.parametrize("bits", BITS)
def test_sizes(bits: int, group: int | None) -> None:
    packing = Packing(bits, group)
    scales = 384 // group if group else 1
    assert packing.groups(384) == scales
    assert packing.bytes(10, 384) == 10 * (384 * bits // 8 + 2 * scales)


def test_a_group_that_does_not_divide_is_refused() -> None:
    with pytest.raises(ModelError, match="128 does not divide 192"):
        Packing(4, 128).groups(192)
