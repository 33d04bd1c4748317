"""Test Triton kernels on CUDA: products against fp64, the fused pass against the plain model, graphs against launches.

Inputs are random and memory is filled with NaN (see conftest). `make test-gpu` runs these tests.
"""

from itertools import islice

import pytest
import torch
from torch import Tensor

from mycli.quant.rounding.columns import solve_block
from mycli.runtime.cache.batch import Chunk
from mycli.runtime.cache.kv_cache import KVCache
from mycli.runtime.engine.engine import Engine
from mycli.runtime.engine.model_runner import ModelRunner
from mycli.runtime.engine.passes import Passes
from mycli.runtime.engine.passes.base import PassInput
from mycli.runtime.engine.passes.gate import difference
from mycli.runtime.engine.passes.graphs import GraphCapture, Step
from mycli.runtime.engine.passes.plain import PlainPass
from mycli.runtime.engine.replies.completion import stream
from mycli.runtime.engine.sequence import Request
from mycli.runtime.layers.rope import Rope
from mycli.runtime.memory.cache_shape import CacheShape
from mycli.runtime.quantization.scheme import BITS, GROUP_SIZES, Packing
from mycli.runtime.sampling.params import SamplingParams
from tests.support.columns import SHAPES, agree, problem
from tests.support.decode_models import CAPACITY, CASES, MIXED, TABLES, WIDE, Case, models
from tests.support.graphs import UncomparedPass

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("rows", [1, 2, 5, 8, 9, 16, 33, 64, 65, 300])
@pytest.mark.parametrize("bits", BITS)
def test_packed_products(bits: int, rows: int) -> None:
    from mycli.runtime.kernels.triton.product.kernel import small_product
    from mycli.runtime.kernels.triton.product.matmul import chip_of

    device = torch.device("cuda", 0)
    for group in (*GROUP_SIZES, None):
        assert small_product(device, Packing(bits, group), chip_of(device), rows) < 5e-3, group


@pytest.mark.parametrize("case", [*CASES, *WIDE, *TABLES, *MIXED], ids=str)
def test_the_fused_pass_is_the_plain_models(case: Case) -> None:
    assert difference(models(case, "cuda")[1], fused(case)) is None


def fused(case: Case) -> Step:
    from mycli.runtime.engine.passes.fused import FusedStep
    from mycli.runtime.kernels.triton.product.matmul import chip_of

    step = FusedStep.compile(models(case, "cuda", chip_of(torch.device("cuda", 0)))[0])
    assert isinstance(step, FusedStep)
    return step


@pytest.mark.parametrize("case", [*CASES, *WIDE, *TABLES, *MIXED], ids=str)
def test_a_replayed_pass_is_the_launched_one(case: Case) -> None:
    """A graph replay gives the same bits as launches, with tokens and lengths that change."""
    _, plain = models(case, "cuda")
    step = fused(case)
    rope = Rope(plain.config, CAPACITY, plain.device, torch.float16)
    kind = torch.int8 if case.int8 else torch.float16
    found: list[list[Tensor]] = []
    for capture in (GraphCapture(), None):
        cache = KVCache(plain.config, case.sequences, CAPACITY, plain.device, kind)
        way, logits = UncomparedPass(step, PlainPass(plain), capture), []
        generator = torch.Generator().manual_seed(1)  # the same twice
        for start in list(range(0, CAPACITY - case.new + 1, case.new))[:8]:
            tokens = torch.randint(0, plain.config.vocab_size, (case.sequences, case.new), generator=generator)
            chunks = [Chunk(row, start, (slot,), case.new) for slot, row in enumerate(tokens.tolist())]
            work = PassInput(chunks, cache, rope)
            assert way.takes(work) is None
            out = way.logits(work)
            assert out.isfinite().all()
            logits.append(out.clone())
        found.append(logits)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*found, strict=True))


@pytest.mark.parametrize("move", [False, True], ids=["gptq", "descent"])
@pytest.mark.parametrize("half", [128, 8, 4, 2])
def test_columns_of_a_block(half: int, move: bool) -> None:
    for count, rows in (*SHAPES, (128, 4097)):
        residual, matrix, scales, codes, _ = problem(count, rows, half, move)
        given = (residual.cuda(), matrix.cuda(), scales.cuda(), None if codes is None else codes.cuda())
        levels, shifts = solve_block(*given, half)
        agree((levels.cpu(), shifts.cpu()), solve_block(residual, matrix, scales, codes, half))


@pytest.mark.parametrize("case", [case for case in CASES if case.new == 1], ids=str)
@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "drawn"])
def test_several_tokens_a_launch_are_those_of_one(case: Case, temperature: float) -> None:
    """Several tokens per launch equal single steps bit by bit: captured, launched, stopped early, host loop."""
    from mycli.runtime.engine.passes.device_loop import DeviceLoop

    step, found = fused(case), []
    for capture in (GraphCapture(), None, "host"):
        model = models(case, "cuda")[1]
        way = UncomparedPass(step, PlainPass(model), None)
        way.loop = None if isinstance(capture, str) else DeviceLoop(step, capture)
        runner = ModelRunner(model, passes=Passes((way, PlainPass(model)), {}))
        engine = Engine(runner, CacheShape.contiguous(CAPACITY, case.sequences), model.config.vocab_size - 2)
        replies = []
        for limit, taken in ((20, 20), (40, 7), (30, 30), (CAPACITY - 2, 99)):
            request = Request((1, 5, 9), SamplingParams(temperature, seed=3), limit)
            replies.append(list(islice(stream(engine, request), taken)))
        found.append(replies)
    assert found[0] == found[1]
    assert temperature or found[0] == found[2]
