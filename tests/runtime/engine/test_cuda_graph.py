"""When a pass is captured and replayed, and that buffers carry what changes; a recording stands in for a CUDA graph."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from mycli.runtime.cache.block_table import Chunk
from mycli.runtime.cache.kv_cache import KVCache, cache_dtype
from mycli.runtime.engine import cuda_graph as replay
from mycli.runtime.engine.cuda_graph import MOST_GRAPHS, Launches, Replay
from mycli.runtime.engine.model_runner import FastPaths, ModelRunner
from mycli.runtime.kernels.triton.attention import BLOCK_K, splits
from mycli.runtime.kernels.triton.product.tiles import Chip
from mycli.runtime.layers.batch import Batch
from mycli.runtime.layers.rope import Rope
from mycli.runtime.layers.transformer import Transformer
from mycli.runtime.models.config import Kv, RopeScaling
from tests.support.graphs import recording
from tests.support.prefix_model import CONFIG, CPU

CAPACITY = 32


class Sums:
    """Logits that say what the step was given."""

    def __init__(self) -> None:
        self.calls = 0

    def takes(self, sequences: int, tokens: int) -> bool:
        return sequences * tokens <= 8

    def __call__(
        self, tokens: Tensor, lengths: Tensor, tables: tuple[Tensor, Tensor], cache: KVCache, last: bool
    ) -> Tensor:
        self.calls += 1
        found = (tokens * 100 + lengths[:, None])[:, -1:] if last else tokens * 100 + lengths[:, None]
        return found[..., None].expand(-1, -1, 3).half()


def session(rope: RopeScaling | None = None, sequences: int = 1) -> tuple[KVCache, Rope]:
    config = CONFIG if rope is None else replace(CONFIG, rope=rope)
    return KVCache(config, sequences, CAPACITY, CPU, torch.float16), Rope(config, CAPACITY, CPU, torch.float16)


def several(tokens: list[list[int]], start: int, logits: int = 1, first: int = 0) -> Batch:
    """New tokens of each sequence, whose blocks are neighbours from `first` on."""
    chunks = [Chunk(row, start, (first + place,), logits) for place, row in enumerate(tokens)]
    return Batch.of(chunks, CAPACITY, CPU)


def one(token: int, start: int, logits: int = 1) -> Batch:
    return several([[token]], start, logits)


def test_the_first_pass_runs_the_second_is_captured_the_others_replayed() -> None:
    captures: list[Launches] = []

    def capture(work: Launches) -> Launches:
        captures.append(work)
        return recording(work)

    step = Sums()
    fast = Replay(step, capture)
    cache, rope = session()
    for start, token in enumerate([5, 6, 7, 8]):
        found = fast(one(token, start), rope, cache)
        assert found is not None and found[0, 0, 0] == token * 100 + start + 1, (
            "tokens and lengths are those of this pass"
        )
        assert len(captures) == min(start, 1)
    assert fast(several([[1, 2]], 4, 2), rope, cache) is not None and len(captures) == 1
    other, its_rope = session()
    assert fast(one(9, 0), its_rope, other) is not None and len(captures) == 1, "a graph holds addresses of one cache"


def test_a_pass_waits_for_nothing_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever reads the numbers of a tensor on a GPU waits until they are there."""
    fast, (cache, rope), batches = Replay(Sums(), recording), session(), [one(7, start) for start in range(3)]

    def waits(*_: object) -> None:
        raise AssertionError("it waits")

    with monkeypatch.context() as patch:
        for name in ("tolist", "item", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__"):
            patch.setattr(Tensor, name, waits)
        done = [fast(batch, rope, cache) is not None for batch in batches]  # launched, captured, replayed
    assert done == [True] * 3


def test_launch_by_launch_without_capture() -> None:
    step = Sums()
    fast, (cache, rope) = Replay(step, None), session()
    for _ in range(3):
        assert fast(one(3, 0), rope, cache) is not None
    assert step.calls == 3


@pytest.mark.parametrize(
    "batch",
    [
        one(1, 0, 0),
        several([[0] * 9], 0),
        several([[1, 2, 3]], 0, 2),
        Batch.of([Chunk([1], 0, (0,), 1), Chunk([1, 2], 0, (1,), 1)], CAPACITY, CPU),
        Batch.of([Chunk([1], 0, (1,), 1), Chunk([1], 0, (0,), 1)], CAPACITY, CPU),
        Batch.of([Chunk([1], 0, (0, 1), 1)], CAPACITY, CPU),
    ],
    ids=["no-logits", "too-many-tokens", "some-logits", "ragged", "no-neighbours", "two-blocks"],
)
def test_other_passes_are_the_plain_models(batch: Batch) -> None:
    fast, (cache, rope) = Replay(Sums(), recording), session(sequences=2)
    assert fast(batch, rope, cache) is None


def test_sequences_may_have_some_of_the_lanes() -> None:
    """Lengths are each sequence's own; a graph is of the lanes that it was captured for."""
    fast, (cache, rope) = Replay(Sums(), recording), session(sequences=4)
    for first in (0, 2, 2, 2, 0):
        chunks = [Chunk([5 + place], 3 * place, (first + place,), 1) for place in range(2)]
        found = fast(Batch.of(chunks, CAPACITY, CPU), rope, cache)
        assert found is not None and found[:, 0, 0].tolist() == [501, 604]
    assert len(fast._graphs) == 2


def test_tables_that_depend_on_the_length_are_the_plain_models() -> None:
    cache, rope = session(RopeScaling("dynamic", 2.0, original_context=16))
    assert Replay(Sums(), recording)(one(1, 0), rope, cache) is None


def test_graphs_go_with_their_cache_and_are_limited() -> None:
    def capture(work: Launches) -> Launches:
        """A graph keeps addresses, not what was captured."""
        out = work()
        return lambda: out

    fast, (cache, rope) = Replay(Sums(), capture), session(sequences=1)
    for new in range(1, 9):
        for logits in (1, new):
            for _ in range(2):
                assert fast(several([[0] * new], 0, logits), rope, cache) is not None
    assert sum(len(known) for known in fast._graphs.values()) <= MOST_GRAPHS
    del cache
    gc.collect()
    assert not fast._graphs


class Plain(Transformer):
    """Logits of ones; remembers nothing."""

    def hidden(self, batch: Batch, rope: Rope, cache: KVCache) -> Tensor:
        return torch.ones(1, batch.rows, 2)


def model(head: Callable[[Tensor], Tensor], head_dim: int = CONFIG.head_dim) -> Plain:
    made = Plain(replace(CONFIG, head_dim=head_dim))
    made.embedding = torch.zeros(8, 2)
    made.norm.forward = lambda x: x  # type: ignore[method-assign]  # not of interest here
    made.head.forward = head  # type: ignore[method-assign]  # as above
    return made


def test_a_runner_uses_the_fused_pass_and_keeps_a_copy_of_the_logits() -> None:
    plain = model(lambda x: torch.ones(*x.shape[:-1], 8))
    runner = ModelRunner(plain, fast=FastPaths(Replay(Sums(), recording)))
    cache, _ = session()
    kept = [runner.run([Chunk([token], start, (0,), 1)], cache) for start, token in enumerate([3, 4, 5])]
    assert [int(logits[0, 0]) for logits in kept] == [301, 402, 503]
    assert runner.run([Chunk([1] * 9, 3, (0,), 2)], cache).tolist() == [[1.0] * 8] * 2, "by the plain model"


def test_a_pass_that_differs_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = model(lambda x: torch.ones(*x.shape[:-1], 3))

    class Right(Sums):
        def __call__(self, *arguments: object, **options: object) -> Tensor:
            tokens = arguments[0]
            assert isinstance(tokens, Tensor)
            return torch.ones(*tokens.shape, 3).half() * self.factor

        factor = 1.0

    step = Right()
    assert replay.difference(plain, step) is None
    step.factor = 1.1
    assert "10.0%" in str(replay.difference(plain, step))
    step.factor = float("nan")
    assert replay.difference(plain, step) is not None
    warnings: list[str] = []
    monkeypatch.setattr(replay.DecodeStep, "make", lambda _: step)
    assert replay.make_replay(plain, "auto", warnings.append) is None and "fused kernels" in warnings[0]
    monkeypatch.setattr(replay.DecodeStep, "make", lambda _: "dense")
    assert replay.make_replay(plain, "auto", warnings.append) is None and len(warnings) == 1


def test_a_pass_that_replays_otherwise_than_it_launches_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or that cannot be captured at all, as with a driver too old for what its launches ask for."""
    plain, warnings = model(lambda x: torch.ones(*x.shape[:-1], 3)), list[str]()

    class Right(Sums):
        def __call__(self, tokens: Tensor, *_: object, **__: object) -> Tensor:
            return torch.ones(*tokens.shape, 3).half()

    def refused(work: replay.Launches) -> replay.Launches:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(replay.DecodeStep, "make", lambda _: Right())
    captures: dict[str, replay.Capture] = {
        "replayed, they give other logits": lambda work: lambda: work() * 1.001,
        "not permitted": refused,
    }
    for words, capture in captures.items():
        monkeypatch.setattr(replay, "GraphCapture", lambda capture=capture: capture)
        assert replay.make_replay(plain, "auto", warnings.append) is None and words in warnings[-1]
    monkeypatch.setattr(replay, "GraphCapture", lambda: lambda work: work)
    assert replay.make_replay(plain, "auto", warnings.append) is not None and len(warnings) == 2


def test_a_pass_is_compared_on_the_kind_of_cache_that_it_will_have(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, seen = model(lambda x: torch.ones(*x.shape[:-1], 3), head_dim=64), list[torch.dtype]()

    class Right(Sums):
        def __call__(
            self, tokens: Tensor, lengths: Tensor, tables: tuple[Tensor, Tensor], cache: KVCache, last: bool
        ) -> Tensor:
            seen.append(cache.all(0)[0].data.dtype)
            return torch.ones(*tokens.shape, 3).half()

    monkeypatch.setattr(replay.DecodeStep, "make", lambda _: Right())
    monkeypatch.setattr(replay, "GraphCapture", lambda: lambda work: work)
    kinds: tuple[Kv, ...] = ("auto", "int8", "int4")
    for kv in kinds:
        seen.clear()
        assert replay.make_replay(plain, kv, pytest.fail) is not None
        assert set(seen) == {cache_dtype(kv, plain.dtype)}
    seen.clear()
    warnings = list[str]()
    odd = model(lambda x: torch.ones(*x.shape[:-1], 3), head_dim=80)
    assert replay.make_replay(odd, "int4", warnings.append) is None and not seen
    assert "keys and values in int4 for heads of" in warnings[0]


def test_a_pass_that_fails_is_told_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing(Sums):
        def __call__(self, *_: object, **__: object) -> Tensor:
            raise RuntimeError("no kernel image\nfor this device")

    monkeypatch.setattr(replay.DecodeStep, "make", lambda _: Failing())
    warnings: list[str] = []
    assert replay.make_replay(model(lambda x: torch.ones(*x.shape[:-1], 3)), "auto", warnings.append) is None
    assert warnings[0].endswith("RuntimeError: no kernel image")


def test_a_capture_launches_what_the_first_pass_compiled() -> None:
    """Triton compiles apart for addresses that are multiples of 16, and inside a capture it must compile nothing."""

    class Addresses(Sums):
        seen: list[tuple[bool, bool]] = []

        def __call__(self, tokens: Tensor, lengths: Tensor, *rest: object, **options: object) -> Tensor:
            self.seen.append((tokens.data_ptr() % 16 == 0, lengths.data_ptr() % 16 == 0))
            return super().__call__(tokens, lengths, *rest, **options)  # type: ignore[arg-type]  # passed on

    step = Addresses()
    fast, (cache, rope) = Replay(step, recording), session()
    for start in range(3):
        batch = replace(one(7, start), tokens=torch.tensor([0, 7])[1:])
        assert batch.tokens.data_ptr() % 16
        assert fast(batch, rope, cache) is not None
    assert set(step.seen) == {(True, True)}


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
    warnings: list[str] = []
    plain = model(lambda x: torch.ones(*x.shape[:-1], 8))
    runner = ModelRunner(plain, fast=FastPaths(Replay(Sums(), capture, warnings.append)))
    cache, _ = session()
    found = [runner.run([Chunk([token], start, (0,), 1)], cache)[0, 0].item() for start, token in enumerate([3] * 5)]
    assert found == [301, 1, 1, 1, 1], "from then on by the plain model"
    assert len(warnings) == 1 and warnings[0].endswith(words)


def test_a_shape_that_cannot_be_launched_is_the_plain_models_and_others_go_on() -> None:
    class Narrow(Sums):
        def __call__(self, tokens: Tensor, *rest: object, **options: object) -> Tensor:
            if tokens.shape[1] > 2:
                raise RuntimeError("out of resource: shared memory")
            return super().__call__(tokens, *rest, **options)  # type: ignore[arg-type]  # passed on

    warnings: list[str] = []
    fast, (cache, rope) = Replay(Narrow(), recording, warnings.append), session()
    for _ in range(3):
        assert fast(several([[1, 2, 3]], 0, 3), rope, cache) is None
        assert fast(several([[1, 2, 3, 4]], 0, 4), rope, cache) is None
        assert fast(several([[1, 2]], 0, 2), rope, cache) is not None
    assert len(warnings) == 1 and "shared memory" in warnings[0]


class Wide(Sums):
    """Right, but for passes of 12 tokens, where `wrong`; keeps what it did in what order."""

    def __init__(self, log: list[str], wrong: bool = False) -> None:
        super().__init__()
        self.log, self.wrong = log, wrong

    def takes(self, sequences: int, tokens: int) -> bool:
        return True

    def __call__(self, tokens: Tensor, *rest: object, **options: object) -> Tensor:
        self.log.append(f"fused {tokens.numel()}")
        return super().__call__(tokens, *rest, **options) + self.wrong * 50.0 * (tokens.numel() == 12)  # type: ignore[arg-type]  # passed on


@pytest.mark.parametrize("wrong", [False, True], ids=["right", "wrong"])
def test_the_first_pass_of_many_rows_is_compared_with_the_plain_models(wrong: bool) -> None:
    """Once for each shape, and before, so that the cache holds what the fused pass writes."""
    log: list[str] = []
    warnings: list[str] = []

    def plain(batch: Batch, rope: Rope, cache: KVCache) -> Tensor:
        log.append(f"plain {batch.rows}")
        tokens = batch.tokens.view(len(batch.spans), -1)
        return (tokens * 100 + batch.lengths[:, None]).reshape(-1, 1).expand(-1, 3).float()

    fast, (cache, rope) = Replay(Wide(log, wrong), recording, warnings.append, plain), session()
    for new in (4, 12, 12, 10):
        assert fast.trusts(1, new) is (new == 4 or (new == 12 and not wrong and "plain 12" in log))
        found = fast(several([list(range(new))], 0, new), rope, cache)
        assert (found is None) is (wrong and new == 12)
    first = ["fused 4", "plain 12", "fused 12"]
    assert log == [*first, *([] if wrong else ["fused 12"] * 2), "plain 10", "fused 10"], (
        "a capture runs a pass as well"
    )
    assert len(warnings) == wrong and all("differ by" in warning for warning in warnings)
    assert fast.trusts(1, 10)


def test_graphs_share_one_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the log of a stub of torch's graphs: the first has a pool of its own, which the others are given."""
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

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", graph)
    capture = replay.GraphCapture()
    with pytest.raises(RuntimeError):
        capture(refusing)
    replays = [capture(lambda: torch.ones(1)) for _ in range(3)]
    del replays[0]
    pools = [what for name, what in log if name == "begin"]
    first = next(what for name, what in log if name == "end")
    assert pools == [None, None, first, first]
    assert replays[0]().item() == 1 and log[-1][0] == "replay"


def test_the_check_reaches_into_several_parts_of_the_keys() -> None:
    """Attention to a short cache is one part; and in a model that is not so long, what there is."""
    seen: list[tuple[int, int]] = []

    class Right(Sums):
        def __call__(
            self, tokens: Tensor, lengths: Tensor, tables: tuple[Tensor, Tensor], cache: KVCache, last: bool
        ) -> Tensor:
            seen.append((cache.block_size, int(lengths[0])))
            return torch.ones(*tokens.shape, 3).half()

    for longest in (4096, 64):
        plain = model(lambda x: torch.ones(*x.shape[:-1], 3))
        plain.config = replace(CONFIG, max_context=longest)
        assert replay.difference(plain, Right()) is None
    assert splits(Chip((9, 0), 132), 8, seen[0][0]) >= 4
    assert -(-seen[0][1] // BLOCK_K) > splits(Chip((9, 0), 132), 8, seen[0][0]), "more blocks than parts"
    assert seen[-1] == (64, 64)
