"""Test replies under random combinations of features against each reply alone on a plain engine.

A walk draws a cache (kind, block size, few blocks), a proposer, a disk prefix cache, chunk and batch sizes, and
requests with penalties, biases, grammars, logprobs, stop tokens, a minimum of tokens, several replies, beams or hidden
states, which arrive and are cancelled at random. Nothing of that may change a reply.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from mycli.runtime.cache.prefix_store import PrefixStore
from mycli.runtime.checkpoint.open_folder import open_model_folder
from mycli.runtime.device.placement import Placement
from mycli.runtime.engine.disk_prefix_cache import identity
from mycli.runtime.engine.engine import Engine
from mycli.runtime.engine.loading.loader import load_model
from mycli.runtime.engine.model_runner import ModelRunner
from mycli.runtime.engine.sequence import BeamOptions, FinishReason, Request, SequenceOutput
from mycli.runtime.engine.speculation import DraftRequest
from mycli.runtime.memory.cache_shape import CacheShape, window_blocks
from mycli.runtime.models.config import KvDtype
from mycli.runtime.sampling.grammars.grammar import Grammar
from mycli.runtime.sampling.params import SamplingParams
from mycli.runtime.speculative.draft_length import AdaptiveDraftLength, DraftLengthPolicy, FixedDraftLength
from mycli.runtime.speculative.lookup import PromptLookup
from mycli.runtime.speculative.mtp import MtpHead, MtpProposer
from mycli.runtime.speculative.proposers import DraftModel, Proposal, Proposer
from mycli.runtime.speculative.speculator import ProposerSpeculator
from tests.support.engines import drain
from tests.support.families import CASES, make
from tests.support.family_parts import SMALL
from tests.support.grids import chosen
from tests.support.prediction import make_with_head

CPU = torch.device("cpu")
CONTEXT, VOCAB = 64, SMALL["vocab_size"]
KINDS: Sequence[KvDtype] = ("auto", "auto", "int8", "int4")
HEADS = ("qwen3_5-delta", "qwen3_next-8top3")  # cases that are made with an MTP head
# The scaling of `dynamic` depends on the tokens of a pass beyond the trained context, to which engines are limited.
NAMES = tuple(name for name in CASES if "dynamic" not in name)
GRID = [(name, seed) for name in NAMES for seed in range(2)]
GRID += [(name, seed) for name in HEADS for seed in range(2, 8)]
WINDOWED = ("gemma3-window7-tied", "gpt_oss-window7-gqa4:2", "llama4-chunk16-4top1", "mistral-window7")
GRID += [(name, seed) for name in WINDOWED for seed in range(2, 12)]
QUICK = [
    ("gemma3n-sparse-shared-kv", 1),
    ("deepseek_v2-yarn", 1),
    ("qwen3_5-delta", 3),
    ("qwen3_5-delta", 5),
    ("falcon_h1-multipliers", 0),
    *((name, 2) for name in WINDOWED),
]


class EveryThird(Grammar):
    """Allows every third token, beginning with another one at each position."""

    def __init__(self) -> None:
        """Need no tokens: nothing is compiled."""

    def start(self, limits: object = None) -> "ThirdState":  # type: ignore[override]
        return ThirdState()


class ThirdState:
    may_be_cut, shortened = True, False

    def __init__(self) -> None:
        self.count = 0

    def apply(self, logits: Tensor) -> Tensor:
        ids = torch.arange(logits.shape[1])
        return logits.masked_fill((ids + self.count) % 3 != 0, float("-inf"))

    def accept(self, token: int) -> int:
        self.count += 1
        return token


class Oracle(PromptLookup):
    """Proposes the true next tokens, of which every third is wrong."""

    relative_cost = 0.1

    def __init__(self, texts: Sequence[Sequence[int]]) -> None:
        super().__init__()
        self._known = [list(text) for text in texts]

    def evidence(self, sequence: int, tokens: Sequence[int]) -> int:
        return 0

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        return [Proposal(self._following(list(request.tokens), request.count)) for request in requests]

    def _following(self, tokens: list[int], count: int) -> list[int]:
        text = next((text for text in self._known if text[: len(tokens)] == tokens), [])
        true = enumerate(text[len(tokens) : len(tokens) + count], len(tokens))
        return [token if place % 3 else (token + 1) % VOCAB for place, token in true]


@dataclass(frozen=True)
class Reply:
    tokens: list[int]
    reason: FinishReason | None
    logprobs: list[float]  # of the tokens, then of the prompt
    hidden: Tensor | None

    @classmethod
    def of(cls, outputs: Sequence[SequenceOutput]) -> "Reply":
        logprobs = [each.logprob for output in outputs for each in output.logprobs]
        logprobs += [each.logprob for output in outputs for each in output.prompt_logprobs]
        tokens = [token for output in outputs for token in output.tokens]
        return cls(tokens, outputs[-1].finish_reason, logprobs, outputs[-1].hidden)

    def assert_is(self, expected: "Reply", about: object) -> None:
        assert (self.tokens, self.reason) == (expected.tokens, expected.reason), about
        assert self.logprobs == pytest.approx(expected.logprobs, rel=1e-2, abs=2e-3), about
        if self.hidden is None or expected.hidden is None:
            assert self.hidden is expected.hidden, about
        else:
            torch.testing.assert_close(self.hidden, expected.hidden, rtol=1e-2, atol=2e-3)


@cache
def folder(case: str, root: Path) -> Path:
    path = root / case.replace(":", "_")
    if case in HEADS:
        make_with_head(path, case)
    else:
        make(path, *CASES[case])
    return path


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def sampling(chance: random.Random) -> SamplingParams:
    options: Mapping[str, Sequence[object]] = {
        "temperature": (0.0, 0.7, 1.5),
        "top_k": (0, 0, 5),
        "top_p": (1.0, 1.0, 0.9),
        "min_p": (0.0, 0.0, 0.1),
        "repetition_penalty": (1.0, 1.0, 1.3, 0.8),
        "presence_penalty": (0.0, 0.0, 1.0),
        "frequency_penalty": (0.0, 0.0, 0.7),
        "logit_bias": ((), (), ((5, 3.0), (9, -100.0))),
        "seed": (chance.randrange(1000),),  # drafts change the random numbers that an unseeded reply takes
    }
    return SamplingParams().with_overrides({name: chance.choice(values) for name, values in options.items()})


def requests(chance: random.Random) -> list[tuple[Request, int]]:
    """Return requests, some of which begin alike, and the number of replies to each."""
    starts = [[chance.randrange(4, VOCAB) for _ in range(30)] for _ in range(2)]
    asked = []
    for _ in range(chance.randint(3, 6)):
        rest = [chance.randrange(4, VOCAB) for _ in range(chance.randint(1, 8))] * chance.choice((1, 1, 2))
        prompt = (*chance.choice(starts)[: chance.choice((0, 7, 16, 30))], *rest)
        stops = frozenset(chance.sample(range(VOCAB), chance.choice((0, 1, 5))))
        request, count = Request(prompt, limit=chance.choice((1, 6, 14, None)), stop_ids=stops), 1
        kind = chance.choice(("beams", "hidden", "scored", "grammar", "logprobs", "", "", "", ""))
        if kind == "beams":
            request = replace(request, limit=6, beams=BeamOptions(2))
        elif kind == "hidden":
            request = replace(request, limit=0, hidden_states=chance.choice(("last", "all")))
        else:
            grammar = EveryThird() if kind == "grammar" else None
            logprobs = chance.choice((0, 3)) if kind == "logprobs" else None
            request = replace(request, sampling=sampling(chance), grammar=grammar, logprobs=logprobs)
            request = replace(request, min_tokens=(0, 5)[len(rest) % 2])
            request, count = replace(request, prompt_logprobs=kind == "scored"), chance.choice((1, 1, 2, 3))
        asked.append((request, count))
    return asked


def alone(runner: ModelRunner, request: Request, count: int) -> list[Reply]:
    if request.beams is not None:
        width = request.beams.width
        engine = Engine(runner, CacheShape.contiguous(CONTEXT, width), VOCAB, running=width)
        numbers = engine.submit_replies(request, count)
        outputs = drain(engine)
        return [Reply.of(outputs[number]) for number in numbers]
    replies = []
    for index in range(count):
        engine = Engine(runner, CacheShape.contiguous(CONTEXT), VOCAB, running=1)
        number = engine.submit(request.for_reply(index))
        replies.append(Reply.of(drain(engine)[number]))
    return replies


def speculator(
    chance: random.Random, runner: ModelRunner, path: Path, shape: CacheShape, texts: Sequence[Sequence[int]]
) -> ProposerSpeculator | None:
    """texts: the prompts with the replies that are expected."""
    head = open_model_folder(path).mtp_head
    kinds = ["none", "lookup", "adaptive lookup", "oracle", "oracle", "oracle"]
    kinds += [] if runner.config.has_recurrent else ["its own draft"]
    kind = chance.choice(kinds if head is None else [*kinds, "mtp", "mtp", "mtp"])
    if kind == "none":
        return None
    proposer: Proposer = Oracle(texts) if kind == "oracle" else PromptLookup()
    if kind == "its own draft":
        proposer = DraftModel(runner, shape, runner.nbytes)
    elif kind == "mtp" and head is not None:
        proposer = MtpProposer(MtpHead(head, runner), shape)
    length = chance.choice((1, 2, 3, 8))

    def policy() -> DraftLengthPolicy:
        return AdaptiveDraftLength(0.05) if kind == "adaptive lookup" else FixedDraftLength(length)

    return ProposerSpeculator(proposer, policy, pipelined=chance.random() < 0.5)


def walk(engine: Engine, asked: Sequence[tuple[Request, int]], chance: random.Random) -> list[list[Reply]]:
    """Submit the requests in random order and cancel some; return the replies to each."""
    waiting, outputs = list(range(len(asked))), dict[int, list[SequenceOutput]]()
    chance.shuffle(waiting)
    numbers: dict[int, list[int]] = {}
    for _ in range(5000):
        if waiting and (chance.random() < 0.3 or not engine.has_work):
            index = waiting.pop()
            numbers[index] = engine.submit_replies(*asked[index])
        if not waiting and not engine.has_work:
            break
        for output in engine.step():
            outputs.setdefault(output.sequence, []).append(output)
        if chance.random() < 0.03 and numbers:
            engine.cancel(chance.choice(numbers[chance.choice(list(numbers))]))
    assert not engine.has_work, "a request never ends"
    return [[Reply.of(outputs[number]) for number in numbers[index]] for index in range(len(asked))]


@pytest.mark.parametrize(("case", "seed"), chosen(GRID, quick=QUICK), ids=str)
@torch.inference_mode()
def test_no_combination_of_features_changes_a_reply(case: str, seed: int, root: Path, tmp_path: Path) -> None:
    chance = random.Random(f"{case} {seed}")
    path, kv = folder(case, root), chance.choice(KINDS)
    opened = open_model_folder(path)
    packs = all(
        size % 16 == 0 for layer in range(opened.config.layers) for *_, size in opened.config.cache_shapes(layer)
    )
    runner = load_model(opened, Placement(CPU, torch.float32, kv=kv if packs or kv != "int4" else "int8"))
    asked = requests(chance)
    expected = [alone(runner, *each) for each in asked]
    size = chance.choice((1, 3, 8, 16, 64))
    widest = max(1 if request.beams is None else request.beams.width for request, _ in asked)
    blocks = widest * -(-(CONTEXT + 1) // size) + chance.choice((0, 1, 20))
    shape, running = CacheShape(CONTEXT, blocks, size), min(chance.choice((3, 4, 6)), blocks)
    running, chunk = max(running, widest), chance.choice((2, 5, 16, 64))
    if (windows := window_blocks(opened.config, 0, running, chunk, size)) is not None and chance.random() < 0.7:
        shape = replace(shape, window_blocks=windows)
    texts = [
        [*request.prompt, *reply.tokens]
        for (request, _), replies in zip(asked, expected, strict=True)
        for reply in replies
    ]
    store = None
    if chance.random() < 0.3 and not shape.window_blocks:
        store = PrefixStore(tmp_path / "store", identity(opened, runner, CONTEXT), 1 << 24, pytest.fail)
    engine = Engine(
        runner,
        shape,
        VOCAB,
        running=running,
        chunk=chunk,
        speculator=speculator(chance, runner, path, shape, texts),
        store=store,
    )
    for _ in range(2):  # again, with prefixes in the cache
        for (request, _), wanted, replies in zip(asked, expected, walk(engine, asked, chance), strict=True):
            if any(reply.reason == "cancelled" for reply in replies) and request.beams is not None:
                continue
            for reply, whole in zip(replies, wanted, strict=True):
                if reply.reason == "cancelled":
                    assert reply.tokens == whole.tokens[: len(reply.tokens)]
                else:
                    reply.assert_is(whole, request)
                assert reply.reason != "stop" or len(reply.tokens) >= request.min_tokens
    assert engine.scheduler.pool.used == 0
    engine.close()
