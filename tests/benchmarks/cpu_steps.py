"""Times the native steps between products, and compares with torch.

    PYTHONPATH=.links python -m tests.benchmarks.cpu_steps [--tokens 1] [--hidden 1024] [--mlp 2816] [--rounds 200]

Before each step a product of [--hidden, --mlp] runs with different weights, which evicts the step's data from the
caches. Steps alternate, so that load from other processes affects all of them. Prints microseconds, the medians of
`--rounds`.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from mycli.runtime.errors import Declined
from mycli.runtime.kernels.cpu.elementwise import (
    native_gelu_multiply,
    native_rms_norm,
    native_rotate,
    native_silu_multiply,
)
from mycli.runtime.kernels.cpu.matmul import dense_product
from mycli.runtime.kernels.reference import gelu_multiply, rms_norm, rotate_heads, silu_multiply

HEADS, HEAD_DIM = 8, 128
BESIDE = 64 << 20  # bytes of weights that alternate: more than the caches of most processors

Step = Callable[[], Tensor | Declined]


def steps(tokens: int, hidden: int, mlp: int) -> dict[str, tuple[Step, Step]]:
    """Return each step as a native and as a torch call."""
    x, heads = torch.randn(tokens, hidden).bfloat16(), torch.randn(1, tokens, HEADS, HEAD_DIM).bfloat16()
    gated = torch.randn(tokens, 2 * mlp).bfloat16()
    gain, head_gain = 1 + torch.randn(hidden) * 0.1, 1 + torch.randn(HEAD_DIM) * 0.1
    short = gain.bfloat16()
    cos, sin = torch.randn(2, tokens, HEAD_DIM // 2).bfloat16()
    return {
        f"RMSNorm of {hidden}, bf16 gain": (
            lambda: native_rms_norm(x, short, 1e-6),
            lambda: rms_norm(x, short, 1e-6),
        ),
        f"RMSNorm of {hidden}, fp32 gain": (lambda: native_rms_norm(x, gain, 1e-6), lambda: rms_norm(x, gain, 1e-6)),
        f"RMSNorm of {HEADS} heads of {HEAD_DIM}": (
            lambda: native_rms_norm(heads, head_gain, 1e-6),
            lambda: rms_norm(heads, head_gain, 1e-6),
        ),
        f"rotation of {HEADS} heads": (lambda: native_rotate(heads, cos, sin), lambda: rotate_heads(heads, cos, sin)),
        f"SiLU(gate) * up, {mlp}": (lambda: native_silu_multiply(gated), lambda: silu_multiply(gated)),
        f"GELU(gate) * up, {mlp}": (lambda: native_gelu_multiply(gated), lambda: gelu_multiply(gated)),
    }


def medians(runs: dict[str, tuple[Step, Step]], before: list[Tensor], rounds: int) -> dict[str, list[float]]:
    """Return the microseconds of the native and the torch call of each step."""
    x = torch.randn(1, before[0].shape[1]).bfloat16()
    times: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in runs}
    turn = 0
    for _ in range(rounds):
        for name, both in runs.items():
            for run, found in zip(both, times[name], strict=True):
                dense_product(x, before[turn % len(before)])
                turn += 1
                began = time.perf_counter()
                run()
                found.append(1e6 * (time.perf_counter() - began))
    return {name: [statistics.median(found) for found in both] for name, both in times.items()}


def main() -> None:
    """Print one line for each step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--mlp", type=int, default=2816)
    parser.add_argument("--rounds", type=int, default=200)
    given = parser.parse_args()
    torch.set_grad_enabled(False)
    runs = steps(given.tokens, given.hidden, given.mlp)
    for name, (native, _) in runs.items():
        if isinstance(reason := native(), Declined):
            raise SystemExit(f"{name}: not native here: {reason.code}")
    count = -(-BESIDE // (2 * given.hidden * given.mlp))
    before = [torch.randn(given.mlp, given.hidden).bfloat16() for _ in range(count)]
    print(f"tokens: {given.tokens}, {torch.get_num_threads()} threads; microseconds, medians of {given.rounds}")
    for name, (native_time, torch_time) in medians(runs, before, given.rounds).items():
        print(f"{name:28} native {native_time:7.1f}  torch {torch_time:7.1f}  {torch_time / native_time:5.2f}x")


if __name__ == "__main__":
    main()
