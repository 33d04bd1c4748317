"""Test the sizes of vectors in an int4 cache."""

import pytest

from mycli.runtime.errors import ModelError
from mycli.runtime.quantization.int4_vectors import int4_bytes, int4_groups


def test_a_vector_is_half_a_byte_a_dimension_and_two_for_every_32() -> None:
    assert [int4_groups(size) for size in (16, 32, 48, 64, 80, 128, 256)] == [1, 1, 2, 2, 3, 4, 8]
    assert [int4_bytes(size) for size in (16, 32, 48, 64, 80, 128, 256)] == [10, 18, 28, 36, 46, 72, 144]


@pytest.mark.parametrize("head_dim", [-16, 0, 1, 8, 20, 72])
def test_other_heads_are_refused(head_dim: int) -> None:
    for count in (int4_groups, int4_bytes):
        with pytest.raises(ModelError, match="a multiple of 16"):
            count(head_dim)
