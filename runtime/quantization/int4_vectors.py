"""How a vector of keys or values lies in an int4 cache: codes first, then the scales of its groups.

Dimensions are taken 16 at a time, in 8 bytes: byte i holds the code of dimension i in its lower half and that of
dimension i + 8 in its upper. A code is a signed integer of 4 bits, -8 to 7; a group of 32 dimensions (the last may be
16) has one scale in bf16, so that a head of 64 takes 36 bytes. What the codes mean is in `runtime.cache.int4`. Does not
import torch.
"""

from mycli.runtime.errors import ModelError

UNIT = 16  # dimensions whose codes lie together
INT4_GROUP = 32  # dimensions that share a scale
INT4_SCALE_BYTES = 2
FUSED_INT4_HEADS = (64, 128, 256)  # what GPU kernels write and read: powers of two, whole groups in either half


def int4_groups(head_dim: int) -> int:
    """Scales of a vector."""
    return -(-head_dim // INT4_GROUP)


def int4_bytes(head_dim: int) -> int:
    """Bytes of a vector. Raises ModelError for heads that are not a multiple of 16."""
    if head_dim <= 0 or head_dim % UNIT:
        message = f"an int4 cache takes heads in multiples of {UNIT} dimensions, and this model has one of {head_dim}"
        raise ModelError(message, "keep keys and values in int8, or as they are computed")
    return head_dim // 2 + int4_groups(head_dim) * INT4_SCALE_BYTES


def int4_head_dim(nbytes: int) -> int:
    """The head of a vector of so many bytes: what `int4_bytes` is the inverse of. Raises ValueError for other sizes."""
    head_dim = nbytes * 2 * INT4_GROUP // (INT4_GROUP + 2 * INT4_SCALE_BYTES) // UNIT * UNIT
    if head_dim <= 0 or int4_bytes(head_dim) != nbytes:
        raise ValueError(f"no vector of int4 codes takes {nbytes} bytes")
    return head_dim
