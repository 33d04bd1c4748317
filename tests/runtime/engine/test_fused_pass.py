"""A fused pass is compared with the model's own before it is used, and told where it differs."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from mycli.runtime.cache.kv_cache import KVCache, cache_dtype
from mycli.runtime.engine import cuda_graph as replay
from mycli.runtime.engine.cuda_graph import Replay
from mycli.runtime.kernels.triton.attention import BLOCK_K, splits
from mycli.runtime.kernels.triton.product.tiles import Chip
from mycli.runtime.layers.batch import Batch
from mycli.runtime.layers.rope import Rope
from mycli.runtime.models.config import KvDtype
from mycli.runtime.models.experts import MoeLayers
from mycli.runtime.models.experts_spec import RoutingSpec
from tests.support.fused_pass import Sums, model, session, several
from tests.support.graphs import recording
from tests.support.prefix_model import CONFIG


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


def test_experts_with_about_equal_scores_may_be_others() -> None:
    """With experts logits differ by more than rounding alone; not without bounds."""
    plain = model(lambda x: torch.ones(*x.shape[:-1], 3))
    plain.config = replace(plain.config, build_layer=MoeLayers(3, RoutingSpec(2, normalize=True), 2))

    class Near(Sums):
        def __call__(self, tokens: Tensor, *_: object, **__: object) -> Tensor:
            return torch.full((*tokens.shape, 3), self.factor)

        factor = 1.2

    step = Near()
    assert replay.difference(plain, step) is None
    step.factor = 0.5
    assert "50.0%" in str(replay.difference(plain, step))
    assert replay.tolerance(plain.config) > 5 * replay.tolerance(CONFIG)


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
    kinds: tuple[KvDtype, ...] = ("auto", "int8", "int4")
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
