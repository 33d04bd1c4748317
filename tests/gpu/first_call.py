"""The first checks on a GPU, by decreasing importance.

PYTHONPATH=.links python -m tests.gpu.first_call [--minutes 9] [--out FOLDER]
PYTHONPATH=.links python -m tests.gpu.first_call --rehearse FOLDER    without a GPU, at sizes that measure nothing

Runs, in this order: versions and clocks; small products of every packing; the fused pass of two layers of an 8B model,
launched and replayed, for few rows and many; many replays compared bit by bit, with and without overlapping launches;
commands of users; the GPU tests, with NaN-filled and with uninitialized memory; the benchmark. `call` runs the parts
and writes their results.
"""

import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mycli.runtime.models.config import KvDtype
from tests.gpu.call import SLOWER, Asked, Part, Rows, main


def versions(asked: Asked) -> Rows:
    """Yield the versions of all software and the clock."""
    import torch
    import triton

    found: dict[str, Any] = {"torch": torch.__version__, "triton": triton.__version__, "cuda": str(torch.version.cuda)}
    if asked.rehearse is None:
        from tests.gpu.bench.timing import Context

        properties = torch.cuda.get_device_properties(0)
        found |= {"device": properties.name, "capability": f"{properties.major}.{properties.minor}"}
        found |= {"GiB": properties.total_memory / 2**30, **Context(asked.device()).clock()}
    yield found


def products(asked: Asked) -> Rows:
    """Yield the relative error of each packing, at few rows and at more."""
    from mycli.runtime.kernels.triton.product.kernel import small_product
    from mycli.runtime.quantization.scheme import BITS, GROUP_SIZES, Packing

    chip = asked.chip()
    packings = [Packing(bits, group) for bits in BITS for group in (*GROUP_SIZES, None)]
    for packing in [Packing(4, 128)] if asked.rehearse else packings:
        errors = {f"{rows} rows": small_product(asked.device(), packing, chip, rows) for rows in (1, 12)}
        yield {"packing": packing.name, **errors, "ok": all(error < 5e-3 for error in errors.values())}


def layers(asked: Asked, chip: Any, count: int = 2) -> Any:
    """Return layers of the 8B model with the same random weights every time."""
    import torch

    from mycli.runtime.kernels.triton.product.matmul import TritonMatmul
    from mycli.runtime.layers.linear import Linear
    from mycli.runtime.layers.norm import RMSNorm
    from mycli.runtime.layers.transformer import Transformer
    from tests.gpu.bench import weights
    from tests.gpu.bench.shapes import INT4, LLAMA_8B

    config = replace(LLAMA_8B, layers=count, vocab_size=8192)
    if asked.rehearse:
        sizes = {"hidden_size": 128, "heads": 2, "kv_heads": 1, "head_dim": 64, "intermediate_size": 128}
        config = replace(config, layers=1, vocab_size=64, max_context=64, **sizes)
    device, made = asked.device(), Transformer(config)
    torch.manual_seed(0)
    made.embedding = weights.dense(config.vocab_size, config.hidden_size, device)
    for module in made.modules():
        if isinstance(module, RMSNorm):
            module.weight = torch.ones(module.weight.shape, dtype=torch.bfloat16, device=device)
        elif isinstance(module, Linear):
            packed = weights.packed(module.out_features, module.in_features, INT4, device)
            module.replace(TritonMatmul(packed, chip))
    return made


def fused(asked: Asked) -> Rows:
    """Compare the fused pass, launched and replayed, with the plain one, for each kind of cache."""
    from mycli.runtime.engine.passes.fused import FusedStep
    from mycli.runtime.engine.passes.gate import difference
    from mycli.runtime.errors import Declined

    model = layers(asked, asked.chip())
    step, counts = FusedStep.compile(model), (1, 12) if asked.rehearse else (1, 4, 8, 12, 24, 48, 64)
    kinds: tuple[KvDtype, ...] = ("auto",) if asked.rehearse else ("auto", "int8", "int4")
    for kv in kinds:
        for count in counts if kv != "int4" else counts[:3]:  # each difference is compiled again, which takes time
            found = step if isinstance(step, Declined) else difference(model, step, kv, asked.capture(), (count,))
            yield {"cache": kv, "tokens": count, "trouble": str(found or ""), "ok": found is None}


def soak(asked: Asked) -> Rows:
    """Count replays whose bits differ from the first, with and without overlapping launches; compare the two modes."""
    import torch

    from mycli.runtime.cache.batch import Chunk
    from mycli.runtime.cache.kv_cache import KVCache
    from mycli.runtime.engine.passes.fused import FusedStep
    from mycli.runtime.engine.passes.graphs import StepInput
    from mycli.runtime.layers.rope import Rope

    chip, firsts = asked.chip(), []
    context, count = (64, 3) if asked.rehearse else (1024, 1000)
    for pdl in (True, False) if chip.pdl else (False,):
        model = layers(asked, replace(chip, pdl=pdl))
        step = FusedStep.compile(model)
        assert isinstance(step, FusedStep), step
        cache = KVCache(model.config, 1, context, asked.device(), torch.bfloat16)
        rope = Rope(model.config, context, asked.device(), torch.bfloat16)
        inputs = StepInput.zeros(1, 1, 1, asked.device())
        inputs.fill([Chunk([7], context // 2 - 1, (0,), 1)])
        with torch.inference_mode():

            def work(step: Any = step, given: tuple[Any, ...] = (inputs, rope, cache)) -> Any:
                return step(*given, last=True)

            work()
            replay = asked.capture()(work)
            first = replay().clone()
            other = sum(not torch.equal(replay(), first) for _ in range(count))
        firsts.append(first)
        same = all(torch.equal(one, first) for one in firsts)
        yield {
            "overlap": pdl,
            "replays": count,
            "other bits": other,
            "as the one before": same,
            "ok": same and not other,
        }


def commands(asked: Asked) -> Rows:
    """Yield what commands of users end with; a rehearsal runs one."""
    from tests.gpu.commands import LINES, commands

    yield from commands([["run pico Once -n 8"]] if asked.rehearse else LINES)


def parts(asked: Asked, out: Path) -> Sequence[Part]:
    python, rehearsed = sys.executable, asked.rehearse is not None
    slower = SLOWER if rehearsed else 1
    workers = ["-n", "2" if rehearsed else "8"] if find_spec("xdist") else []
    tests = [python, "-m", "pytest", "-q", "-m", "gpu", "--tb", "short", "--maxfail", "60", *workers, "tests/gpu"]
    tiny = ["--tiny", "--device", "cpu"] if rehearsed else []
    bench = [python, "-m", "tests.gpu.bench", "--minutes", "4", "--out", str(out), *tiny]
    skipped = "every test is skipped"
    beside = partial(Part, timed=rehearsed)  # the emulator uses all processors
    return [
        beside("versions", slower * 40, versions, "the clock, and what a device says of itself"),
        beside("small products", slower * 150, products, "all packings but one"),
        beside("fused pass", slower * 150, fused, "sizes of an 8B, caches of codes, graphs: passes are launched again"),
        beside("soak", slower * 150, soak, "launches that overlap, graphs, more than a few passes"),
        beside("commands", slower * 180, commands, "all commands but one"),
        beside("tests, memory of NaN", slower * 180, tests, skipped),
        Part("tests, memory as it comes", slower * 80, tests, skipped, {"MYCLI_TEST_POISON": "0"}),
        Part("benchmark", slower * 270, bench, "kernels of a GPU, sizes that measure something"),
    ]


if __name__ == "__main__":
    sys.exit(main(str(__doc__), "tests.gpu.first_call", parts, 9))
