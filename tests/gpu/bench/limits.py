"""The limits of the device, measured first as the reference for all other results."""

import statistics
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec

import torch

from tests.gpu.bench.report import Case, NotInstalled, Row
from tests.gpu.bench.timing import Call, Context, in_turns, replay


def cases(context: Context) -> Iterator[Case]:
    """Yield bandwidth of reads and copies, matrix multiplication rate, and the gap between two kernels of a graph."""
    yield Case("read", 5, lambda: _bandwidth(context, "read GB/s", _reads, 1))
    yield Case("copy", 5, lambda: _bandwidth(context, "copy GB/s", _copies, 2))
    yield Case("bf16 GEMM", 5, lambda: _gemm(context))
    yield Case("graph gap", 10, lambda: _gap(context, False))
    yield Case("graph gap, dependent launch", 10, lambda: _gap(context, True))


def _median(calls: Sequence[Call], context: Context) -> tuple[float, list[float]]:
    samples = in_turns({"": replay(calls, context)}, context.rounds)[""]
    return statistics.median(samples), samples


def _keep(context: Context, name: str, value: float, samples: list[float]) -> list[Row]:
    context.limits[name] = value
    return [{"limit": name, "value": value, **context.clock(), "samples": samples}]


def _reads(x: torch.Tensor) -> Call:
    # One block handles one row and few column sums are written. 32-bit, because torch reads it in 16-byte pieces.
    return lambda: torch.sum(x, dim=1)


def _copies(x: torch.Tensor) -> Call:
    y = torch.empty_like(x)
    return lambda: y.copy_(x)


def _bandwidth(context: Context, name: str, make: Callable[[torch.Tensor], Call], ways: int) -> list[Row]:
    rows = 64 if context.tiny else 1 << 15
    tensors = [torch.ones(rows, 1 << 14, device=context.device) for _ in range(2)]
    seconds, samples = _median([make(x) for x in tensors], context)
    return _keep(context, name, ways * tensors[0].nbytes / seconds / 1e9, samples)


def _gemm(context: Context) -> list[Row]:
    size = 64 if context.tiny else 8192
    # Random data: a GPU that multiplies zeros draws less power and runs at a higher clock.
    a, b = (torch.randn(size, size, device=context.device).bfloat16() for _ in range(2))
    seconds, samples = _median([lambda: torch.matmul(a, b)] * 4, context)
    return _keep(context, "bf16 TFLOP/s", 2 * size**3 / seconds / 1e12, samples)


def _gap(context: Context, dependent: bool) -> list[Row]:
    """Measure the time per kernel in a chain of empty kernels of one block each."""
    if not context.cuda or find_spec("triton") is None:
        raise NotInstalled("needs a CUDA device and triton")
    from tests.gpu.bench.empty_kernel import chained, dependent_chained

    word = torch.zeros(1, dtype=torch.int32, device=context.device)
    if dependent:
        if torch.cuda.get_device_capability(context.device) < (9, 0):
            raise NotInstalled("programmatic dependent launch needs compute capability 9.0")
        call: Call = lambda: dependent_chained[(1,)](word, launch_pdl=True)  # noqa: E731 - one of two
    else:
        call = lambda: chained[(1,)](word)  # noqa: E731 - one of two
    seconds, samples = _median([call] * 1000, context)
    return _keep(context, "graph gap us" + (", dependent" if dependent else ""), seconds * 1e6, samples)
