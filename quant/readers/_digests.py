"""Digests of the rows of a weight; the child scripts compute the same ones without importing mycli."""

import hashlib

import torch
from torch import Tensor


def row_digests(values: Tensor) -> tuple[str, ...]:
    """Return a digest of the fp32 values of each row of [rows, columns]; minus zero counts as zero."""
    # A zero level times a negative scale is minus zero in one program and zero in another.
    rows = (values.to(torch.float32) + 0).contiguous().numpy()
    return tuple(hashlib.blake2b(row.tobytes(), digest_size=8).hexdigest() for row in rows)
