"""Test native paged attention against its reference in fp64; the same bits for any composition of a batch."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from mycli.runtime.cache.kv_cache import PACKED, Stored
from mycli.runtime.errors import Declined
from mycli.runtime.kernels.cpu.attention import attend_paged
from mycli.runtime.kernels.paged import Ragged, Scoring
from mycli.runtime.kernels.reference_attention import attend_gathered as twin
from tests.support.random_tensors import normal

# Relative RMS error of the result, caused by fp32 sums.
ERROR = 3e-6
KINDS = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.int8, "int4": PACKED}


@dataclass(frozen=True)
class Case:
    """Lists sequences as (new tokens, length after them)."""

    sequences: tuple[tuple[int, int], ...]
    kv_heads: int
    group: int
    head_dim: int
    block_size: int
    window: int | None = None
    softcap: float = 0.0
    sinks: bool = False
    scale: float = 0.11
    chunk: int | None = None

    def __str__(self) -> str:
        batch = "+".join(f"{tokens}at{length}" for tokens, length in self.sequences)
        more = f"-window{self.window}" * (self.window is not None) + f"-softcap{self.softcap:g}" * bool(self.softcap)
        more += f"-chunk{self.chunk}" * (self.chunk is not None)
        return (
            f"{batch}-{self.kv_heads}x{self.group}x{self.head_dim}-blocks{self.block_size}{more}"
            + "-sinks" * self.sinks
        )


CASES = [
    Case(((1, 1),), 1, 1, 16, 16),
    Case(((1, 700), (1, 3), (2, 257)), 2, 4, 64, 16),
    Case(((40, 40), (1, 300), (9, 521)), 2, 3, 80, 32),
    Case(((300, 300),), 2, 4, 64, 512),
    Case(((65, 1100), (7, 7)), 1, 7, 128, 1),
    Case(((130, 900), (1, 900)), 2, 2, 96, 64, 100),
    Case(((1, 1100), (3, 40)), 2, 4, 48, 48, 256),
    Case(((50, 60),), 1, 2, 256, 17, 1),
    Case(((33, 90), (1, 80)), 1, 2, 512, 16),
    Case(((70, 300), (1, 300)), 2, 4, 112, 16, softcap=20.0),
    Case(((70, 300), (1, 300)), 4, 2, 64, 16, 128, sinks=True, scale=0.125),
    Case(((70, 300), (1, 129), (1, 128), (40, 40)), 2, 2, 64, 16, chunk=64),
    Case(((600, 1100), (3, 515)), 1, 4, 48, 32, chunk=512),
]
# Heads that are no whole vectors, of which an int4 cache stores none.
UNEVEN = [
    Case(((40, 40), (1, 300), (9, 521)), 2, 3, 24, 32, softcap=2.0),
    Case(((70, 300), (1, 300)), 1, 4, 20, 16, 16, sinks=True),
    Case(((1, 20), (33, 260)), 1, 2, 7, 8),
    Case(((33, 90), (2, 80)), 1, 4, 72, 16),
    Case(((33, 90), (1, 80)), 1, 2, 117, 16),
]


@dataclass(frozen=True)
class Pool:
    case: Case
    kind: str
    query: tuple[Tensor, ...]  # per sequence [tokens, heads, head_dim]
    keys: tuple[Tensor, ...]  # [kv_heads, length, head_dim]
    values: tuple[Tensor, ...]
    scoring: Scoring

    @classmethod
    def make(cls, case: Case, kind: str, dtype: torch.dtype, seed: int = 0) -> "Pool":
        def vectors(salt: int) -> tuple[Tensor, ...]:
            return tuple(
                normal(case.kv_heads, length, case.head_dim, seed=seed + 100 * i + salt)
                for i, (_, length) in enumerate(case.sequences)
            )

        heads = case.kv_heads * case.group
        query = tuple(
            (2 * normal(tokens, heads, case.head_dim, seed=seed + 100 * i + 3)).to(dtype)
            for i, (tokens, _) in enumerate(case.sequences)
        )
        sinks = normal(heads, seed=seed + 4) * 3 if case.sinks else None
        return cls(
            case, kind, query, vectors(1), vectors(2), Scoring(case.scale, case.window, case.softcap, sinks, case.chunk)
        )

    def lay_out(self, block_size: int, lengths: list[int], shuffle: int = 0) -> tuple[Stored, Stored, Tensor]:
        """Return keys, values and block table of the first `lengths` positions; everything else in the pool is NaN."""
        case, dtype = self.case, KINDS[self.kind]
        wide = max((length + block_size - 1) // block_size for length in lengths)
        order = list(range(len(lengths) * wide + 3))  # three unused blocks
        random.Random(shuffle).shuffle(order)
        table = torch.tensor(order[: len(lengths) * wide], dtype=torch.int32).view(len(lengths), wide)
        shape = (len(order), case.kv_heads, block_size)

        def stored(held: tuple[Stored, ...]) -> Stored:
            beside = Stored.of(torch.full((case.head_dim,), torch.nan), dtype)
            data = beside.data.expand(*shape, -1).clone()
            scales = None if beside.scales is None else beside.scales.expand(*shape, *beside.scales.shape).clone()
            for s, length in enumerate(lengths):
                at = torch.arange(length)
                block, inside = table[s, at // block_size].long(), at % block_size
                one = held[s]
                data[block, :, inside] = one.data[:, :length].transpose(0, 1)
                if scales is not None and one.scales is not None:
                    scales[block, :, inside] = one.scales[:, :length].transpose(0, 1)
            return Stored(data, scales)

        return stored(self._held[0]), stored(self._held[1]), table

    @cached_property
    def _held(self) -> tuple[tuple[Stored, ...], tuple[Stored, ...]]:
        dtype = KINDS[self.kind]
        return tuple(Stored.of(one, dtype) for one in self.keys), tuple(Stored.of(one, dtype) for one in self.values)

    def inputs(self, **changed: int) -> tuple[Tensor, Stored, Stored, Ragged, Scoring]:
        lengths = [length for _, length in self.case.sequences]
        keys, values, table = self.lay_out(
            changed.get("block_size", self.case.block_size), lengths, changed.get("shuffle", 0)
        )
        counts = [0, *(tokens for tokens, _ in self.case.sequences)]
        starts = torch.tensor(counts).cumsum(0).int()
        return torch.cat(self.query), keys, values, Ragged(starts, torch.tensor(lengths).int(), table), self.scoring


def native(query: Tensor, keys: Stored, values: Stored, ragged: Ragged, scoring: Scoring) -> Tensor:
    found = attend_paged(query, keys, values, ragged, scoring)
    assert isinstance(found, Tensor), found
    return found


def away(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_twin_is_torchs_attention(case: Case) -> None:
    pool = Pool.make(replace(case, softcap=0.0, sinks=False), "fp32", torch.float64)
    found = twin(*pool.inputs())
    expected = []
    for (tokens, length), query, keys, values in zip(case.sequences, pool.query, pool.keys, pool.values, strict=True):
        token, position = torch.arange(length - tokens, length).unsqueeze(1), torch.arange(length)
        seen = (position <= token) & (token - position < (case.window or length))
        seen &= position >= token - token % (case.chunk or length)
        one = functional.scaled_dot_product_attention(
            query.transpose(0, 1), keys.double(), values.double(), seen, scale=case.scale, enable_gqa=True
        )
        expected.append(one.transpose(0, 1).flatten(1))
    assert away(found, torch.cat(expected)) < 1e-12


def test_softcap_and_sinks_of_the_twin_are_their_definitions() -> None:
    pool = Pool.make(Case(((2, 5),), 1, 2, 16, 16, softcap=3.0, sinks=True), "fp32", torch.float64)
    query, keys, values, ragged, scoring = pool.inputs()
    found, assert_sinks = twin(query, keys, values, ragged, scoring).view(2, 2, 16), scoring.sinks
    assert assert_sinks is not None
    for token in range(2):
        for head in range(2):
            scores = pool.keys[0][0, : 4 + token].double() @ query[token, head] * scoring.scale
            powers = (3 * (scores / 3).tanh()).exp()
            expected = (
                powers @ pool.values[0][0, : 4 + token].double() / (powers.sum() + assert_sinks[head].double().exp())
            )
            torch.testing.assert_close(found[token, head], expected)


@pytest.mark.usefixtures("vectors")
@pytest.mark.parametrize(
    ("case", "kind"),
    [(case, kind) for case in (*CASES, *UNEVEN) for kind in KINDS if case in CASES or kind != "int4"],
    ids=str,
)
def test_as_the_twin_in_fp64(case: Case, kind: str) -> None:
    query, *rest = Pool.make(case, kind, torch.float32).inputs()
    found, expected = native(query, *rest), twin(query.double(), *rest)
    assert found.shape == expected.shape and found.dtype == torch.float32
    assert away(found, expected) < ERROR
    half = query.bfloat16()
    rounded, expected = native(half, *rest), twin(half.double(), *rest)
    assert rounded.dtype == torch.bfloat16
    # Error of rounding weights and the result to bf16; for int4 also products of codes and scales, and rotated queries.
    assert away(rounded, expected) < (0.0065 if kind == "int4" else 0.0025)


def cut(pool: Pool, pieces: list[list[int]], block_size: int, shuffle: int) -> list[Tensor]:
    """Return every sequence's rows, computed in passes of which pass i has pieces[s][i] tokens of sequence s."""
    rows: list[list[Tensor]] = [[] for _ in pieces]
    done = [0] * len(pieces)
    for taken in zip(*pieces, strict=True):
        starts = torch.tensor([0, *taken]).cumsum(0).int()
        query = torch.cat([q[d : d + t] for q, d, t in zip(pool.query, done, taken, strict=True)])
        done = [d + t for d, t in zip(done, taken, strict=True)]
        lengths = [length - tokens + d for (tokens, length), d in zip(pool.case.sequences, done, strict=True)]
        keys, values, table = pool.lay_out(block_size, [max(one, 1) for one in lengths], shuffle)
        found = native(query, keys, values, Ragged(starts, torch.tensor(lengths).int(), table), pool.scoring)
        for s in range(len(pieces)):
            rows[s].append(found[starts[s] : starts[s + 1]])
    return [torch.cat(each) for each in rows]


def same_bits(first: Tensor, second: Tensor) -> bool:
    kind = torch.int32 if first.dtype == torch.float32 else torch.int16
    return torch.equal(first.view(kind), second.view(kind))


SEQUENCE = Case(((530, 530),), 2, 3, 64, 16)


@pytest.mark.usefixtures("vectors")
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32-query", "bf16-query"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_in_chunks_has_the_bits_of_one_go(kind: str, dtype: torch.dtype, window: int | None) -> None:
    pool = Pool.make(replace(SEQUENCE, window=window), kind, dtype)
    whole = native(*pool.inputs())
    for chunk in (7, 64, 512):
        pieces = [min(chunk, 530 - done) for done in range(0, 530, chunk)]
        if chunk == 7:  # the first hundred, and across the boundary of the second chunk of positions
            pieces = [7] * 14 + [130] + [7] * 14 + [204]
        assert same_bits(cut(pool, [pieces], 16, 0)[0], whole), chunk
    steps = cut(pool, [[1] * 40 + [200] + [1] * 40 + [250]], 530, 0)[0]
    assert same_bits(steps, whole)


@pytest.mark.usefixtures("vectors")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32-query", "bf16-query"])
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_a_row_knows_neither_neighbours_nor_cuts(kind: str, dtype: torch.dtype, data: st.DataObject) -> None:
    head_dim = data.draw(st.sampled_from([16, 48, 64, 80, 128] + [8, 20, 24, 72] * (kind != "int4")))
    kv_heads, group = data.draw(st.sampled_from([1, 2])), data.draw(st.sampled_from([1, 2, 4, 7]))
    sequences = []
    for _ in range(data.draw(st.integers(1, 3))):
        tokens = data.draw(st.integers(1, 90))
        sequences.append((tokens, tokens + data.draw(st.sampled_from([0, 1, 100, 255, 256, 300]))))
    window = data.draw(st.sampled_from([None, 1, 20, 256, 300]))
    softcap = data.draw(st.sampled_from([0.0, 15.0]))
    case = Case(tuple(sequences), kv_heads, group, head_dim, 16, window, softcap, data.draw(st.booleans()))
    pool = Pool.make(case, kind, dtype, data.draw(st.integers(0, 1000)))
    together = native(*pool.inputs())
    with threads(data.draw(st.integers(1, 5))):
        again = native(*pool.inputs(block_size=data.draw(st.integers(1, 70)), shuffle=1))
    assert same_bits(again, together)
    passes = data.draw(st.integers(1, 4))
    pieces = []
    for tokens, _ in sequences:
        ends = sorted(data.draw(st.lists(st.integers(0, tokens), min_size=passes - 1, max_size=passes - 1)))
        pieces.append([end - begin for begin, end in zip([0, *ends], [*ends, tokens], strict=True)])
    assert same_bits(torch.cat(cut(pool, pieces, data.draw(st.sampled_from([16, 31, 512])), 2)), together)


@pytest.mark.usefixtures("vectors")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens", [2, 60])
def test_what_is_no_number_concerns_the_rows_that_see_it(tokens: int, kind: str) -> None:
    pool = Pool.make(Case(((tokens, 290), (tokens, 290)), 2, 2, 64, 16), kind, torch.bfloat16)
    query, keys, values, ragged, scoring = pool.inputs()
    clean = native(query, keys, values, ragged, scoring).view(2, tokens, 2, -1)
    position = 288  # the second-to-last token: only the last two rows of its sequence attend to it
    block, inside = ragged.block_table[0, position // 16], position % 16
    for stored in (values, keys):
        bad = stored.data if stored.scales is None else stored.scales
        kept = bad[block, 1, inside].clone()
        bad[block, 1, inside] = torch.nan
        found = native(query, keys, values, ragged, scoring).view(2, tokens, 2, -1)
        assert found[0, -2:, 1].isnan().all()
        clear = found.clone()
        clear[0, -2:, 1] = clean[0, -2:, 1]
        assert torch.equal(clear, clean)
        bad[block, 1, inside] = kept


def test_lengths_and_blocks_that_cannot_be_are_refused() -> None:
    pool = Pool.make(Case(((3, 40), (1, 20)), 1, 2, 32, 16), "bf16", torch.bfloat16)
    query, keys, values, ragged, scoring = pool.inputs()
    if isinstance(attend_paged(query, keys, values, ragged, scoring), Declined):
        pytest.skip("no native code here")
    table = ragged.block_table.clone()
    table[0, 2] = len(keys.data)
    missing = ragged.block_table.clone()
    missing[1, 0] = -1
    for wrong in (
        replace(ragged, lengths=torch.tensor([49, 20], dtype=torch.int32)),  # three blocks hold 48
        replace(ragged, lengths=torch.tensor([2, 20], dtype=torch.int32)),  # fewer than its tokens
        replace(ragged, starts=torch.tensor([0, 4, 3], dtype=torch.int32)),
        replace(ragged, starts=torch.tensor([1, 3, 4], dtype=torch.int32)),
        replace(ragged, block_table=table),
        replace(ragged, block_table=missing),
    ):
        with pytest.raises(ValueError, match="do not fit"):
            attend_paged(query, keys, values, wrong, scoring)


def test_what_it_does_not_take_is_declined_with_a_reason() -> None:
    query, keys, values, ragged, scoring = Pool.make(Case(((1, 20),), 1, 2, 64, 16), "fp32", torch.float32).inputs()
    for asked, held, pieces, reason in (
        (query.half(), keys, ragged, "attention-types"),
        (query[..., :20], keys, ragged, "cache-vector-size"),
        (query, Stored(keys.data.transpose(1, 2)), ragged, "cache-layout"),
        (query.clone().requires_grad_(), keys, ragged, "no-gradient"),
        (query, keys, replace(ragged, lengths=ragged.lengths.long()), "indices-not-int32"),
    ):
        assert reason in str(attend_paged(asked, held, values, pieces, scoring))


def test_blocks_that_are_no_whole_vectors_apart_are_declined() -> None:
    query, keys, _, ragged, scoring = Pool.make(Case(((1, 20),), 1, 2, 64, 16), "fp32", torch.float32).inputs()
    blocks = len(keys.data)
    spaced = Stored(torch.zeros(blocks * 1032).as_strided((blocks, 1, 16, 64), (1032, 1024, 64, 1)))
    assert "cache-layout" in str(attend_paged(query, spaced, spaced, ragged, scoring))


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_codes_without_scales_are_declined(kind: str) -> None:
    query, keys, values, ragged, scoring = Pool.make(Case(((1, 20),), 1, 2, 64, 16), kind, torch.float32).inputs()
    assert values.scales is not None
    for wrong in (Stored(values.data), Stored(values.data, values.scales[:, :, ::2])):
        assert "cache-scales-layout" in str(attend_paged(query, keys, wrong, ragged, scoring))


def test_blocks_before_the_window_may_be_gone() -> None:
    pool = Pool.make(Case(((2, 300),), 1, 2, 32, 16, 40), "bf16", torch.bfloat16)
    query, keys, values, ragged, scoring = pool.inputs()
    expected = attend_paged(query, keys, values, ragged, scoring)
    gone = ragged.block_table.clone()
    gone[0, : (300 - 2 - 39) // 16] = -1
    found = attend_paged(query, keys, values, replace(ragged, block_table=gone), scoring)
    assert found == expected if isinstance(found, Declined) else torch.equal(found, torch.as_tensor(expected))
    torch.testing.assert_close(
        twin(query, keys, values, replace(ragged, block_table=gone), scoring), twin(*pool.inputs())
    )
