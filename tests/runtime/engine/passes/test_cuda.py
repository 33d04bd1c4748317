"""Test when a pass is captured and replayed, and that buffers carry the inputs; a recording replaces the CUDA graph."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from mycli.runtime.cache.batch import Batch, Chunk
from mycli.runtime.cache.kv_cache import KVCache
from mycli.runtime.engine.model_runner import ModelRunner
from mycli.runtime.engine.passes import Passes, cuda
from mycli.runtime.engine.passes import graphs as replay
from mycli.runtime.engine.passes.graphs import Launches, StepInput
from mycli.runtime.engine.passes.plain import PlainPass
from mycli.runtime.errors import Declined
from mycli.runtime.kernels.paged import KEY_BLOCK
from mycli.runtime.layers.rope import Rope
from mycli.runtime.memory.graphs import DRAFT_BUCKETS
from mycli.runtime.models.part_spec import RopeScaling
from tests.support.fused_pass import CAPACITY, Sums, fused_pass, model, one, run, session, several
from tests.support.graphs import UncomparedPass, recording
from tests.support.prefix_model import CONFIG, CPU


def test_the_first_pass_runs_the_second_is_captured_the_others_replayed() -> None:
    captures: list[Launches] = []

    def capture(work: Launches) -> Launches:
        captures.append(work)
        return recording(work)

    step = Sums()
    fast = fused_pass(step, capture)
    cache, rope = session()
    for start, token in enumerate([5, 6, 7, 8]):
        found = run(fast, one(token, start), rope, cache)
        assert found is not None and found[0, 0] == token * 100 + start + 1, "tokens and lengths are those of this pass"
        assert len(captures) == min(start, 1)
    assert run(fast, several([[1, 2]], 4, 2), rope, cache) is not None and len(captures) == 1
    other, its_rope = session()
    assert run(fast, one(9, 0), its_rope, other) is not None and len(captures) == 1, (
        "a graph holds addresses of one cache"
    )


def test_a_pass_waits_for_nothing_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reject reading values of a GPU tensor on the host, which would synchronize."""
    fast, (cache, rope), batches = fused_pass(Sums(), recording), session(), [one(7, start) for start in range(3)]

    def waits(*_: object) -> None:
        raise AssertionError("it waits")

    with monkeypatch.context() as patch:
        for name in ("tolist", "item", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__"):
            patch.setattr(Tensor, name, waits)
        done = [run(fast, batch, rope, cache) is not None for batch in batches]  # launched, captured, replayed
    assert done == [True] * 3


def test_launch_by_launch_without_capture() -> None:
    step = Sums()
    fast, (cache, rope) = fused_pass(step, None), session()
    for _ in range(3):
        assert run(fast, one(3, 0), rope, cache) is not None
    assert step.calls == 3


@pytest.mark.parametrize(
    "batch",
    [
        one(1, 0, 0),
        several([[0] * 9], 0),
        several([[1, 2, 3]], 0, 2),
        Batch.of([Chunk([1], 0, (0,), 1), Chunk([1, 2], 0, (1,), 1)], CAPACITY, CPU),
        Batch.of([Chunk([1], 0, (0, 1), 1)], CAPACITY, CPU),
    ],
    ids=["no-logits", "too-many-tokens", "some-logits", "ragged", "blocks-of-32"],
)
def test_other_passes_are_the_plain_models(batch: Batch) -> None:
    fast, (cache, rope) = fused_pass(Sums(), recording), session(sequences=2)
    assert run(fast, batch, rope, cache) is None


class Seen(Sums):
    """Records copies of its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs: list[StepInput] = []

    def __call__(self, inputs: StepInput, rope: Rope, cache: KVCache, last: bool) -> Tensor:
        self.inputs.append(StepInput(inputs.tokens.clone(), inputs.lengths.clone(), inputs.block_table.clone()))
        return super().__call__(inputs, rope, cache, last)


def test_one_graph_serves_any_sequences_of_a_padded_number() -> None:
    """The lengths and blocks are per sequence; the remaining rows are padding and not returned."""
    captures: list[Launches] = []

    def capture(work: Launches) -> Launches:
        captures.append(work)
        return recording(work)

    step = Seen()
    fast = fused_pass(step, capture)
    cache = KVCache(CONFIG, 40, KEY_BLOCK, CPU, torch.float16)
    rope = Rope(CONFIG, 4 * KEY_BLOCK, CPU, torch.float16)
    for count, blocks in ((3, (7, 2)), (4, (9,)), (3, (1, 30, 4)), (4, (6, 5, 3, 0)), (3, (8,))):
        chunks = [Chunk([5 + place], 3 * place, tuple(block + place for block in blocks), 1) for place in range(count)]
        found = run(fast, Batch.of(chunks, KEY_BLOCK, CPU), rope, cache)
        assert found is not None and found[:, 0].tolist() == [501, 604, 707, 810][:count]
        given = step.inputs[-1]
        assert given.lengths.tolist() == [1, 4, 7, 10][:count] + [0] * (4 - count)
        table = given.block_table[:count, : len(blocks)].tolist()
        assert table == [[block + place for block in blocks] for place in range(count)]
        assert given.block_table.shape == (4, 4), "as many blocks as the longest sequence can have"
    assert len(captures) == 1
    five = [Chunk([5], 3, (place,), 1) for place in range(5)]
    assert run(fast, Batch.of(five, KEY_BLOCK, CPU), rope, cache) is not None and len(step.inputs[-1].lengths) == 8


def test_a_new_rotary_table_takes_new_graphs() -> None:
    """The graph holds the address of the table it was captured with."""
    fast, (cache, rope) = fused_pass(Sums(), recording), session()
    for _ in range(3):
        assert run(fast, one(3, 0), rope, cache) is not None
    longer = Rope(CONFIG, 2 * CAPACITY, CPU, torch.float16)
    assert run(fast, one(3, 0), longer, cache) is not None
    assert fast._graphs[cache].rope is longer


def test_the_graph_that_was_used_least_recently_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "MOST_GRAPHS", 6)
    captures: list[tuple[int, bool]] = []

    class Shapes(Sums):
        def __call__(self, inputs: StepInput, rope: Rope, cache: KVCache, last: bool) -> Tensor:
            captures.append((inputs.tokens.shape[0], last))
            return super().__call__(inputs, rope, cache, last)

        def takes(self, sequences: int, tokens: int) -> bool:
            return True

    def capture(work: Launches) -> Launches:
        out = work()
        return lambda: out

    fast, (cache, rope) = fused_pass(Shapes(), capture), session(sequences=4)
    shapes = [(sequences, new) for sequences in (2, 4) for new in (1, *DRAFT_BUCKETS)]
    for sequences, new in shapes:
        for _ in range(2):
            assert run(fast, several([[0] * new] * sequences, 0, new), rope, cache) is not None
            assert run(fast, one(0, 0), rope, cache) is not None
    assert len(shapes) >= cuda.MOST_GRAPHS
    assert captures.count((1, True)) == 2, "launched once, captured once: the one in use was never dropped"


def test_tables_that_depend_on_the_length_are_the_plain_models() -> None:
    cache, rope = session(RopeScaling("dynamic", 2.0, original_context=16))
    assert run(fused_pass(Sums(), recording), one(1, 0), rope, cache) is None


def test_graphs_go_with_their_cache_and_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "MOST_GRAPHS", 6)

    def capture(work: Launches) -> Launches:
        """Record the call with its buffers: a graph stores addresses, not values."""
        out = work()
        return lambda: out

    fast, (cache, rope) = fused_pass(Sums(), capture), session(sequences=1)
    for new in range(1, 9):
        for logits in (1, new):
            for _ in range(2):
                assert run(fast, several([[0] * new], 0, logits), rope, cache) is not None
    for held in fast._graphs.values():
        assert sum(captured is not None for captured in held.by_shape.values()) == cuda.MOST_GRAPHS
    del cache
    gc.collect()
    assert not fast._graphs


def test_a_runner_uses_the_fused_pass_and_keeps_a_copy_of_the_logits() -> None:
    plain = model(lambda x: torch.ones(*x.shape[:-1], 8))
    runner = ModelRunner(
        plain, passes=Passes((UncomparedPass(Sums(), PlainPass(plain), recording), PlainPass(plain)), {})
    )
    cache, _ = session()
    kept = [runner.run([Chunk([token], start, (0,), 1)], cache) for start, token in enumerate([3, 4, 5])]
    assert [int(logits[0, 0]) for logits in kept] == [301, 402, 503]
    assert runner.run([Chunk([1] * 9, 3, (0,), 2)], cache).tolist() == [[1.0] * 8] * 2, "by the plain model"


def test_a_capture_launches_what_the_first_pass_compiled() -> None:
    """The cause: Triton specializes on addresses that are multiples of 16, and must not compile during a capture."""

    class Addresses(Sums):
        seen: list[tuple[bool, ...]] = []

        def __call__(self, inputs: StepInput, *rest: object, **options: object) -> Tensor:
            tensors = inputs.tokens, inputs.lengths, inputs.block_table
            self.seen.append(tuple(tensor.data_ptr() % 16 == 0 for tensor in tensors))
            return super().__call__(inputs, *rest, **options)  # type: ignore[arg-type]  # passed on

    step = Addresses()
    fast, (cache, rope) = fused_pass(step, recording), session()
    for start in range(3):
        batch = replace(one(7, start), tokens=torch.tensor([0, 7])[1:])
        assert batch.tokens.data_ptr() % 16
        assert run(fast, batch, rope, cache) is not None
    assert set(step.seen) == {(True, True, True)}


def refusing(*_: object) -> Launches:
    raise RuntimeError("operation not permitted when stream is capturing\nmore")


def failing_replay(work: Launches) -> Launches:
    work()

    def again() -> Tensor:
        raise AssertionError

    return again


@pytest.mark.parametrize(
    ("capture", "words"),
    [(refusing, "RuntimeError: operation not permitted when stream is capturing"), (failing_replay, "AssertionError")],
    ids=["capture", "replay"],
)
def test_a_capture_or_a_replay_that_fails_ends_the_path_and_no_chat(capture: replay.Capture, words: str) -> None:
    warnings: list[Declined] = []
    plain = model(lambda x: torch.ones(*x.shape[:-1], 8))
    runner = ModelRunner(
        plain,
        passes=Passes((UncomparedPass(Sums(), PlainPass(plain), capture, warnings.append), PlainPass(plain)), {}),
    )
    cache, _ = session()
    found = [runner.run([Chunk([token], start, (0,), 1)], cache)[0, 0].item() for start, token in enumerate([3] * 5)]
    assert found == [301, 1, 1, 1, 1], "from then on by the plain model"
    assert len(warnings) == 1 and str(warnings[0].data["error"]).endswith(words)


def test_a_shape_without_memory_for_its_graph_is_launched_and_others_are_captured() -> None:
    captured = list[int]()

    def capture(work: Launches) -> Launches:
        if len(work()[0]) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 42.00 MiB")
        captured.append(1)
        return recording(work)

    warnings: list[Declined] = []
    fast, (cache, rope) = fused_pass(Sums(), capture, warnings), session()
    for _ in range(4):
        for tokens in ([1, 2, 3], [1, 2]):
            batch = several([tokens], 0, len(tokens))
            found, expected = (run(way, batch, rope, cache) for way in (fast, fused_pass(Sums(), None)))
            assert found is not None and expected is not None and found.equal(expected)
    assert [warning.code for warning in warnings] == ["no-graph-memory"] and len(captured) == 1
    del cache
    gc.collect()
    assert not fast._graphs


def test_a_shape_that_cannot_be_launched_is_the_plain_models_and_others_go_on() -> None:
    class Narrow(Sums):
        def __call__(self, inputs: StepInput, *rest: object, **options: object) -> Tensor:
            if inputs.tokens.shape[1] > 2:
                raise RuntimeError("out of resource: shared memory")
            return super().__call__(inputs, *rest, **options)  # type: ignore[arg-type]  # passed on

    warnings: list[Declined] = []
    fast, (cache, rope) = fused_pass(Narrow(), recording, warnings), session()
    for _ in range(3):
        assert run(fast, several([[1, 2, 3]], 0, 3), rope, cache) is None
        assert run(fast, several([[1, 2, 3, 4]], 0, 4), rope, cache) is None
        assert run(fast, several([[1, 2]], 0, 2), rope, cache) is not None
    assert len(warnings) == 1 and "shared memory" in str(warnings[0].data)


def test_graphs_share_one_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first graph creates a pool and the others reuse it, according to the log of a stub of torch's graphs.

    A failed capture leaves the stream that was current before.
    """
    log: list[tuple[str, object]] = []

    class Graph:
        def pool(self) -> int:
            return id(self)

        def replay(self) -> None:
            log.append(("replay", id(self)))

    @contextmanager
    def graph(made: Graph, pool: int | None = None) -> Iterator[None]:
        log.append(("begin", pool))
        yield
        log.append(("end", id(made)))

    @contextmanager
    def stream(current: str) -> Iterator[None]:
        try:
            yield
        finally:
            log.append(("current", current))

    monkeypatch.setattr(torch.cuda, "current_stream", lambda: "before")
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", graph)
    capture = replay.GraphCapture()
    with pytest.raises(RuntimeError):
        capture(refusing)
    assert log[-1] == ("current", "before")
    replays = [capture(lambda: torch.ones(1)) for _ in range(3)]
    del replays[0]
    pools = [what for name, what in log if name == "begin"]
    first = next(what for name, what in log if name == "end")
    assert pools == [None, None, first, first]
    assert replays[0]().item() == 1 and log[-1][0] == "replay"
