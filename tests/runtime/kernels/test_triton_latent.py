"""Test latent attention of captured passes against the reference in the interpreter."""

import pytest
import torch

from mycli.runtime.cache.kv_cache import Stored
from mycli.runtime.errors import Declined
from mycli.runtime.kernels.paged import Ragged
from mycli.runtime.kernels.reference_attention import attend_latent
from mycli.runtime.kernels.triton.latent import launch_latent_attention, triton_latent_attention
from mycli.runtime.kernels.triton.product.tiles import Chip
from tests.support.random_tensors import normal
from tests.support.triton_interpreter import Interpret, interpret

pytest.importorskip("triton")

__all__ = ["interpret"]

# Of 1,024 positions, for which keys are split in four; some sequences have fewer splits with keys.
TABLE = [[*blocks, *[0] * (16 - len(blocks))] for blocks in ([5, 2], [4], [1, 3])]
DTYPES = {torch.bfloat16: 2**-7, torch.float16: 2**-9}


def attended(
    heads: int, rank: int, rope: int, stored: torch.dtype | None, tokens: int, counts: tuple[int, ...], processors: int
) -> None:
    """Compare both; `processors` decide the number of splits."""
    lengths, table = torch.tensor([70, 33, 128], dtype=torch.int32), torch.tensor(TABLE, dtype=torch.int32)
    padded = torch.tensor(counts, dtype=torch.int32) if counts else None
    starts = torch.arange(0, 3 * tokens + 1, tokens, dtype=torch.int32)
    for dtype, tolerance in DTYPES.items():
        query, turned = normal(3 * tokens, heads, rank).to(dtype), normal(3 * tokens, heads, rope, seed=1).to(dtype)
        latents = Stored.of(normal(6, 1, 64, rank, seed=2).to(dtype), stored or dtype)
        rotated = Stored.of(normal(6, 1, 64, rope, seed=3).to(dtype) * 4, stored or dtype)
        for data in (latents.data, rotated.data):
            data[2, :, 6:] = 0 if stored else torch.nan  # after the first sequence
        ragged = Ragged(starts, lengths, table, tokens, padded)
        operands = query, turned, latents, rotated
        found = launch_latent_attention(*operands, ragged, 0.3, Chip((9, 0), processors))
        assert found.dtype == dtype and found.shape == query.shape
        for place, length in enumerate(lengths.tolist()):
            count = counts[place] if counts else tokens
            rows = slice(place * tokens, place * tokens + count)
            one = Ragged(torch.tensor([0, count]), torch.tensor([length - tokens + count]), table[place : place + 1])
            expected = attend_latent(query[rows], turned[rows], latents, rotated, one, 0.3)
            torch.testing.assert_close(found[rows].float(), expected.float(), rtol=tolerance, atol=2 * tolerance)
            assert found[place * tokens : (place + 1) * tokens].isfinite().all()


@pytest.mark.parametrize("processors", [1, 400], ids=["whole", "split"])
@pytest.mark.parametrize(
    ("heads", "rank", "rope", "stored", "tokens", "counts"),
    [
        (16, 32, 16, None, 1, ()),
        (20, 40, 8, None, 3, (3, 1, 2)),
        (4, 24, 24, torch.int8, 2, ()),
    ],
    ids=["decode", "odd-padded", "int8"],
)
def test_latent_attention(
    heads: int,
    rank: int,
    rope: int,
    stored: torch.dtype | None,
    tokens: int,
    counts: tuple[int, ...],
    processors: int,
    interpret: Interpret,
) -> None:
    interpret(attended, heads, rank, rope, stored, tokens, counts, processors)


def test_it_is_left_to_others_off_a_gpu() -> None:
    query, cache = torch.zeros(1, 2, 16), Stored(torch.zeros(1, 1, 64, 16))
    one = torch.ones(1, dtype=torch.int32)
    declined = triton_latent_attention(query, query, cache, cache, Ragged(one, one, one[None], 1), 1.0)
    assert isinstance(declined, Declined) and declined.code == "not-on-cuda"
