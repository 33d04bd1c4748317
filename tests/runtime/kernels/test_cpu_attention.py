"""Test CPU attention over a contiguous cache against fp64: dtypes, head groups, windows, instruction sets."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from mycli.runtime.cache.int4 import pack_int4
from mycli.runtime.cache.kv_cache import PACKED, Stored, quantize_vectors
from mycli.runtime.errors import Declined
from mycli.runtime.kernels.cpu.attention import attend_cached
from mycli.runtime.kernels.reference import attend_dense
from mycli.runtime.layers.attention import attention_mask

CPU = torch.device("cpu")
SPARE = 7  # unfilled positions of the cache, whose contents must not be read
# Relative RMS error of the result, caused by fp32 sums.
ERROR = {torch.float32: 2e-6, torch.bfloat16: 2e-6, torch.int8: 2e-6, PACKED: 3e-6}


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
    *outer, length, head_dim = values.shape
    if dtype == PACKED:
        return Stored(pack_int4(torch.nn.functional.pad(values, (0, 0, 0, SPARE), value=torch.nan))[:, :, :length])
    data = torch.full((*outer, length + SPARE, head_dim), 127 if dtype == torch.int8 else torch.nan).to(dtype)
    if dtype != torch.int8:
        data[:, :, :length] = values.to(dtype)
        return Stored(data[:, :, :length])
    scales = torch.full((*outer, length + SPARE), torch.nan)
    data[:, :, :length], scales[:, :, :length] = quantize_vectors(values)
    return Stored(data[:, :, :length], scales[:, :, :length])


def inputs(case: Case, dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Stored, Stored]:
    generator = torch.Generator().manual_seed(seed)
    shape = (case.batch, case.kv_heads, case.length, case.head_dim)
    query = torch.randn(case.batch, case.tokens, case.kv_heads * case.group, case.head_dim, generator=generator)
    keys, values = torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)
    return 2 * query, stored(keys, dtype), stored(values, dtype)


def exact(case: Case, query: Tensor, keys: Stored, values: Stored) -> Tensor:
    def double(one: Stored) -> Stored:
        if one.data.dtype == PACKED:
            return Stored(one.dense(torch.float64))
        scales = 1.0 if one.scales is None else one.scales.double().unsqueeze(-1)
        return Stored(one.data.double() * scales)

    mask = attention_mask(case.length - case.tokens, case.tokens, case.window, CPU)
    return attend_dense(query.double(), double(keys), double(values), mask, case.window)


def few(case: Case, query: Tensor, keys: Stored, values: Stored) -> Tensor:
    found = attend_cached(query, keys, values, None, case.window)
    assert not isinstance(found, Declined), found
    return found


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("dtype", ERROR)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_as_in_fp64(case: Case, dtype: torch.dtype) -> None:
    query, keys, values = inputs(case, dtype)
    found, expected = few(case, query, keys, values), exact(case, query, keys, values)
    assert found.shape == expected.shape
    assert float((found - expected).norm() / expected.norm()) < ERROR[dtype]
    half = query.bfloat16()
    rounded, expected = few(case, half, keys, values), exact(case, half, keys, values)
    assert rounded.dtype == torch.bfloat16
    # Error of rounding weights and the result to bf16: at most 2^-8 each, much of which averages out over positions.
    # Products of codes and scales, and rotated queries, are rounded to bf16 as well.
    bound = 0.003 if case.length > 1 else 2**-7
    assert float((rounded - expected).norm() / expected.norm()) < bound * (2.5 if dtype == PACKED else 1)


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("dtype", ERROR)
def test_a_row_has_the_same_bits_alone_and_with_any_number_of_threads(dtype: torch.dtype) -> None:
    case = Case(2, 2, 3, 6, 64, 1100, 600)
    query, keys, values = inputs(case, dtype)
    together = few(case, query, keys, values)
    for token in range(case.tokens):
        end = case.length - case.tokens + token + 1

        def until(one: Stored, end: int = end) -> Stored:
            return Stored(one.data[:1, :, :end], None if one.scales is None else one.scales[:1, :, :end])

        alone = few(case, query[:1, token : token + 1].contiguous(), until(keys), until(values))
        assert torch.equal(alone[:, 0], together[:1, token])
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert torch.equal(few(case, query, keys, values), together)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("dtype", ERROR)
def test_not_a_number_stays_one_and_concerns_its_own_sequence_only(dtype: torch.dtype) -> None:
    case = Case(2, 2, 2, 1, 64, 600)
    query, keys, values = inputs(case, dtype)
    clean = few(case, query, keys, values)
    bad = values.data if values.scales is None else values.scales
    bad[0, 1, 300] = pack_int4(torch.full((case.head_dim,), torch.nan)) if dtype == PACKED else torch.nan
    found = few(case, query, keys, values)
    assert found[0, 0, 128:].isnan().all() and torch.equal(found[0, 0, :128], clean[0, 0, :128])
    assert torch.equal(found[1], clean[1])
    query[1, 0, 0] = torch.inf
    assert not few(case, query, keys, values)[1, 0, :64].isfinite().any()


def test_what_it_does_not_take_is_left_to_torch() -> None:
    case = Case(1, 1, 2, 1, 64, 20)
    query, keys, values = inputs(case, torch.float32)
    others = Stored(keys.data.transpose(1, 2))
    for asked, held, reason in (
        (query.half(), keys, "attention-types"),
        (query[..., :20], keys, "cache-vector-size"),
        (query, others, "cache-layout"),
    ):
        assert reason in str(attend_cached(asked, held, values, None, None))
