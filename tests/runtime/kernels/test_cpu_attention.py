"""Test that CPU attention over a contiguous cache has the bits of attention over blocks, and what it declines."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from mycli.runtime.cache.kv_cache import PACKED, Stored
from mycli.runtime.errors import Declined
from mycli.runtime.kernels.cpu.attention import attend_cached, attend_paged
from mycli.runtime.kernels.paged import Ragged, Scoring

SPARE = 7  # unfilled positions of the cache, whose contents must not be read
DTYPES = (torch.float32, torch.bfloat16, torch.int8, PACKED)


@dataclass(frozen=True)
class Case:
    batch: int
    kv_heads: int
    group: int
    tokens: int
    head_dim: int
    length: int
    window: int | None = None


CASES = [
    Case(1, 1, 1, 1, 16, 1),
    Case(1, 2, 4, 1, 64, 700),
    Case(2, 2, 3, 1, 80, 33),
    Case(1, 2, 7, 5, 128, 513),
    Case(3, 1, 2, 8, 96, 1030),
    Case(1, 2, 2, 8, 64, 8),
    Case(1, 1, 4, 1, 256, 90),
    Case(2, 2, 4, 1, 64, 1100, 100),  # a window that starts within the second chunk of 512
    Case(1, 2, 2, 8, 64, 1026, 512),
    Case(1, 1, 1, 4, 32, 40, 1),
    Case(1, 1, 5, 3, 48, 60, 4096),
]


def stored(values: Tensor, dtype: torch.dtype) -> Stored:
    """Return a view of a larger cache that is filled with NaN elsewhere."""
    length = values.shape[2]
    whole = Stored.of(torch.nn.functional.pad(values, (0, 0, 0, SPARE), value=torch.nan), dtype)
    return Stored(whole.data[:, :, :length], None if whole.scales is None else whole.scales[:, :, :length])


def inputs(case: Case, dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Stored, Stored]:
    generator = torch.Generator().manual_seed(seed)
    shape = (case.batch, case.kv_heads, case.length, case.head_dim)
    query = torch.randn(case.batch, case.tokens, case.kv_heads * case.group, case.head_dim, generator=generator)
    keys, values = torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)
    return 2 * query, stored(keys, dtype), stored(values, dtype)


@pytest.mark.usefixtures("vectors")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_sequence_is_one_block(case: Case, dtype: torch.dtype) -> None:
    query, keys, values = inputs(case, dtype)
    starts, table = torch.arange(case.batch + 1).int() * case.tokens, torch.arange(case.batch).int().unsqueeze(1)
    ragged = Ragged(starts, torch.full((case.batch,), case.length).int(), table)
    scoring = Scoring(case.head_dim**-0.5, case.window)
    for rows in (query, query.bfloat16()):
        found = attend_cached(rows, keys, values, None, case.window)
        expected = attend_paged(rows.flatten(0, 1), keys.contiguous(), values.contiguous(), ragged, scoring)
        assert isinstance(found, Tensor) and isinstance(expected, Tensor)
        assert torch.equal(found.flatten(0, 1), expected)
    query[-1, 0, 0] = torch.inf
    found = attend_cached(query, keys, values, None, case.window)
    assert not isinstance(found, Declined) and not found[-1, 0, : case.head_dim].isfinite().any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_keys_that_lie_token_by_token_are_rearranged(dtype: torch.dtype) -> None:
    query, keys, values = inputs(Case(2, 3, 2, 9, 32, 9), dtype)
    by_token = [
        Stored(
            part.data.transpose(1, 2).contiguous().transpose(1, 2),
            None if part.scales is None else part.scales.transpose(1, 2).contiguous().transpose(1, 2),
        )
        for part in (keys, values)
    ]
    found = attend_cached(query, *by_token, None, None)
    expected = attend_cached(query, keys, values, None, None)
    assert isinstance(found, Tensor) and isinstance(expected, Tensor)
    assert torch.equal(found, expected)


def test_what_it_does_not_take_is_left_to_torch() -> None:
    case = Case(1, 1, 2, 1, 64, 20)
    query, keys, values = inputs(case, torch.float32)
    for asked, held, reason in (
        (query.half(), keys, "attention-types"),
        (query[..., :20], keys, "cache-vector-size"),
    ):
        assert reason in str(attend_cached(asked, held, values, None, None))
