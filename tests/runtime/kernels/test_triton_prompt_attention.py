"""Test Triton prompt attention against plain torch in the interpreter: any cuts, masks, scores and caches."""

from dataclasses import dataclass

import pytest
import torch

from mycli.runtime.cache.kv_cache import Stored
from mycli.runtime.errors import Declined
from mycli.runtime.kernels.paged import PromptKind, Ragged, Scoring
from mycli.runtime.kernels.reference_attention import attend_gathered
from mycli.runtime.kernels.triton.product.tiles import Chip
from tests.runtime.kernels.test_triton_attention import paged, shuffled
from tests.support.random_tensors import normal
from tests.support.triton_interpreter import Interpret, interpret

pytest.importorskip("triton")

from mycli.runtime.kernels.triton.attention import launch_paged_attention  # noqa: E402  (only where Triton is)
from mycli.runtime.kernels.triton.prompt_attention import (  # noqa: E402  (as above)
    launch_prompt_attention,
    prompt_tile,
    small_attention,
)
from tests.support.triton_products import difference  # noqa: E402  (as above)

__all__ = ["interpret"]

CAPACITY = 384  # positions of a sequence in the cache, most of them NaN


@dataclass(frozen=True)
class Prompts:
    """New tokens of each sequence and its length after them."""

    tokens: tuple[int, ...]
    lengths: tuple[int, ...]
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    window: int | None = None
    chunk: int | None = None
    softcap: float = 0.0
    sinks: bool = False
    kind: torch.dtype = torch.float16
    dtype: torch.dtype = torch.float16
    block: int = 64
    padded: int = 0  # rows of each sequence, if the device alone knows how many are no padding

    def __str__(self) -> str:
        options = f"-window{self.window}" * (self.window is not None) + f"-chunk{self.chunk}" * (self.chunk is not None)
        options += f"-cap{self.softcap}" * bool(self.softcap) + "-sinks" * self.sinks
        options += f"-padded{self.padded}" * bool(self.padded)
        shape = f"{self.heads}q{self.kv_heads}kv{self.head_dim}-blocks{self.block}"
        kinds = "-".join(str(one).removeprefix("torch.") for one in (self.kind, self.dtype))
        return f"{shape}-tokens{self.tokens}-lengths{self.lengths}{options}-{kinds}"


def run(case: Prompts) -> tuple[torch.Tensor, torch.Tensor]:
    sequences = len(case.lengths)
    table = shuffled(sequences, CAPACITY // case.block)
    wide = normal(2, sequences, case.kv_heads, CAPACITY, case.head_dim)
    written = torch.arange(CAPACITY) < torch.tensor(case.lengths)[:, None, None]
    stored = []
    for part in wide:
        one = Stored.of(part.to(case.dtype), case.kind)
        data = one.data
        if data.is_floating_point():
            data = data.masked_fill(~written[..., None], torch.nan)
        scales = None
        if one.scales is not None:
            unwritten = ~written if one.scales.ndim == written.ndim else ~written[..., None]
            scales = one.scales.masked_fill(unwritten, torch.nan)
        stored.append(Stored(*(None if t is None else paged(t, case.block, table) for t in (data, scales))))
    starts = torch.tensor([0, *case.tokens]).cumsum(0).int()
    lengths = torch.tensor(case.lengths, dtype=torch.int32)
    ragged = Ragged(starts, lengths, table, known=case.tokens)
    query = 2 * normal(sum(case.tokens), case.heads, case.head_dim, seed=1).to(case.dtype)
    sinks = 3 * normal(case.heads, seed=2) if case.sinks else None
    scoring = Scoring(0.2, case.window, case.softcap, sinks, case.chunk)
    expected = attend_gathered(query.float(), *stored, ragged, scoring)
    if not case.padded:
        found = launch_prompt_attention(query, *stored, ragged, scoring, Chip((9, 0), 16))
        assert isinstance(found, torch.Tensor)
        return found, expected
    counts = torch.tensor(case.tokens, dtype=torch.int32)
    rows = [torch.cat((part, part.new_full((case.padded - len(part), *part.shape[1:]), torch.nan)))
            for part in query.split(case.tokens)]  # fmt: skip
    starts = torch.arange(0, case.padded * sequences + 1, case.padded, dtype=torch.int32)
    ragged = Ragged(starts, lengths + case.padded - counts, table, case.padded, counts)
    whole = launch_prompt_attention(torch.cat(rows), *stored, ragged, scoring, Chip((9, 0), 16))
    assert isinstance(whole, torch.Tensor)
    parts = whole.split(case.padded)
    assert not any(part[count:].any() for part, count in zip(parts, case.tokens, strict=True)), "padding becomes zeros"
    return torch.cat([part[:count] for part, count in zip(parts, case.tokens, strict=True)]), expected


def attend(case: Prompts) -> float:
    return difference(*run(case))


@pytest.mark.parametrize(
    "case",
    [
        Prompts((1,), (1,)),
        Prompts((40, 3), (130, 70), head_dim=16),
        Prompts((200,), (200,)),
        Prompts((1, 1, 66), (300, 7, 70), softcap=2.0, sinks=True, window=60),
        Prompts((4, 4), (200, 9), kind=torch.int8),
        Prompts((130, 1, 70), (300, 257, 70)),
        Prompts((129,), (300,), heads=7, kv_heads=1, block=384),
        Prompts((100, 40), (300, 50), window=70),
        Prompts((150,), (380,), window=20, kind=torch.int8),
        Prompts((140, 9), (140, 200), chunk=48),
        Prompts((90,), (190,), softcap=2.0, sinks=True, head_dim=80),
        Prompts((65, 3), (128, 3), kind=torch.int8, dtype=torch.bfloat16, heads=6),
        Prompts((66, 2), (130, 200), kind=torch.uint8, dtype=torch.bfloat16),
        Prompts((70,), (70,), kind=torch.uint8, head_dim=128, window=33),
        Prompts((150, 20), (180, 250), padded=256),
        Prompts((130,), (140,), window=40, kind=torch.int8, padded=256),
        Prompts((70,), (140,), head_dim=256, kv_heads=1, heads=2, dtype=torch.bfloat16, kind=torch.bfloat16),
        Prompts((66, 70), (130, 140), head_dim=256, kv_heads=1, heads=2, dtype=torch.bfloat16, kind=torch.int8),
        Prompts((67,), (150,), head_dim=256, heads=2, window=60, sinks=True, softcap=2.0, kind=torch.int8),
    ],
    ids=str,
)
def test_attend_prompt(case: Prompts, interpret: Interpret) -> None:
    bound = {torch.float16: 4e-3, torch.bfloat16: 1.5e-2}[case.dtype]
    assert interpret(attend, case) < bound  # type: ignore[operator]  # the pool carries any result


def checked(kind: PromptKind) -> float:
    error = small_attention(kind, Chip((9, 0), 16))
    assert isinstance(error, float)
    return error


@pytest.mark.parametrize("stored", [torch.float16, torch.int8, torch.uint8], ids=str)
@pytest.mark.parametrize("options", [(False,) * 4, (True, False, True, True), (False, True, False, True)], ids=str)
def test_the_check_at_load_passes(stored: torch.dtype, options: tuple[bool, ...], interpret: Interpret) -> None:
    kind = PromptKind(torch.device("cpu"), torch.float16, stored, 3, 64, *options)
    assert interpret(checked, kind) < 4e-3  # type: ignore[operator]  # the pool carries any result


def cuts(case: Prompts) -> bool:
    """Return whether the last rows of a prompt have the same bits alone, as one pass, and beside another sequence."""
    (tokens,), (length,) = case.tokens, case.lengths
    sequences, table = 2, shuffled(2, CAPACITY // case.block)
    wide = normal(2, sequences, case.kv_heads, CAPACITY, case.head_dim).to(case.dtype)
    stored = [Stored(paged(part, case.block, table)) for part in wide]
    query = normal(tokens, case.heads, case.head_dim, seed=1).to(case.dtype)
    scoring = Scoring(0.2, case.window)

    def attend(first: int, beside: int = 0) -> torch.Tensor:
        rows = torch.cat((normal(beside, case.heads, case.head_dim, seed=3).to(case.dtype), query[first:]))
        counts = [beside, tokens - first] if beside else [tokens - first]
        lengths = torch.tensor([beside + 30, length][-len(counts) :], dtype=torch.int32)
        starts, tables = torch.tensor([0, *counts]).cumsum(0).int(), table[-len(counts) :].contiguous()
        ragged = Ragged(starts, lengths, tables, known=tuple(counts))
        found = launch_prompt_attention(rows, *stored, ragged, scoring, Chip((9, 0), 16))
        assert isinstance(found, torch.Tensor)
        return found[beside:]

    whole = attend(0)
    return all(torch.equal(whole[first:], attend(first, beside)) for first in (1, 63, 100) for beside in (0, 40))


@pytest.mark.parametrize("head_dim", [8, 5])
def test_declines_narrow_heads(head_dim: int) -> None:
    """The products of their keys and queries would have less than the 16 inner elements that a GPU multiplies."""
    query, cached = torch.zeros(1, 1, head_dim).half(), Stored(torch.zeros(1, 1, 64, head_dim).half())
    one = torch.ones(1, dtype=torch.int32)
    ragged = Ragged(torch.tensor([0, 1], dtype=torch.int32), one, one[:, None] - 1, 1, known=(1,))
    for launch in (launch_prompt_attention, launch_paged_attention):
        declined = launch(query, cached, cached, ragged, Scoring(1.0), Chip((9, 0), 132))
        assert declined == Declined("attention-shape", {"group": 1, "head_dim": head_dim})


def test_declines_heads_that_do_not_fit() -> None:
    query = torch.zeros(1, 1, 512, dtype=torch.bfloat16)
    cached = Stored(torch.zeros(1, 1, 64, 512, dtype=torch.bfloat16))
    one = torch.ones(1, dtype=torch.int32)
    ragged = Ragged(torch.tensor([0, 1], dtype=torch.int32), one, one[:, None] - 1, known=(1,))
    assert isinstance(launch_prompt_attention(query, cached, cached, ragged, Scoring(1.0), Chip((9, 0), 132)), Declined)
    for capability in ((8, 0), (8, 9), (9, 0), (12, 0)):  # heads of 256 fit every chip
        for stored in (torch.bfloat16, torch.int8, torch.uint8):
            assert prompt_tile(Chip(capability, 100), 256, stored) is not None
