"""Digests of the rows of a weight, the same in every process that reads one."""

import hashlib

import torch
from torch import Tensor


def row_digests(values: Tensor) -> tuple[str, ...]:
    """A digest of the fp32 values of each row of [rows, columns]; minus zero counts as zero."""
    rows = (values.to(torch.float32) + 0).contiguous().numpy()
    return tuple(hashlib.blake2b(row.tobytes(), digest_size=8).hexdigest() for row in rows)
