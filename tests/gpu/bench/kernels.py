"""Compare packed products with bf16 cuBLAS and torch's tinygemm: checked against fp64, then timed."""

import statistics
from collections.abc import Callable, Iterator

import torch
from torch.nn import functional

from mycli.runtime.quantization.packed_weight import dequantize
from mycli.runtime.quantization.scheme import Packing
from tests.gpu.bench.report import Case, Row
from tests.gpu.bench.shapes import INT4, roofline_seconds
from tests.gpu.bench.timing import Context, copies, in_turns, replay
from tests.gpu.bench.weights import dense, kernel_of, packed

SHAPES = ((28672, 4096), (4096, 14336), (6144, 4096), (4096, 4096), (128256, 4096))
ROWS = (1, 8, 2, 4, 16, 64, 512, 4096)  # in order of importance
TINYGEMM_ROWS = 64  # larger products take longer than all other cases together


def shapes(context: Context) -> tuple[tuple[int, int], ...]:
    """Return (N, K) of each row of the table."""
    return ((128, 256),) if context.tiny else SHAPES


def proof(context: Context) -> Iterator[Case]:
    """Yield the relative error against fp64 for each width and number of rows, at the most important shape."""
    n, k = shapes(context)[0]
    for packing in (INT4, Packing(8, 128), Packing(3, 128), Packing(2, 128)):
        yield Case(packing.name, 5, lambda packing=packing: _error(context, n, k, packing))  # type: ignore[misc]


def _error(context: Context, n: int, k: int, packing: Packing) -> list[Row]:
    weight = packed(n, k, packing, context.device)
    exact, kernel = dequantize(weight).double(), kernel_of(weight)
    matmul, rows = kernel.prepare(weight, torch.bfloat16), []
    for m in (1, 8, 64, 256):
        x = torch.randn(m, k, device=context.device).bfloat16()
        wanted = x.double() @ exact.t()
        error = float((matmul(x).double() - wanted).norm() / wanted.norm())
        rows.append({"kernel": kernel.name, "weights": packing.name, "N": n, "K": k, "M": m, "relative error": error})
    return rows


def table(context: Context, packing: Packing) -> Iterator[Case]:
    """Yield every number of rows of every shape, grouped by number of rows, the most important first."""
    few = packing != INT4
    for m in (1, 8) if few or context.tiny else ROWS:
        for n, k in shapes(context)[:2] if few else shapes(context):
            yield Case(f"{n}x{k} M={m}", 3, lambda m=m, n=n, k=k: _row(context, packing, m, n, k))  # type: ignore[misc]


def _row(context: Context, packing: Packing, m: int, n: int, k: int) -> list[Row]:
    """Time the packed product twice per round and the others once. GB/s counts weights and scales only."""
    nbytes, device = packing.bytes(n, k), context.device
    x = torch.randn(m, k, device=device).bfloat16()
    first = packed(n, k, packing, device)
    kernel = kernel_of(first)
    count = copies(nbytes, context)
    ours = [kernel.prepare(packed(n, k, packing, device), torch.bfloat16) for _ in range(count)]
    timed: dict[str, Callable[[], float]] = {
        kernel.name: replay([lambda w=w: w(x) for w in ours], context)  # type: ignore[misc]
    }
    plain = [dense(n, k, device) for _ in range(copies(2 * n * k, context))]
    timed["torch bf16"] = replay([lambda w=w: functional.linear(x, w) for w in plain], context)  # type: ignore[misc]
    if context.cuda and packing == INT4 and m <= TINYGEMM_ROWS:
        timed["tinygemm"] = _tinygemm(context, x, n, k, count)
    rows: list[Row] = []
    found, clock = in_turns(timed, context.rounds), context.clock()
    for name, samples in found.items():
        moved, seconds = 2 * n * k if name == "torch bf16" else nbytes, statistics.median(samples)
        rate = moved / seconds / 1e9
        row = {"kernel": name, "weights": packing.name, "N": n, "K": k, "M": m, "us": seconds * 1e6, "GB/s": rate}
        read, flops = context.limits.get("read GB/s"), context.limits.get("bf16 TFLOP/s")
        if read and flops:
            least = roofline_seconds(2.0 * m * n * k, moved + 2 * m * (n + k), read, flops)
            row |= {"% of read": 100 * rate / read, "% of roofline": 100 * least / seconds}
        rows.append({**row, **clock, "samples": samples})
    return rows


def _tinygemm(context: Context, x: torch.Tensor, n: int, k: int, count: int) -> Callable[[], float]:
    aten, weights = torch.ops.aten, []
    for _ in range(count):
        codes = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device=context.device)
        scales = torch.randn(k // 128, n, 2, device=context.device).bfloat16()
        weights.append((aten._convert_weight_to_int4pack(codes, 8), scales))
    return replay([lambda w=w, s=s: aten._weight_int4pack_mm(x, w, 128, s) for w, s in weights], context)  # type: ignore[misc]
