"""Test the sizes of vectors in an int4 cache."""

import pytest

from mycli.runtime.errors import ModelError
from mycli.runtime.quantization.int4_vectors import int4_bytes, int4_head_dim


def test_a_vector_is_half_a_byte_a_dimension_and_two_for_every_32() -> None:
    assert [int4_bytes(size) for size in (16, 32, 48, 64, 80, 128, 256)] == [10, 18, 28, 36, 46, 72, 144]


def test_the_head_follows_from_the_bytes() -> None:
    sizes = {int4_bytes(head_dim): head_dim for head_dim in range(16, 4097, 16)}
    assert len(sizes) == 256
    for nbytes in range(-1, max(sizes) + 1):
        if nbytes in sizes:
            assert int4_head_dim(nbytes) == sizes[nbytes]
            continue
        with pytest.raises(ValueError, match="no vector"):
            int4_head_dim(nbytes)


@pytest.mark.parametrize("head_dim", [-16, 0, 1, 8, 20, 72])
def test_other_heads_are_refused(head_dim: int) -> None:
    with pytest.raises(ModelError, match="a multiple of 16"):
        int4_bytes(head_dim)
