"""Test the loop on the device after a warm-up, and without memory for penalties; as in `test_device_loop`."""

from typing import Any

import pytest
import torch

from mycli.runtime.engine import warm_up
from mycli.runtime.engine.engine import Engine
from mycli.runtime.engine.model_runner import ModelRunner
from mycli.runtime.engine.warm_up import warm_up_passes
from mycli.runtime.errors import Declined
from mycli.runtime.memory.cache_shape import CacheShape
from mycli.runtime.sampling.params import SamplingParams
from tests.support.graphs import recording
from tests.support.triton_interpreter import Interpret, interpret

pytest.importorskip("triton")

from mycli.runtime.engine.passes import device_loop  # noqa: E402  (only where Triton is)
from mycli.runtime.engine.passes.device_loop import DeviceLoop  # noqa: E402  (as above)
from mycli.runtime.engine.passes.graphs import Launches  # noqa: E402  (as above)
from mycli.runtime.kernels.triton.sample import Penalties  # noqa: E402  (as above)
from mycli.runtime.kernels.triton.top_k_top_p import Filters  # noqa: E402  (as above)
from tests.support.looping import (  # noqa: E402  (as above)
    DRAWN,
    PROMPT,
    VOCAB,
    Sequences,
    Step,
    looping,
    outcome,
)

__all__ = ["interpret"]


def warmed() -> tuple[int, list[str]]:
    """Return how many passes the requests after a warm-up with the same settings capture, and what was reported."""
    captures, warnings = 0, list[Declined]()

    def capture(work: Launches) -> Launches:
        nonlocal captures
        captures += 1
        return recording(work)

    looped, plain = Sequences(), Sequences()
    step = Step(looped)
    passes, shape = looping(looped, step, DeviceLoop(step, capture, warnings.append)), CacheShape.contiguous(64)
    engine = Engine(ModelRunner(looped, passes=passes), shape, VOCAB)
    warm_up_passes(engine, DRAWN[-2:])
    captures = 0
    for sampling in DRAWN[-2:]:
        expected = outcome(Engine(ModelRunner(plain), shape, VOCAB), PROMPT, 13, sampling=sampling)
        assert outcome(engine, PROMPT, 13, sampling=sampling) == expected
    return captures, [warning.code for warning in warnings]


def test_a_warm_up_captures_what_requests_with_penalties_need(interpret: Interpret) -> None:
    # The head has more rows than the tokenizer has tokens, as those of Qwen and Gemma.
    assert interpret(warmed) == (0, [])


def compiled_kinds() -> tuple[int, bool]:
    """Return the kinds of sampling of a warm-up, and whether those of later requests are among them."""
    found: list[set[tuple[bool, Filters]]] = [set(), set()]
    looped, sample = Sequences(), device_loop.sample_tokens
    step = Step(looped)
    passes, shape = looping(looped, step, DeviceLoop(step, None)), CacheShape.contiguous(64)
    engine = Engine(ModelRunner(looped, passes=passes), shape, VOCAB)
    for kinds in found:

        def noted(*args: Any, kinds: set[tuple[bool, Filters]] = kinds) -> None:
            kinds.add((args[2], args[5]))
            sample(*args)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(device_loop, "sample_tokens", noted)
            patch.setattr(warm_up, "_COMPILED_IN_PARALLEL", 1)  # the interpreter serves one thread
            if kinds is found[0]:
                warm_up_passes(engine, [SamplingParams()])
                continue
            for sampling in (*DRAWN, SamplingParams()):
                outcome(engine, PROMPT, 6, sampling=sampling)
    return len(found[0]), len(found[1]) == 7 and found[1] <= found[0]


@pytest.mark.slow
def test_a_warm_up_compiles_the_sampling_of_any_request(interpret: Interpret) -> None:
    assert interpret(compiled_kinds) == (16 + 2, True)


def no_memory() -> list[str]:
    """Check that replies equal the host's if there is no memory for penalties; return what was reported."""
    warnings: list[Declined] = []
    looped, plain = Sequences(), Sequences()
    step = Step(looped)
    passes, shape = looping(looped, step, DeviceLoop(step, None, warnings.append)), CacheShape.contiguous(64)
    engines = [Engine(ModelRunner(looped, passes=passes), shape, VOCAB), Engine(ModelRunner(plain), shape, VOCAB)]

    def make(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 42.00 MiB")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Penalties, "make", make)
        ours, theirs = (outcome(engine, PROMPT, 13, sampling=DRAWN[-1]) for engine in engines)
    assert ours == theirs
    return [warning.code for warning in warnings]


def test_without_memory_for_penalties_the_host_samples(interpret: Interpret) -> None:
    assert interpret(no_memory) == ["device-loop-failed"]
