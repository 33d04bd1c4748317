"""What a GPU is asked first, in the order in which answers matter; each part's result is written as soon as it ends.

    PYTHONPATH=.links python -m tests.gpu.first_call [--minutes 9] [--out FOLDER]
    PYTHONPATH=.links python -m tests.gpu.first_call --rehearse FOLDER    without a GPU, at sizes that measure nothing

Versions and clocks; small products of every packing; the fused pass of two layers of an 8B model, launched and
replayed; many replays, bit by bit, with launches that overlap and without; the GPU's tests, with memory of NaN and as
it comes; the benchmark. Each part is a process with a limit of its own: one that hangs takes no other along.
The rehearsal runs the kernels on the emulator (`tests.ptx.emulator`), which keeps what it compiles in FOLDER.
"""

import argparse
import datetime
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tests.gpu.bench.report import Report

Rows = Iterator[dict[str, Any]]
_ROW = "row: "  # before a line of a child that is a row of its part


@dataclass(frozen=True)
class Asked:
    """Where parts run: on CUDA, or with `rehearse` on the emulator."""

    rehearse: Path | None = None

    def chip(self) -> Any:
        """Of the device; the emulator is set up."""
        import torch

        from mycli.runtime.kernels.triton.linear import chip_of
        from mycli.runtime.kernels.triton.tiles import Chip

        if self.rehearse is None:
            return chip_of(torch.device("cuda", 0))
        from tests.ptx.emulator.device import Device

        torch.set_num_threads(1)
        os.environ["TRITON_CACHE_DIR"] = str(self.rehearse / "triton")
        Device.set_up(self.rehearse, 90)
        return Chip((9, 0), 132, pdl=True)

    def device(self) -> Any:
        """The torch device."""
        import torch

        return torch.device("cpu" if self.rehearse else "cuda")

    def capture(self) -> Any:
        """A graph, or what stands in for one."""
        from mycli.runtime.engine.cuda_graph import GraphCapture

        return (lambda work: work) if self.rehearse else GraphCapture()


def versions(asked: Asked) -> Rows:
    """Of everything that is involved, and the clock."""
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
    """The relative error of each packing, at few rows and at more."""
    from mycli.runtime.kernels.triton.linear import small_product
    from mycli.runtime.quantization.scheme import BITS, GROUP_SIZES, Packing

    chip = asked.chip()
    packings = [Packing(bits, group) for bits in BITS for group in (*GROUP_SIZES, None)]
    for packing in packings[:1] if asked.rehearse else packings:
        errors = {f"{rows} rows": small_product(asked.device(), packing, chip, rows) for rows in (1, 12)}
        yield {"packing": packing.name, **errors, "ok": all(error < 5e-3 for error in errors.values())}


def _layers(asked: Asked, chip: Any) -> Any:
    """Two layers of the 8B model with random weights, the same every time."""
    import torch

    from mycli.runtime.kernels.triton.linear import TritonMatmul
    from mycli.runtime.layers.linear import Linear
    from mycli.runtime.layers.norm import RMSNorm
    from mycli.runtime.layers.transformer import Transformer
    from tests.gpu.bench import weights
    from tests.gpu.bench.shapes import INT4, LLAMA_8B

    config = replace(LLAMA_8B, layers=2, vocab_size=8192)
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
    """The fused pass against the plain one, launched and replayed, for both kinds of cache."""
    from mycli.runtime.engine.cuda_graph import difference
    from mycli.runtime.engine.decode_step import DecodeStep

    model = _layers(asked, asked.chip())
    step = DecodeStep.make(model)
    for kv in ("auto",) if asked.rehearse else ("auto", "int8"):
        trouble = step if isinstance(step, str) else difference(model, step, kv, asked.capture())  # type: ignore[arg-type]  # a Kv
        yield {"cache": kv, "trouble": trouble or "", "ok": trouble is None}


def soak(asked: Asked) -> Rows:
    """Replays that give other bits than the first, with launches that overlap and without; and whether both agree."""
    import torch

    from mycli.runtime.cache.kv_cache import KVCache
    from mycli.runtime.engine.decode_step import DecodeStep
    from mycli.runtime.layers.rope import Rope

    chip, firsts = asked.chip(), []
    context, count = (64, 3) if asked.rehearse else (1024, 1000)
    for pdl in (True, False) if chip.pdl else (False,):
        model = _layers(asked, replace(chip, pdl=pdl))
        step = DecodeStep.make(model)
        assert isinstance(step, DecodeStep), step
        cache = KVCache(model.config, 1, context, asked.device(), torch.bfloat16)
        tables = Rope(model.config, context, asked.device(), torch.bfloat16).fixed(context)
        assert tables is not None
        tokens = torch.tensor([[7]], device=asked.device())
        lengths = torch.full((1,), context // 2, dtype=torch.int32, device=asked.device())
        with torch.inference_mode():

            def work(step: Any = step, given: tuple[Any, ...] = (tokens, lengths, tables, cache)) -> Any:
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


CHILDREN: Mapping[str, tuple[int, Callable[[Asked], Rows]]] = {
    "versions": (40, versions),
    "small products": (90, products),
    "fused pass": (90, fused),
    "soak": (60, soak),
}


def commands(asked: Asked, out: Path) -> Iterator[tuple[str, int, list[str], dict[str, str]]]:
    """Every part: name, seconds at most, command, and what is set for it."""
    python, rehearsed = sys.executable, ["--rehearse", str(asked.rehearse)] if asked.rehearse else []
    slower = 10 if asked.rehearse else 1  # the emulator compiles each kernel once more, and is none too fast
    for name, (seconds, _) in CHILDREN.items():
        yield name, slower * seconds, [python, "-m", "tests.gpu.first_call", "--part", name, *rehearsed], {}
    workers = ["-n", "2" if asked.rehearse else "12"] if find_spec("xdist") else []
    tests = [python, "-m", "pytest", "-q", "-m", "gpu", "--maxfail", "20", *workers, "tests/gpu"]
    yield "tests, memory of NaN", slower * 120, tests, {}
    yield "tests, memory as it comes", slower * 80, tests, {"MYCLI_TEST_POISON": "0"}
    tiny = ["--tiny", "--device", "cpu"] if asked.rehearse else []
    yield "benchmark", slower * 270, [python, "-m", "tests.gpu.bench", "--minutes", "4", "--out", str(out), *tiny], {}


def bounded(command: Sequence[str], seconds: float, more: Mapping[str, str]) -> tuple[int | None, str]:
    """The exit status of a command, None where it was ended after `seconds` with all that it started; its output."""
    child = subprocess.Popen(
        command,
        env={**os.environ, **more},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        said, _ = child.communicate(timeout=seconds)
        return child.returncode, said
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        return None, child.communicate()[0]


def ask(report: Report, parts: Iterator[tuple[str, int, list[str], dict[str, str]]], seconds: float) -> bool:
    """Runs the parts one after the other; whether all went well. What no longer fits is dropped, from the end."""
    end, good = time.monotonic() + seconds, True
    for name, most, command, more in parts:
        left = end - time.monotonic()
        if left < 5:
            report.note(name, "", "dropped", "no time is left")
            report.write()
            continue
        began = time.monotonic()
        status, said = bounded(command, min(most, left), more)
        lines = said.splitlines()
        rows = [json.loads(line.removeprefix(_ROW)) for line in lines if line.startswith(_ROW)]
        took = time.monotonic() - began
        report.rows[name] = rows or [{"exit": status, "seconds": took, "last line": lines[-1][:200] if lines else ""}]
        wrong = [row for row in rows if not row.get("ok", True)]
        if status != 0 or wrong:
            good = False
            text = "ended after its time" if status is None else "\n".join(lines[-30:])
            report.note(name, "", "error", text if status != 0 else f"{len(wrong)} rows are wrong")
        report.write()
        print(f"{name}: {'well' if status == 0 and not wrong else 'see the report'}, {took:.0f} s", flush=True)
    return good


def _main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=9)
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT") or "docs/results"))
    parser.add_argument("--rehearse", type=Path, help="no GPU: run the kernels on the emulator")
    parser.add_argument("--part", choices=CHILDREN, help="run one part in this process and print its rows")
    given = parser.parse_args()
    asked = Asked(given.rehearse)
    if given.part:
        for row in CHILDREN[given.part][1](asked):
            print(_ROW + json.dumps(row), flush=True)
        return 0
    facts = {"device": "rehearsal" if given.rehearse else "first call", "date": datetime.date.today().isoformat()}
    report = Report(facts, given.out / f"first-call{'-rehearsal' * bool(given.rehearse)}")
    good = ask(report, commands(asked, given.out), given.minutes * 60)
    print(f"written: {report.target}.json and .md")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(_main())
