"""Launches decode attention over the paged KV cache, and chooses the shape of its programs."""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from mycli.runtime.cache.kv_cache import Stored
from mycli.runtime.errors import Declined
from mycli.runtime.kernels.paged import KEY_BLOCK, Ragged, Scoring
from mycli.runtime.kernels.triton.attention_kernel import attend_kernel
from mycli.runtime.kernels.triton.layer_cache import LayerCache
from mycli.runtime.kernels.triton.product.activation import Operand
from mycli.runtime.kernels.triton.product.matmul import Activation, FewRowsProduct, check_contiguous, uses_ptx
from mycli.runtime.kernels.triton.product.tiles import Chip
from mycli.runtime.models.config import ModelConfig

BLOCK_K = KEY_BLOCK  # keys per iteration of the loop
NARROWEST_HEAD = 9  # rounded up to a power of two, the inner dimension of a product of MMAs is at least 16
MAX_QUERIES = 64  # per program: tokens times the heads that share a key-value head
_MAX_SPLITS = 64
LEAST_TURNS = 4  # of a split: with fewer, combining costs more than reading keys side by side saves


def splits(chip: Chip, programs: int, capacity: int) -> int:
    """Return the number of splits of the keys: two programs per multiprocessor, at least four turns per program.

    capacity: most keys of a sequence. The number depends on nothing else of a sequence, so the split, and with it the
    bits of the result, stays while it grows.
    """
    fill = max(1, 2 * chip.processors // programs)
    return min(_MAX_SPLITS, fill, max(1, capacity // (LEAST_TURNS * BLOCK_K)))


def combination(tokens: int, group: int, head_dim: int, tile_k: int, parts: int, warps: int) -> dict[str, int]:
    """Return the constants of `attend_kernel` for the combination; group: heads that share a key-value head."""
    # A thread has up to 4 columns of 8 splits at a time, in 8 warps of 4 splits: more would cost the key loop its
    # second block on a multiprocessor.
    rows, columns = 1 << (tokens - 1).bit_length(), group * head_dim
    unit, segment = tile_k // math.gcd(tile_k, columns), math.gcd(tile_k, head_dim)
    tiles = min(1 << (unit * columns // tile_k - 1).bit_length(), max(1, 128 * warps // (rows * tile_k)))
    splits = min(32 // warps, 1 << (parts - 1).bit_length())
    return {"UNIT": unit, "ROWS": rows, "TILES": tiles, "SPLITS": splits, "SEGMENT": segment if segment >= 32 else 1}


def attend_warps(block_q: int) -> int:
    return 4 if block_q <= 16 else 8  # more than 16 queries in 4 warps would spill registers


def attend_stages(chip: Chip, head_dim: int, queries: int, element: int) -> int:
    """Return the pipeline stages of the key loop: 3, or as many as shared memory holds, maybe 0.

    queries: `BLOCK_Q`; element: bytes per cached number. An upper bound of what Triton 3.6 and 3.7 allocate.
    """
    # Chips with asynchronous MMA copy keys and values to shared memory ahead, and have the operands there too. Others
    # hold a block less than there are stages; if even one does not fit, values stay in registers.
    fitting = _blocks_that_fit(chip, head_dim, queries, element)
    if element == 1 and chip.shared < 128 << 10:  # two, so that two programs fit; they take one block ahead
        return max(0, min(2, fitting + 1))
    if element > 1 and not _asynchronous(chip):
        fitting = fitting + 1 if fitting > 0 else _blocks_that_fit(chip, head_dim, queries, element, 1)
    return max(0, min(3, fitting))


def copies_values(chip: Chip, head_dim: int, queries: int, element: int) -> bool:
    """Return whether values of 16 bits are copied to shared memory ahead, as keys are."""
    return element > 1 and _blocks_that_fit(chip, head_dim, queries, element) > 0


def _asynchronous(chip: Chip) -> bool:
    return chip.capability[0] in (9, 10, 11)


def _blocks_that_fit(chip: Chip, head_dim: int, queries: int, element: int, operands: int = 2) -> int:
    # Blocks of keys, and of values with two operands, after queries, weights and converted codes have their memory.
    lanes = 1 << (head_dim - 1).bit_length()
    block, others = BLOCK_K * lanes * element * operands, 2 * queries * (lanes + BLOCK_K) + 2048
    if element == 1:  # converted before the product, with a scale per key
        others += 2 * BLOCK_K * lanes
        block += 8 * BLOCK_K
    return (chip.shared - others) // block


def tokens_per_program(tokens: int, group: int) -> int:
    """Return how many new tokens of a sequence one program handles, in blocks of about equal size; 0 if none fits."""
    fitting = MAX_QUERIES // group
    return fitting and -(-tokens // -(-tokens // fitting))


def query_columns(tokens: int, group: int) -> int:
    """Return `BLOCK_Q`: the columns for `tokens` new tokens of the `group` heads that share a key-value head."""
    return max(8, 1 << (tokens * group - 1).bit_length())


def head_fits(chip: Chip, group: int, head_dim: int, tokens: int, element: int) -> bool:
    """Return whether the kernel attends with `group` heads per key-value head; element: bytes per cached number."""
    block_tokens = tokens_per_program(tokens, group)
    if block_tokens == 0 or head_dim < NARROWEST_HEAD:
        return False
    return attend_stages(chip, head_dim, query_columns(block_tokens, group), element) > 0


def heads_fit(chip: Chip, config: ModelConfig, tokens: int, element: int) -> bool:
    """Return whether the kernel attends in all layers of a model; arguments as in `head_fits`."""
    shapes = {(spec.heads // spec.kv_heads, spec.head_dim) for spec in config.attentions}
    return all([head_fits(chip, group, head_dim, tokens, element) for group, head_dim in shapes])


def decode_attention(
    query: Tensor,
    cache: LayerCache,
    lengths: Tensor,
    block_table: Tensor,
    scoring: Scoring,
    product: FewRowsProduct,
    counters: Tensor,
    counts: Tensor | None = None,
) -> Activation:
    """Return the attention of query [sequences, tokens, heads, head_dim] to the cache, as an operand of `product`.

    The queries are at the last positions of their sequences. lengths: int32 [sequences], including them; 0 for padding,
    whose rows become zeros. block_table: int32 [sequences, blocks]. Raises ValueError if more than 64 heads share a
    key-value head, or for a block size that is not supported. counters: int32 zeros, at least sequences * tokens *
    kv_heads; zero again afterwards. counts: int32 [sequences], new tokens of each sequence; its rows after them have
    no keys of their own, and their results mean nothing.
    """
    into = product.activation(query.shape[0] * query.shape[1])
    launch_attention(query, cache, lengths, block_table, scoring, into.operand(), product.chip, counters, counts)
    return into


def launch_attention(
    query: Tensor,
    cache: LayerCache,
    lengths: Tensor,
    block_table: Tensor,
    scoring: Scoring,
    into: Operand,
    chip: Chip,
    counters: Tensor,
    counts: Tensor | None = None,
) -> None:
    check_contiguous(query, lengths, counts, block_table, scoring.sinks)
    sequences, tokens, heads, head_dim = query.shape
    (kv_heads, block_size), table_width = cache.keys.shape[1:3], block_table.shape[1]
    if table_width > 1 and block_size % BLOCK_K:
        raise ValueError(f"{table_width} cache blocks per sequence of {block_size}, no multiple of {BLOCK_K}")
    group = heads // kv_heads
    if not head_fits(chip, group, head_dim, tokens, cache.keys.element_size()):
        raise ValueError(
            f"{group} heads of {head_dim} per key-value head: more than 64, narrow, or no shared memory left"
        )
    block_tokens = tokens_per_program(tokens, group)
    block_q = query_columns(block_tokens, group)
    query_blocks = sequences * -(-tokens // block_tokens)
    parts = splits(chip, query_blocks * kv_heads, table_width * block_size)
    dot = tl.float16
    if query.dtype is torch.bfloat16 and not (cache.keys.dtype is torch.int8 and uses_ptx()):
        dot = tl.bfloat16 if uses_ptx() else tl.float32  # the interpreter would multiply bf16 as integers
    shape = (query_blocks, kv_heads, parts, block_q)
    outputs = torch.empty((*shape, head_dim), dtype=torch.float32, device=query.device)
    stats = torch.empty((*shape, 2), dtype=torch.float32, device=query.device)
    log2e = math.log2(math.e)
    scale = scoring.scale / scoring.softcap if scoring.softcap else scoring.scale * log2e
    attend_kernel[(parts, kv_heads, query_blocks)](
        query, cache.keys, cache.values, cache.key_scales, cache.value_scales, lengths, counts, block_table, outputs,
        stats, *cache.keys.stride()[:2], block_size, table_width, scoring.window or scoring.chunk or 0, scale,
        scoring.softcap * log2e,
        scoring.sinks, counters, into, tokens,
        TOKENS=block_tokens, SPLIT_QUERIES=block_tokens < tokens, GROUP=group, HEAD_DIM=head_dim,
        BLOCK_D=triton.next_power_of_2(head_dim), BLOCK_Q=block_q, BLOCK_K=BLOCK_K,
        TURNS=0 if table_width == 1 else block_size // BLOCK_K, WINDOW=scoring.window is not None,
        CHUNKED=scoring.chunk is not None, CAPPED=bool(scoring.softcap), DOT=dot, ASM=uses_ptx(),
        **combination(block_tokens, group, head_dim, into.TILE_K.value, parts, attend_warps(block_q)),
        PURE=chip.capability[0] in (10, 11), LEAST_TURNS=LEAST_TURNS,
        UPRIGHT=copies_values(chip, head_dim, block_q, cache.keys.element_size()),
        PDL=chip.pdl, launch_pdl=chip.pdl,
        num_warps=attend_warps(block_q), num_stages=attend_stages(chip, head_dim, block_q, cache.keys.element_size()),
    )  # fmt: skip


def launch_paged_attention(
    query: Tensor, keys: Stored, values: Stored, ragged: Ragged, scoring: Scoring, chip: Chip, out: Tensor | None = None
) -> Tensor | Declined:
    """Compute `triton_attend_paged` on a chip; out: [tokens, heads * head_dim], where the result is written."""
    rows, heads, head_dim = query.shape
    assert ragged.tokens is not None
    if not head_fits(chip, heads // keys.data.shape[1], head_dim, ragged.tokens, keys.data.element_size()):
        return Declined("attention-shape", {"group": heads // keys.data.shape[1], "head_dim": head_dim})
    if out is None:
        out = torch.empty((rows, heads * head_dim), dtype=query.dtype, device=query.device)
    tile = min(128, head_dim & -head_dim)
    into = Operand(out, None, out.shape[1] // tile, 0, constexpr(tile), constexpr(False))
    counters = torch.zeros(rows * keys.data.shape[1], dtype=torch.int32, device=query.device)
    cache = LayerCache(keys.data, values.data, keys.scales, values.scales)
    shaped = query.reshape(rows // ragged.tokens, ragged.tokens, heads, head_dim).contiguous()
    launch_attention(shaped, cache, ragged.lengths, ragged.block_table, scoring, into, chip, counters, ragged.counts)
    return out
