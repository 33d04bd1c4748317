"""Run every kernel of `tests.ptx.builds` at a small shape under the race detector of the emulator.

PYTHONPATH=.links python -m tests.ptx.race_runs FOLDER [90]

Prints the table of docs/results/races.md; FOLDER caches what is compiled. The exit code is 1 if there is a race, or a
kernel that no run launches.
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from mycli.runtime.kernels.recurrent import DeltaSizes, ScanSizes
from mycli.runtime.quantization.scheme import Packing
from tests.ptx.builds import builds
from tests.ptx.emulated import device, emulate
from tests.ptx.test_emulated import compare
from tests.runtime.kernels import test_triton_attention as attention
from tests.runtime.kernels import test_triton_dense as dense
from tests.runtime.kernels import test_triton_epilogues as epilogues
from tests.runtime.kernels import test_triton_experts as experts
from tests.runtime.kernels import test_triton_latent as latent
from tests.runtime.kernels import test_triton_linear as linear
from tests.runtime.kernels import test_triton_mixture as mixture
from tests.runtime.kernels import test_triton_prompt_attention as prompts
from tests.runtime.kernels import test_triton_recurrent as recurrent
from tests.runtime.kernels import test_triton_sample as sample
from tests.runtime.kernels import test_triton_top_k_top_p as top_k_top_p
from tests.support.decode_models import CASES, FAMILIES

Run = tuple[Callable[..., object], tuple[object, ...]]
INT4 = Packing(4, 128)

# Each with its arguments: functions of the kernel tests, and whole fused passes.
RUNS: dict[str, Run] = {
    "product, 1 row": (linear.product, (linear.Case(INT4, processors=4, n=140, k=1024),)),
    "product, 16 rows": (linear.product, (linear.Case(INT4, rows=16, processors=4, n=140, k=1024),)),
    "product, 64 rows": (linear.product, (linear.Case(INT4, rows=64, processors=4, n=140, k=512),)),
    "product, rounded": (linear.called, (linear.Case(INT4, rows=2, processors=4, k=1024),)),
    "dequantized": (linear.called, (linear.Case(INT4, rows=300),)),
    "product with residual and norm": (
        epilogues.summed,
        (epilogues.Sum(1024, 256, 3, torch.bfloat16, INT4, Packing(4, 32)),),
    ),
    "embedding": (epilogues.embedded, (3,)),
    "product with SiLU": (epilogues.silu, (256, 3, torch.bfloat16, INT4, INT4)),
    "product with rotation": (epilogues.rotation, (epilogues.Rotation(4, 2, 64, (20, 7), tokens=2),)),
    "product with rotation, int8": (epilogues.rotation, (epilogues.Rotation(4, 2, 64, (20, 7), int8=True),)),
    "product with rotation, int4": (epilogues.rotation, (epilogues.Rotation(4, 2, 64, (20, 7), int4=True),)),
    "attention": (attention.attention, (attention.Case((200, 70, 0), block=64),)),
    "attention, 8 tokens": (attention.attention, (attention.Case((200, 70), tokens=8, block=64),)),
    "attention, int8": (attention.attention, (attention.Case((200, 70), int8=True, head_dim=128, block=64),)),
    "attention, int4": (attention.attention, (attention.Case((200, 70), int4=True, block=64),)),
    "prompts": (prompts.attend, (prompts.Prompts((70, 20), (150, 20)),)),
    "prompts, int8": (prompts.attend, (prompts.Prompts((70, 20), (150, 20), kind=torch.int8),)),
    "prompts, int4": (prompts.attend, (prompts.Prompts((70, 20), (150, 20), kind=torch.uint8),)),
    "experts": (experts.products, (experts.Routes(INT4, tokens=5, n=40, k=256, processors=8),)),
    "routes": (experts.routed, (7, 12, *experts.CHOICES[next(iter(experts.CHOICES))])),
    "weighted sums": (experts.summed, (3, 8, 48, torch.bfloat16)),
    "scores of experts": (mixture.scored, (mixture.CASES[4],)),
    "SiLU of experts": (mixture.activated, (mixture.CASES[4],)),
    "sums of experts": (mixture.combined, (mixture.CASES[4],)),
    "dense products": (dense.computed, (dense.CASES[0],)),
    "dense products of 12 rows": (dense.computed, (dense.CASES[2],)),
    "latent attention": (latent.attended, (16, 32, 16, None, 1, (), 1)),
    "latent attention, keys in several parts": (latent.attended, (20, 40, 8, None, 3, (3, 1, 2), 400)),
    "latent attention, int8": (latent.attended, (4, 24, 24, torch.int8, 2, (), 400)),
    "convolutions": (recurrent.convolved, (4, 48, True, True, torch.bfloat16, 1)),
    "delta rules": (recurrent.ruled, (DeltaSizes(4, 2, 16, 32), torch.bfloat16, 1)),
    "delta rules by channel": (recurrent.ruled, (DeltaSizes(3, 3, 16, 16, by_channel=True), torch.bfloat16, 1)),
    "scans": (recurrent.scanned, (ScanSizes(4, 2, 16, 16, (0.0, float("inf"))), torch.bfloat16, 1)),
    "scans by channel": (
        recurrent.scanned,
        (ScanSizes(1, 1, 48, 16, (0.0, float("inf")), by_channel=True), torch.bfloat16, 1),
    ),
    "likeliest": (sample.most_likely, (sample.Case(2, 3000),)),
    "draws": (sample.draws, (sample.Case(2, 3000), "penalized")),
    "counts of tokens": (sample.counted, ()),
    "top-k and top-p": (top_k_top_p.kept, (top_k_top_p.CASES[0],)),
    "fused pass": (compare, (CASES[0], None)),
    "fused pass, keys in several parts": (compare, (CASES[5], (1088, 700))),
    "fused pass, norms over all heads": (compare, (FAMILIES[6], None)),
    "fused pass, norms after parts": (compare, (FAMILIES[0], None)),
    "fused pass, experts": (compare, (FAMILIES[10], None)),
}


def watch(name: str) -> tuple[dict[str, int], str]:
    """Return the number of launches of each kernel, and the detector's message, empty if there is no race."""
    played, (function, arguments) = device(), RUNS[name]
    played.launches.clear()
    played.runner.races = True
    torch.manual_seed(0)
    try:
        function(*arguments)
    except RuntimeError as error:
        return dict(Counter(launch.kernel for launch in played.launches)), str(error)
    finally:
        played.runner.races = False
    return dict(Counter(launch.kernel for launch in played.launches)), ""


def all_kernels(capability: int) -> set[str]:
    return {build.kernel.__name__ for build in builds(capability)}


def table(folder: Path, capability: int) -> Iterator[str]:
    """Yield the lines of the page; the last two name the kernels that no run launches, and count the races."""
    yield "| run | sm | kernels | launches | races |"
    yield "|---|---:|---|---:|---|"
    missing, races, total = all_kernels(capability), 0, 0
    for name in RUNS:
        launches, message = emulate(folder, capability, watch, name)
        missing -= set(launches)
        races, total = races + bool(message), total + sum(launches.values())
        kernels = ", ".join(f"`{kernel}`" for kernel in sorted(launches))
        yield f"| {name} | {capability} | {kernels} | {sum(launches.values())} | {message or 'none'} |"
    yield f"\nKernels that no run launches: {', '.join(sorted(missing)) or 'none'}."
    yield f"sm {capability}: {len(RUNS)} runs, {total} launches, {races} with a race, {len(missing)} kernels missing"


def _main(arguments: list[str]) -> int:
    folder, *chips = arguments
    good = True
    for chip in chips or ["90"]:
        for line in table(Path(folder), int(chip)):
            print(line, flush=True)
        good = good and line.endswith(" 0 with a race, 0 kernels missing")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1:]))
