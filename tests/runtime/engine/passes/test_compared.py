"""Test that a fused pass is compared with the plain model before use and that a difference is reported."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from mycli.runtime.cache.kv_cache import KVCache, cache_dtype
from mycli.runtime.engine.passes.base import PassInput
from mycli.runtime.engine.passes.compile_cuda import compile_step
from mycli.runtime.engine.passes.cuda import CudaPass
from mycli.runtime.engine.passes.gate import difference, tolerance
from mycli.runtime.engine.passes.graphs import Capture, Launches, StepInput
from mycli.runtime.engine.passes.plain import PlainPass
from mycli.runtime.errors import Declined
from mycli.runtime.kernels.triton.attention import BLOCK_K, splits
from mycli.runtime.kernels.triton.product.tiles import Chip
from mycli.runtime.layers.rope import Rope
from mycli.runtime.models.config import KvDtype
from mycli.runtime.models.experts import MoeLayers
from mycli.runtime.models.experts_spec import RoutingSpec
from tests.support.fused_pass import Sums, fused_pass, model, ones, run, session, several
from tests.support.graphs import recording
from tests.support.prefix_model import CONFIG


def test_a_pass_that_differs_is_not_used() -> None:
    plain = model(lambda x: torch.ones(*x.shape[:-1], 3))

    class Right(Sums):
        def __call__(self, *arguments: object, **options: object) -> Tensor:
            inputs = arguments[0]
            assert isinstance(inputs, StepInput)
            return ones(inputs) * self.factor

        factor = 1.0

    step = Right()
    assert difference(plain, step) is None
    step.factor = 1.1
    assert "10.0%" in str(difference(plain, step))
    step.factor = float("nan")
    assert difference(plain, step) is not None
    warnings: list[Declined] = []
    declined = compile_step(plain, step, "auto", recording, warnings.append)
    assert isinstance(declined, Declined) and declined.code == "logits-differ" and warnings == [declined]


def test_experts_with_about_equal_scores_may_be_others() -> None:
    """The logits of a MoE model may differ by more than rounding, within bounds."""
    plain = model(lambda x: torch.ones(*x.shape[:-1], 3))
    plain.config = replace(plain.config, build_layer=MoeLayers(3, RoutingSpec(2, normalize=True), 2))

    class Near(Sums):
        def __call__(self, inputs: StepInput, *_: object, **__: object) -> Tensor:
            return ones(inputs).float() * self.factor

        factor = 1.2

    step = Near()
    assert difference(plain, step) is None
    step.factor = 0.5
    assert "50.0%" in str(difference(plain, step))
    assert tolerance(plain) > 5 * tolerance(model(lambda x: torch.ones(*x.shape[:-1], 3)))


def test_a_pass_that_replays_otherwise_than_it_launches_is_not_used() -> None:
    """The pass is also rejected if it cannot be captured, for example because the driver is too old."""
    plain, warnings = model(lambda x: torch.ones(*x.shape[:-1], 3)), list[Declined]()

    class Right(Sums):
        def __call__(self, inputs: StepInput, *_: object, **__: object) -> Tensor:
            return ones(inputs)

    def refused(work: Launches) -> Launches:
        raise RuntimeError("operation not permitted when stream is capturing")

    captures: dict[str, Capture] = {
        "replay-differs": lambda work: lambda: work() * 1.001,
        "kernels-failed": refused,
    }
    for words, capture in captures.items():
        declined = compile_step(plain, Right(), "auto", capture, warnings.append)
        assert isinstance(declined, Declined) and declined.code == words and warnings[-1] == declined
    assert isinstance(compile_step(plain, Right(), "auto", lambda work: work, warnings.append), CudaPass)
    assert len(warnings) == 2


def test_a_pass_is_compared_on_the_kind_of_cache_that_it_will_have() -> None:
    plain, seen = model(lambda x: torch.ones(*x.shape[:-1], 3), head_dim=64), list[torch.dtype]()

    class Right(Sums):
        def __call__(self, inputs: StepInput, rope: Rope, cache: KVCache, last: bool) -> Tensor:
            seen.append(cache.all(0)[0].data.dtype)
            return ones(inputs)

    kinds: tuple[KvDtype, ...] = ("auto", "int8", "int4")
    for kv in kinds:
        seen.clear()
        assert isinstance(compile_step(plain, Right(), kv, lambda work: work, pytest.fail), CudaPass)
        assert set(seen) == {cache_dtype(kv, plain.dtype)}
    seen.clear()
    odd = model(lambda x: torch.ones(*x.shape[:-1], 3), head_dim=80)
    declined = compile_step(odd, Right(), "int4", lambda work: work, lambda declined: None)
    assert declined == Declined("int4-head", {"head_dim": 80}) and not seen


def test_a_pass_that_fails_is_told_in_a_line() -> None:
    class Failing(Sums):
        def __call__(self, *_: object, **__: object) -> Tensor:
            raise RuntimeError("no kernel image\nfor this device")

    plain = model(lambda x: torch.ones(*x.shape[:-1], 3))
    declined = compile_step(plain, Failing(), "auto", recording, lambda declined: None)
    assert declined == Declined("kernels-failed", {"error": "RuntimeError: no kernel image"})


class Wide(Sums):
    """Returns correct logits except for passes of 16 rows if `wrong`; records its calls in order."""

    def __init__(self, log: list[str], wrong: bool = False) -> None:
        super().__init__()
        self.log, self.wrong = log, wrong

    def takes(self, sequences: int, tokens: int) -> bool:
        return True

    def __call__(self, inputs: StepInput, *rest: object, **options: object) -> Tensor:
        rows = inputs.tokens.numel()
        self.log.append(f"fused {rows}")
        return super().__call__(inputs, *rest, **options) + self.wrong * 50.0 * (rows == 16)  # type: ignore[arg-type]  # passed on


@pytest.mark.parametrize("wrong", [False, True], ids=["right", "wrong"])
def test_the_first_pass_of_many_rows_is_compared_with_the_plain_models(wrong: bool) -> None:
    """The comparison runs once per shape and first, so that the cache holds the fused pass's values."""
    log: list[str] = []
    warnings: list[Declined] = []

    class Logged(PlainPass):
        def __init__(self) -> None: ...

        def logits(self, work: PassInput) -> Tensor:
            log.append(f"plain {work.rows}")
            tokens = torch.tensor([list(chunk.tokens) for chunk in work.chunks])
            padded = torch.tensor([[chunk.start + max(16, chunk.count)] for chunk in work.chunks])
            return (tokens * 100 + padded).reshape(-1, 1).expand(-1, 3).float()

    fast, (cache, rope) = fused_pass(Wide(log, wrong), recording, warnings, Logged()), session()
    for new in (4, 12, 11, 20):
        shape = (1, new, False) if new == 4 else (1, 16 if new < 16 else 32, True)
        assert fast.trusts(shape) is (new == 4 or (new == 11 and not wrong))
        found = run(fast, several([list(range(new))], 0, new), rope, cache)
        assert (found is None) is (wrong and new in (12, 11))
    first = ["fused 4", "plain 12", "fused 16"]
    assert log == [*first, *([] if wrong else ["fused 16"]), "plain 20", "fused 32"]
    assert len(warnings) == wrong and all(warning.code == "logits-differ" for warning in warnings)
    assert fast.trusts((1, 32, True))


def test_the_check_reaches_into_several_parts_of_the_keys() -> None:
    """The comparison reads keys of several attention splits, or all keys of a short model.

    It covers one block, and several in shuffled order next to a padding sequence.
    """
    seen: list[tuple[int, int]] = []

    class Right(Sums):
        def __call__(self, inputs: StepInput, rope: Rope, cache: KVCache, last: bool) -> Tensor:
            sequences, width = inputs.block_table.shape
            assert sequences == (1 if width == 1 else 2) and not inputs.lengths[1:].any()
            assert inputs.block_table[0].tolist() == list(range(width))[::-1]
            seen.append((cache.block_size * width, int(inputs.lengths[0])))
            return ones(inputs)

    for longest in (4096, 64):
        plain = model(lambda x: torch.ones(*x.shape[:-1], 3))
        plain.config = replace(CONFIG, max_context=longest)
        assert difference(plain, Right()) is None
    assert splits(Chip((9, 0), 132), 8, seen[0][0]) >= 4
    assert -(-seen[0][1] // BLOCK_K) > splits(Chip((9, 0), 132), 8, seen[0][0]), "more blocks than parts"
    assert seen[-1] == (64, 64)
