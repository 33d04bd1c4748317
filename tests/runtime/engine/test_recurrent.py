"""Test recurrent states in the engine: they always match the tokens of their sequence."""

import random
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from mycli.runtime.checkpoint.open_folder import open_model_folder
from mycli.runtime.device.placement import Placement
from mycli.runtime.engine.engine import Engine
from mycli.runtime.engine.loading.loader import load_model
from mycli.runtime.engine.model_runner import ModelRunner
from mycli.runtime.engine.replies.completion import generate
from mycli.runtime.engine.sequence import Request, SequenceOutput
from mycli.runtime.engine.speculation import ComputedTokens, DraftRequest
from mycli.runtime.memory.cache_shape import CacheShape
from mycli.runtime.sampling.params import SamplingParams
from mycli.runtime.sampling.sampler import Sampler
from tests.support.engines import contiguous_engine, drain, together, tokens_of
from tests.support.families import CASES, make
from tests.support.family_parts import SMALL
from tests.support.grids import examples
from tests.support.prefix_model import random_function
from tests.support.stateful_model import StatefulModel

CPU = torch.device("cpu")
VOCAB, CONTEXT = 8, 64


class Scripted:
    """Proposes the true next tokens, except for every `wrong`-th token."""

    step_seconds, nbytes = None, 0

    def __init__(self, replies: dict[tuple[int, ...], list[int]], count: int, wrong: int) -> None:
        self._replies, self._count, self._wrong = replies, count, wrong
        self._said: dict[int, list[int]] = {}
        self.accepted = self.refused = 0

    def draft_length(self, sequence: int, tokens: Sequence[int], room: int, decoding: int) -> int:
        return min(self._count, room)

    def hidden_state_hook(self, parts: Iterable[ComputedTokens]) -> None: ...

    def propose(self, asked: Sequence[DraftRequest]) -> list[list[int]]:
        found = []
        for one in asked:
            prompt = max((p for p in self._replies if tuple(one.tokens[: len(p)]) == p), key=len)
            drawn = len(one.tokens) - len(prompt)
            true = self._replies[prompt][drawn : drawn + one.count]
            said = [(token + 1) % VOCAB if (drawn + i) % self._wrong == 0 else token for i, token in enumerate(true)]
            self._said[one.sequence] = said
            found.append(said)
        return found

    def verify(self, sequence: int, logits: Tensor, sampler: Sampler) -> list[int]:
        true = logits.argmax(-1).tolist()
        said = self._said[sequence]
        stand = next((i for i, (a, b) in enumerate(zip(said, true, strict=False)) if a != b), len(said))
        self.accepted += stand
        self.refused += len(said) - stand
        return true[: stand + 1]

    def observe(self, outputs: Sequence[SequenceOutput], seconds: float) -> None: ...
    def truncate(self, sequence: int, length: int) -> None: ...
    def finish(self, sequence: int, tokens: Sequence[int]) -> None: ...
    def forget(self) -> None: ...


def stateful(seed: int = 0) -> ModelRunner:
    return ModelRunner(StatefulModel(random_function(seed, VOCAB), VOCAB, CONTEXT))


def expected(runner: ModelRunner, prompt: Sequence[int], limit: int) -> list[int]:
    model, text = runner.model, list(prompt)
    assert isinstance(model, StatefulModel)
    for _ in range(limit):
        text.append(int(model.logits(tuple(text)).argmax()))
    return text[len(prompt) :]


def prompts(chance: random.Random, count: int) -> list[tuple[int, ...]]:
    begins = [[chance.randrange(VOCAB) for _ in range(20)] for _ in range(2)]
    return [
        (
            *chance.choice(begins)[: chance.randint(0, 20)],
            *(chance.randrange(VOCAB) for _ in range(chance.randint(1, 9))),
        )
        for _ in range(count)
    ]


@settings(max_examples=examples(24, 200), deadline=None)
@given(
    seed=st.integers(0, 1 << 20),
    block_size=st.sampled_from([1, 3, 4, 8]),
    blocks=st.integers(0, 12),
    running=st.integers(1, 4),
    chunk=st.sampled_from([2, 5, 64]),
    wrong=st.sampled_from([0, 1, 2, 3, 100]),
)
# A snapshot whose prefix was evicted while its sequence ran.
@example(seed=1192, block_size=4, blocks=0, running=3, chunk=5, wrong=1)
def test_a_state_is_always_that_of_the_text(
    seed: int, block_size: int, blocks: int, running: int, chunk: int, wrong: int
) -> None:
    chance, runner = random.Random(seed), stateful(seed)
    asked = prompts(chance, 6)
    replies = {prompt: expected(runner, prompt, 12) for prompt in asked}
    speculator = Scripted(replies, 3, wrong) if wrong else None
    shape = CacheShape(CONTEXT, -(-42 // block_size) + blocks, block_size)
    engine = Engine(runner, shape, VOCAB, running=running, chunk=chunk, speculator=speculator)
    for _ in range(2):  # again, with the prefix cache enabled
        numbers = {}
        for prompt in asked:
            number = engine.submit(Request(prompt, limit=chance.randint(1, 12)))
            numbers[number] = prompt
            if chance.random() < 0.3:
                numbers |= dict.fromkeys(engine.branch(number, chance.randint(1, 3)), prompt)
        found: dict[int, list[int]] = {number: [] for number in numbers}
        while engine.has_work:
            for output in engine.step():
                assert output.error is None
                found[output.sequence] += output.tokens
            if chance.random() < 0.05:
                engine.cancel(chance.choice(list(numbers)))
        for number, tokens in found.items():
            assert tokens == replies[numbers[number]][: len(tokens)]
        states = engine.scheduler.pool.states
        assert states is not None and states.free + states.num_snapshots == states.slots, "nobody runs"
        assert engine.scheduler.pool.used == 0
    engine.forget()
    assert states.free == states.slots and not states.num_snapshots


def test_an_interrupted_pass_over_drafts_leaves_no_update_behind() -> None:
    """After Ctrl-C between a pass and its sampling, the same drafts are computed again."""
    runner, prompt = stateful(), (1, 2, 3, 4)

    class Interrupted(Scripted):
        interrupts = 1

        def verify(self, sequence: int, logits: Tensor, sampler: Sampler) -> list[int]:
            self.interrupts -= 1
            if self.interrupts == 0:
                raise KeyboardInterrupt
            return super().verify(sequence, logits, sampler)

    replies = {prompt: expected(runner, prompt, 12)}
    speculator = Interrupted(replies, 3, 5)
    engine = Engine(runner, CacheShape(CONTEXT, 20, 4), VOCAB, running=2, chunk=64, speculator=speculator)
    engine.submit(Request(prompt, limit=12))
    tokens: list[int] = []
    with pytest.raises(KeyboardInterrupt):
        while engine.has_work:
            tokens += engine.step()[0].tokens
    (outputs,) = drain(engine).values()
    assert tokens + [token for output in outputs for token in output.tokens] == replies[prompt]


def test_what_is_kept_is_found_again() -> None:
    """The snapshots are at the end of a sequence, shortly before a prompt's end, and where a prompt diverged."""
    chance, runner = random.Random(1), stateful()
    begin = tuple(chance.randrange(VOCAB) for _ in range(21))
    engine = Engine(runner, CacheShape(CONTEXT, 60, 4), VOCAB, running=2, chunk=64)

    def cached(prompt: Sequence[int]) -> int:
        tokens, timing = generate(engine, Request(tuple(prompt), limit=5))
        assert tokens == expected(runner, prompt, 5)
        return timing.cached

    first = [*begin, 0, 1, 2]
    assert cached(first) == 0
    assert cached(first) == 20, "the last whole block before the end, of 24 tokens"
    turn = [*first, *expected(runner, first, 5), 3, 4]
    assert cached(turn) == len(first) + 4, "all that was read of the reply"
    assert cached([*begin[:14], 7, 7, 7, 7]) == 0
    assert engine.stats.misses["no snapshot of the recurrent state"] == 1, "14 tokens are known, their state is not"
    assert cached([*begin[:14], 6, 6]) == 12, "where the one before parted from the first"


def test_the_least_recently_used_snapshot_makes_room() -> None:
    runner = stateful()
    engine = contiguous_engine(runner, CONTEXT)
    states = engine.scheduler.pool.states
    assert states is not None and states.slots == 3
    for first in range(6):
        prompt = [first, *range(6)]
        assert tokens_of(engine, prompt, 4) == expected(runner, prompt, 4)
        assert states.num_snapshots <= 3 and states.free + states.num_snapshots == 3


# Mamba-2 layers alone, with attention in other layers, and in the same layer.
RANDOM = ["qwen3_5-delta", "lfm2-tied", "bamba-2-groups", "nemotron_h-every-kind", "mamba2-2-groups"]
RANDOM += ["kimi_linear-8top3", "bailing_hybrid-8top3"]
RANDOM += ["falcon_h1-multipliers", "jamba-8top3", "falcon_mamba-tied"]


@pytest.fixture(scope="module", params=RANDOM)
def random_runner(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    folder: Path = tmp_path_factory.mktemp("model")
    make(folder, *CASES[request.param])
    return load_model(open_model_folder(folder), Placement(CPU, torch.float32))


def some_prompts(count: int, seed: int = 0) -> list[tuple[int, ...]]:
    chance = random.Random(seed)
    begin = [chance.randrange(4, SMALL["vocab_size"]) for _ in range(18)]
    return [
        (*begin[: chance.choice([0, 18])], *(chance.randrange(4, SMALL["vocab_size"]) for _ in range(2 + 3 * index)))
        for index in range(count)
    ]


def test_replies_are_the_same_alone_and_among_others(random_runner: ModelRunner) -> None:
    """The cache has so few blocks that some sequences are recomputed; greedy and seeded, with shared prefixes."""
    vocab = random_runner.config.vocab_size
    asked = [Request(p, SamplingParams(0.8 * (i % 2), seed=i), limit=14) for i, p in enumerate(some_prompts(6))]
    alone = [together(contiguous_engine(random_runner, CONTEXT), [one])[0] for one in asked]
    engine = Engine(random_runner, CacheShape(CONTEXT, 16, 6), vocab, running=4, chunk=11)
    assert together(engine, asked) == alone
    assert engine.stats.preemptions > 0
    assert together(engine, asked) == alone
    assert engine.stats.prefix_hits > 0


def test_branches_go_on_from_the_state_of_the_prompt(random_runner: ModelRunner) -> None:
    prompt, sampling = some_prompts(3)[2], SamplingParams(1.0, seed=5)
    engine = Engine(random_runner, CacheShape(CONTEXT, 40, 6), random_runner.config.vocab_size, running=3)
    first = engine.submit(Request(prompt, sampling, limit=12))
    numbers = [first, *engine.branch(first, 3)]
    outputs = drain(engine)
    for index, number in enumerate(numbers):
        alone = Request(prompt, SamplingParams(1.0, seed=5 + index), limit=12)
        assert [t for one in outputs[number] for t in one.tokens] == together(
            contiguous_engine(random_runner, CONTEXT), [alone]
        )[0]


@pytest.mark.parametrize("wrong", [1, 2, 5, 100], ids=lambda one: f"every-{one}th-wrong")
def test_a_state_after_refused_drafts_is_one_that_never_saw_them(random_runner: ModelRunner, wrong: int) -> None:
    prompt = some_prompts(2)[1]
    plain = contiguous_engine(random_runner, CONTEXT)
    reply = tokens_of(plain, prompt, 30)
    speculator = Scripted({prompt: reply}, 4, wrong)
    engine = Engine(
        random_runner, CacheShape.contiguous(CONTEXT), random_runner.config.vocab_size, speculator=speculator
    )
    assert tokens_of(engine, prompt, 30) == reply
    assert speculator.accepted if wrong > 1 else speculator.refused
    ends = []
    for one in (plain, engine):
        (node,) = one.scheduler.pool.index.root.children.values()
        slot = node.states[len(prompt) + 29]
        ends.append(_states(one, slot))
    for ours, theirs in zip(*ends, strict=True):
        assert (ours - theirs).abs().max() <= 1e-5 * theirs.abs().max()


def _states(engine: Engine, slot: int) -> list[Tensor]:
    specs = [spec for spec in engine.runner.config.layer_specs if spec.recurrent is not None]
    return [state[slot].clone() for spec in specs for state in engine.cache.states.layer(spec.index)]
