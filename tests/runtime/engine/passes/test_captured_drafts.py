"""Test that captured passes over drafted tokens of recurrent models leave the logits and states of the plain pass.

A recording replaces the CUDA graph.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from mycli.runtime.cache.batch import Chunk
from mycli.runtime.cache.kv_cache import KVCache
from mycli.runtime.engine.model_runner import ModelRunner
from mycli.runtime.engine.passes import Passes
from mycli.runtime.engine.passes.base import Pass, PassInput
from mycli.runtime.engine.passes.captured import CapturedStep, PromptStep
from mycli.runtime.engine.passes.cuda import CudaPass
from mycli.runtime.engine.passes.device_sequences import advance_by_drafts
from mycli.runtime.engine.passes.gate import difference
from mycli.runtime.engine.passes.graphs import Launches, StepInput
from mycli.runtime.engine.passes.plain import PlainPass
from mycli.runtime.errors import Declined
from mycli.runtime.kernels.paged import KEY_BLOCK
from mycli.runtime.layers.rope import Rope
from mycli.runtime.layers.transformer import HiddenStateHook, Transformer
from mycli.runtime.memory.graphs import MOST_ROWS
from tests.support.families import CASES, make
from tests.support.graphs import recording
from tests.support.grids import chosen
from tests.support.native_parts import WIDE, load_bf16, need_native_code

FAMILIES = [
    "qwen3_5-delta",
    "qwen3_next-8top3",
    "kimi_linear-8top3",
    "falcon_h1-multipliers",
    "jamba-8top3",
    "lfm2-untied-biases",
    "granitemoehybrid-8top3",
]
WITH_MTP_HEADS = ("qwen3_5-delta", "qwen3_next-8top3")
LENGTHS = (61, 5, 40)  # tokens of the prompts: blocks of 64 are crossed
TABLES = ((5, 2), (4, 0), (1, 3))
SLOTS = (2, 0, 3)
# Of each pass, the drafted and the accepted tokens of each sequence, the sampled one included: none of them is accepted
# where a sequence ends in an error. Every shape occurs at least three times: launched, captured and replayed. Without
# drafts a sequence advances in the pass.
PASSES: list[tuple[tuple[int, int], ...]] = [
    *(((3, count),) for count in (0, 1, 2, 3, 4)),
    *(((3, first), (3, 4 - first), (2, min(first, 3))) for first in (0, 1, 2, 3, 4)),
    *(((2, 3), (0, 1), (3, count)) for count in (1, 4)),
    ((0, 1), (0, 1), (0, 1)),
    *(((1, count), (1, 2), (0, 1)) for count in (0, 1, 2, 2)),
    ((0, 1),),
    ((7, 5), (2, 2)),
]


def run(
    model: Transformer,
    ways: Sequence[Pass],
    passes: Sequence[tuple[tuple[int, int], ...]],
    hook: HiddenStateHook | None = None,
) -> list[Tensor]:
    """Return the logits of `passes`, and the states, keys and values after them; `hook` receives hidden states."""
    runner = ModelRunner(model, "auto", Passes(tuple(ways), {}))
    cache = KVCache(model.config, 6, KEY_BLOCK, model.device, torch.bfloat16, slots=4)
    runner.rope(2 * KEY_BLOCK)
    generator, vocab = torch.Generator().manual_seed(1), model.config.vocab_size
    texts = [torch.randint(3, vocab, (2 * KEY_BLOCK,), generator=generator).tolist() for _ in LENGTHS]
    places, found = list(LENGTHS), []
    for text, length, blocks, slot in zip(texts, LENGTHS, TABLES, SLOTS, strict=True):
        runner.run([Chunk(text[:length], 0, blocks, 0, slot)], cache)
    for sequences in passes:
        chunks = []
        for index, (drafts, _) in enumerate(sequences):
            start = places[index]
            tokens = texts[index][start : start + 1 + drafts]
            chunks.append(Chunk(tokens, start, TABLES[index], 1 + drafts, SLOTS[index], drafts))
        found.append(runner.run(chunks, cache, hook).clone())
        for index, (drafts, count) in reversed(list(enumerate(sequences))):
            if drafts:
                cache.states.commit_drafts(SLOTS[index], count)
            if index:
                cache.states.copy(SLOTS[index], 1)  # a snapshot, before the first sequence is committed
            places[index] += count
    recurrent = [spec.index for spec in model.config.layer_specs if spec.recurrent is not None]
    found += [state.clone() for layer in recurrent for state in cache.states.layer(layer)]
    stored = [cache.read(layer, TABLES[0], places[0]) for layer in range(model.config.layers)]
    return [*found, *(part.data for parts in stored for part in parts)]


def loaded(case: str, folder: Path) -> Transformer:
    model_type, changes = CASES[case]
    make(folder, model_type, {**WIDE, **changes, "max_position_embeddings": 256})
    return load_bf16(folder).model


class Counting(PlainPass):
    """Counts the passes that a `CudaPass` leaves to the plain pass or compares with it."""

    passes = 0

    def logits(self, work: PassInput) -> Tensor:
        self.passes += 1
        return super().logits(work)


class Replayed(CapturedStep):
    """Overwrites the hidden states of the last pass with the same inputs, as a replay does."""

    def __call__(self, inputs: StepInput, rope: Rope, cache: KVCache, last: bool) -> Tensor:
        before = None if inputs.hidden is None else inputs.hidden.rows
        logits = super().__call__(inputs, rope, cache, last)
        if before is not None and inputs.hidden is not None and inputs.hidden.rows is not None:
            inputs.hidden.rows = before.copy_(inputs.hidden.rows)
        return logits


@pytest.mark.parametrize("case", chosen(FAMILIES, FAMILIES))
def test_states_advance_by_the_accepted_drafts(case: str, tmp_path: Path) -> None:
    need_native_code()
    model, captures = loaded(case, tmp_path), 0

    def capture(work: Launches) -> Launches:
        nonlocal captures
        captures += 1
        return recording(work)

    plain = Counting(model)
    way = CudaPass(Replayed(model), plain, capture, lambda declined: pytest.fail(declined.code), name="captured")
    hidden: tuple[list[Tensor], list[Tensor]] = ([], [])
    hooks = [states.append if case in WITH_MTP_HEADS else None for states in hidden]
    found, expected = (
        run(model, ways, PASSES, hook) for ways, hook in zip(((way, plain), (PlainPass(model),)), hooks, strict=True)
    )
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))
    assert len(hidden[0]) == len(hidden[1]) == (len(PASSES) if case in WITH_MTP_HEADS else 0), "once a pass"
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*hidden, strict=True)), (
        "no pass overwrites those before"
    )
    assert plain.passes == len(LENGTHS) + 3, "prompts without logits, and first passes of padded shapes"
    assert captures == 3 * 2, "1 x 4, 4 x 4 and 4 x 2 tokens, and how they advance the states"


@pytest.mark.parametrize("failing", [1, 2], ids=["pass", "commit"])
def test_a_pass_without_memory_for_its_graphs_is_launched(failing: int, tmp_path: Path) -> None:
    need_native_code()
    model, captures, reported = loaded(FAMILIES[0], tmp_path), 0, list[Declined]()

    def capture(work: Launches) -> Launches:
        nonlocal captures
        captures += 1
        if captures == failing:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return recording(work)

    way = CudaPass(CapturedStep(model), PlainPass(model), capture, reported.append, name="captured")
    passes = [((3, count),) for count in (2, 4, 1, 3)]
    found, expected = (run(model, ways, passes) for ways in ((way, way._plain), (way._plain,)))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))
    assert [declined.code for declined in reported] == ["no-graph-memory"]


@pytest.mark.parametrize("drafts", [True, False], ids=["drafts", "tokens"])
def test_states_do_not_advance_twice_where_a_result_does_not_fit(
    drafts: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows that are not padding are gathered after the replay, which may have advanced the states."""
    need_native_code()
    model = loaded(FAMILIES[0], tmp_path)
    way = CudaPass(CapturedStep(model), PlainPass(model), recording, name="captured")
    cache = KVCache(model.config, 6, KEY_BLOCK, model.device, torch.bfloat16, slots=4)
    rope = ModelRunner(model).rope(2 * KEY_BLOCK)

    def work(start: int) -> PassInput:
        counts = (4, 2, 3)
        chunks = [
            Chunk(list(range(3, 3 + count)), start, TABLES[index], count, SLOTS[index], (count - 1) * drafts)
            for index, count in enumerate(counts)
        ]
        return PassInput(chunks, cache, rope)

    for start in range(0, 12, 4):  # launched, captured and replayed
        way.logits(work(start))
        cache.states.discard_drafts()
    before = [state.clone() for state in cache.states.layer(0)]

    def full(*arguments: object) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("mycli.runtime.engine.passes.cuda._without_padding", full)
    plain = list[PassInput]()
    monkeypatch.setattr(way._plain, "logits", plain.append)
    with pytest.raises(torch.OutOfMemoryError):
        way.logits(work(12))
    assert not plain, "it would start from states that have advanced, or defer another update"
    cache.states.discard_drafts()
    unchanged = all(torch.equal(*pair) for pair in zip(before, cache.states.layer(0), strict=True))
    assert unchanged == drafts


def test_rows_of_drafts_are_not_held_by_their_graph(tmp_path: Path) -> None:
    """The pool of the graphs has their memory, for the next graph too."""
    need_native_code()
    model, rows = loaded(FAMILIES[0], tmp_path), list[int]()
    step = CapturedStep(model)

    def capture(work: Launches) -> Launches:
        work()  # as a capture does
        return recording(work)

    class Noting(CudaPass):
        def _captured(self, *args):  # type: ignore[no-untyped-def]
            captured = super()._captured(*args)
            assert captured.inputs.drafts is not None
            rows.append(len(captured.inputs.drafts.layers))
            return captured

    way = Noting(step, PlainPass(model), capture, name="captured")
    run(model, (way, PlainPass(model)), [((3, 2),), ((3, 2),)])
    assert rows == [0]


class Late(CapturedStep):
    """Gives hidden states of the rows before."""

    def __call__(self, inputs: StepInput, rope: Rope, cache: KVCache, last: bool) -> Tensor:
        logits = super().__call__(inputs, rope, cache, last)
        if inputs.hidden is not None and inputs.hidden.rows is not None:
            inputs.hidden.rows = inputs.hidden.rows.roll(1, 1)
        return logits


def test_hidden_states_are_compared_before_use(tmp_path: Path) -> None:
    """The comparison is at load, and for other shapes with their first pass; then the plain pass gives them, once."""
    need_native_code()
    model, hidden, reported = loaded("lfm2-tied", tmp_path), list[Tensor](), list[Declined]()
    declined = difference(model, Late(model))
    assert declined is not None and declined.code == "hidden-states-differ"
    ways = CudaPass(Late(model), PlainPass(model), recording, reported.append), PlainPass(model)
    passes = [((2, 1), (1, 1), (0, 1))]
    run(model, ways, passes, hidden.append)
    run(model, ways[1:], passes, hidden.append)
    assert [declined.code for declined in reported] == ["hidden-states-differ"]
    assert len(hidden) == 2 and hidden[0].equal(hidden[1])


class Shifted(CapturedStep):
    """Keeps the rows of the tokens before."""

    def __call__(self, inputs: StepInput, rope: Rope, cache: KVCache, last: bool) -> Tensor:
        logits = super().__call__(inputs, rope, cache, last)
        if inputs.drafts is not None:
            layers = [
                (layer, tuple(row.roll(1, 0) for row in rows), step) for layer, rows, step in inputs.drafts.layers
            ]
            inputs.drafts.layers[:] = layers
        return logits


def test_states_after_drafts_are_compared_before_use(tmp_path: Path) -> None:
    need_native_code()
    model = loaded(FAMILIES[0], tmp_path)

    def lost(work: Launches) -> Launches:  # the rows were overwritten between the replays
        launch = recording(work)
        return (lambda: torch.empty(0)) if getattr(work, "func", None) is advance_by_drafts else launch

    assert difference(model, CapturedStep(model), "auto", recording) is None
    declined = difference(model, Shifted(model), "auto", recording)
    assert declined is not None and declined.code == "draft-states-differ"
    assert difference(model, CapturedStep(model), "auto", lost) == Declined("replay-differs")


def test_drafts_and_hidden_states_of_more_rows_than_a_decode_pass_has_are_the_plain_passs(tmp_path: Path) -> None:
    model = loaded("lfm2-tied", tmp_path)
    cache = KVCache(model.config, 64, KEY_BLOCK, model.device, torch.bfloat16, slots=64)
    rope, way = ModelRunner(model).rope(KEY_BLOCK), CudaPass(PromptStep(model), PlainPass(model), recording)
    chunks = [Chunk(list(range(8)), 3, (slot,), 8, slot, drafted=7) for slot in range(64)]
    too_many = {"most": MOST_ROWS, "rows": 512}
    assert way.takes(PassInput(chunks, cache, rope)) == Declined("drafted-states", too_many)
    prompt = PassInput([Chunk(list(range(KEY_BLOCK)), 0, (slot,), 1, slot) for slot in range(8)], cache, rope)
    assert way.takes(prompt) is None
    assert way.takes(replace(prompt, hook=lambda hidden: None)) == Declined("hidden-states", too_many)
