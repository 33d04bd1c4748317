"""Runs the passes that requests will need before the first one: kernels are compiled, and passes captured.

Without it the first request of each number of sequences waits for a compiler, seconds for each kernel. Triton keeps
compiled kernels on disk, so that a later process only loads them.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial

from mycli.runtime.cache.batch import Chunk
from mycli.runtime.device.placement import use_device
from mycli.runtime.device.system import cpu
from mycli.runtime.engine.engine import Engine
from mycli.runtime.engine.model_runner import ModelRunner
from mycli.runtime.engine.passes.base import PassInput
from mycli.runtime.engine.passes.cuda import CudaPass
from mycli.runtime.layers.transformer import HiddenStateHook
from mycli.runtime.memory.graphs import MOST_ROWS, PROMPT_BUCKETS, TOKEN_BUCKETS, decode_shapes
from mycli.runtime.memory.plan import prefill_chunk
from mycli.runtime.sampling.params import SamplingParams
from mycli.runtime.sampling.sampler import DeviceSampling, Sampler

_COMPILED_IN_PARALLEL = 4  # Triton compiles in one thread a kernel, and ptxas in a process of its own
_STEPS = 5  # tokens: a launch of several steps, and one of a single step
_TIMES = 2  # a pass is launched the first time and captured the second


def compiles(runner: ModelRunner) -> bool:
    """Return whether passes of this model are compiled or captured when they first run."""
    if runner.config.bidirectional:  # without a cache there are no passes of requests
        return False
    return runner.device.type == "cuda" or any(isinstance(way, CudaPass) for way in runner.passes.passes)


def count_passes(engine: Engine, settings: int) -> int:
    """Return the number of passes of a warm-up with `settings` kinds of sampling."""
    decodes = len(list(_decodes(engine)))
    return decodes + len(list(_prompts(engine))) + decodes * settings


def warm_up_passes(
    engine: Engine, sampling: Sequence[SamplingParams], report: Callable[[int, int], None] = lambda done, total: None
) -> int:
    """Run decode passes of every padded number of sequences, and prompts of every padded length; return their number.

    sampling: the settings for which tokens are sampled on the device. report: receives the passes done and all. It
    must run before the first request, since it writes to the first cache blocks.
    """
    if engine.has_work:
        raise RuntimeError("a warm-up writes to cache blocks that requests use")
    if not compiles(engine.runner):
        return 0
    decodes, prompts, hook = list(_decodes(engine)), list(_prompts(engine)), _hook(engine)
    settings = [_device_sampling(engine, params) for params in sampling]
    runs: list[Callable[[], object]] = [
        partial(engine.runner.run, work, engine.cache, hook) for work in (*decodes, *prompts)
    ]
    runs += [partial(_tokens, engine, work, row) for work in decodes for row in settings if row is not None]
    _compile(engine, [*decodes, *prompts], any(params.logit_bias for params in sampling))
    for done, run in enumerate(runs):
        report(done, len(runs))
        for _ in range(_TIMES):
            run()
            engine.cache.states.discard_drafts()  # they hold the rows of their pass
    report(len(runs), len(runs))
    return len(runs)


def _decodes(engine: Engine) -> Iterator[list[Chunk]]:
    running = min(engine.scheduler.limits.running, MOST_ROWS)
    for padded, new in decode_shapes(running, drafted=engine.speculator is not None):
        if new <= engine.context:
            yield [replace(_chunk(engine, new, new, slot), drafted=new - 1) for slot in range(min(padded, running))]


def _prompts(engine: Engine) -> Iterator[list[Chunk]]:
    longest = min(prefill_chunk(gpu=True), engine.context)
    if _hook(engine) is not None:
        longest = min(longest, MOST_ROWS)  # longer prompts are the plain pass's
    for tokens in sorted({min(count, longest) for count in (*TOKEN_BUCKETS, *PROMPT_BUCKETS, longest)}):
        yield [_chunk(engine, tokens, 1)]


def _hook(engine: Engine) -> HiddenStateHook | None:
    """Return a hook that ignores hidden states where passes return those that an MTP head reads."""
    read = engine.speculator is not None and engine.speculator.hidden_state_hook(()) is not None
    return (lambda hidden: None) if read else None


def _chunk(engine: Engine, tokens: int, logits: int, slot: int = 0) -> Chunk:
    # Each sequence has tokens and a block of its own: the first pass of many rows is compared with the plain one, which
    # equal rows would make worthless.
    blocks = tuple(range(slot, slot - (-tokens // engine.shape.block_size)))
    ids = [(31 * slot + place) * 7919 % engine.runner.config.vocab_size for place in range(tokens)]
    return Chunk(ids, 0, blocks, logits, slot)


def _device_sampling(engine: Engine, params: SamplingParams) -> DeviceSampling | None:
    # As requests have them: the vocabulary is a constant of captured passes, and the size of their penalties.
    return Sampler(params, engine.vocab_size, engine.runner.device).device_sampling()


def _compile(engine: Engine, works: Sequence[list[Chunk]], biased: bool) -> None:
    """Launch each pass once, and sample once with all filters that a request may have, several in parallel."""
    # The compiler takes most of the time, and launches are in order.
    runner, rope, hook = engine.runner, engine.runner.rope(engine.context), _hook(engine)
    ways = [way for way in runner.passes.passes if isinstance(way, CudaPass)]
    launches: list[Callable[[], None]] = []
    for way in ways:
        launches += [partial(way.launch, PassInput(work, engine.cache, rope, hook)) for work in works]
        if way.loop is not None:
            from mycli.runtime.engine.passes.device_loop import ALL_FILTERS

            alone = PassInput([_chunk(engine, 1, 1)], engine.cache, rope)
            compile_sampling = partial(way.loop.compile_sampling, alone, engine.vocab_size, biased)
            launches += [partial(compile_sampling, filters) for filters in ALL_FILTERS]

    def compile_work(launch: Callable[[], None]) -> None:
        with suppress(Exception):  # the pass reports it when it runs
            launch()

    workers = min(_COMPILED_IN_PARALLEL, cpu().cores)
    with ThreadPoolExecutor(workers, initializer=use_device, initargs=(runner.device,)) as pool:
        list(pool.map(compile_work, launches))


def _tokens(engine: Engine, work: list[Chunk], sampling: DeviceSampling) -> None:
    steps = engine.runner.tokens(work, [sampling] * len(work), engine.cache, _STEPS, [frozenset()] * len(work))
    for _ in steps or ():
        pass
