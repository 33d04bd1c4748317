"""The layout of key or value vectors in an int4 cache: their codes, and apart from them the scales of their groups."""

from mycli.runtime.errors import ModelError

# Every 16 dimensions are 8 bytes: byte i holds the code of dimension i in its lower half and that of dimension i + 8 in
# its upper half. A code is a signed integer of 4 bits, -8 to 7. Each group of 32 dimensions (the last may have 16) has
# one bf16 scale, so a head of 64 takes 32 bytes and 2 scales. Scales are a tensor of their own: if they lay behind the
# codes of each vector, a GPU would read a sector of 32 bytes for 8. `runtime.cache.int4` converts codes and values.
UNIT = 16  # dimensions whose codes are interleaved
INT4_GROUP = 32  # dimensions that share a scale
INT4_SCALE_BYTES = 2
FUSED_INT4_HEADS = (64, 128, 256)  # head dimensions of the GPU kernels: powers of two, whole groups in either half


def int4_groups(head_dim: int) -> int:
    """Return the number of scales of a vector. Raises ModelError if `head_dim` is not a multiple of 16."""
    if head_dim <= 0 or head_dim % UNIT:
        message = f"an int4 cache needs a head dimension that is a multiple of {UNIT}; this model has {head_dim}"
        raise ModelError(message, "choose a cache of int8, or of the model's dtype")
    return -(-head_dim // INT4_GROUP)


def int4_bytes(head_dim: int) -> int:
    """Return the bytes of a vector with its scales. Raises as `int4_groups`."""
    return head_dim // 2 + int4_groups(head_dim) * INT4_SCALE_BYTES
