"""Convolution, gated delta rule and gated norm of recurrent layers on the CPU in C++ (recurrent.h).

Tokens are processed one after another: a row's bits depend on neither the other rows nor how the prompt was split
into passes. Each function returns `Declined` for what it does not support; in inference mode, sizes that are no whole
vectors are computed by the references, a row at a time.
"""

import ctypes
from collections.abc import Callable
from ctypes import c_float, c_int32, c_int64, c_void_p
from itertools import pairwise

import torch
from torch import Tensor

from mycli.runtime.errors import Declined
from mycli.runtime.kernels.cpu.library import build
from mycli.runtime.kernels.cpu.library.build import LANES, ROW_TYPES, Native, pointer
from mycli.runtime.kernels.recurrent import (
    DeltaSizes,
    Runs,
    ScanSizes,
    convolve,
    delta_rule,
    gated_norm,
    group_norm,
    scan,
)

_FEW = 1 << 15  # values of a pass; up to here one thread finishes before others are awake
_MAX_TAPS, _MAX_KEY_DIM = 64, 256
_CPU_FLOATS = Declined("cpu-floats-only")
_CONTIGUOUS = Declined("rows-not-contiguous")
_GRADIENT = Declined("no-gradient")
_CHANNELS = Declined("convolution-size", {"multiple": LANES, "taps": _MAX_TAPS})
_HEADS = Declined("delta-rule-size", {"multiple": LANES, "key_dim": _MAX_KEY_DIM})
_CONVOLUTION = Declined("convolution-operands")
_DELTA = Declined("delta-rule-operands")
_RUNS = Declined("runs-without-own-slots")
_SCAN = Declined("scan-operands")
_NORM = Declined("gated-norm-operands", {"multiple": LANES})


# These structures mirror those of recurrent.h with the same names.
class _Runs(ctypes.Structure):
    _fields_ = [
        ("starts", ctypes.POINTER(c_int32)),
        ("slots", ctypes.POINTER(c_int32)),
        ("stays", c_void_p),
        ("runs", c_int64),
        ("type", c_int32),
    ]


class _Convolution(ctypes.Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("x", "weight", "bias", "state", "y")),
        *((name, c_int64) for name in ("stride", "channels", "taps")),
        ("silu", c_int32),
    ]


class _Delta(ctypes.Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("qkv", "gates", "rate", "dt_bias", "state", "scratch", "y")),
        *((name, c_int64) for name in ("stride", "heads", "key_heads", "key_dim", "value_dim")),
        *((name, c_float) for name in ("beta_scale", "floor")),
        ("by_channel", c_int32),
    ]


class _GatedNorm(ctypes.Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("x", "gain", "gate", "y")),
        *((name, c_int64) for name in ("rows", "heads", "size", "stride")),
        ("eps", c_float),
        ("silu", c_int32),
    ]


class _Scan(ctypes.Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("x", "steps", "rate", "dt_bias", "skip", "state", "scratch", "y")),
        *((name, c_int64) for name in ("stride", "heads", "groups", "head_dim", "state_dim")),
        *((name, c_float) for name in ("low", "high")),
        ("by_channel", c_int32),
    ]


class _GroupNorm(ctypes.Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("x", "gain", "gate", "y")),
        *((name, c_int64) for name in ("rows", "groups", "size", "stride")),
        ("eps", c_float),
    ]


def _library(x: Tensor, *others: Tensor) -> Native | Declined:
    tensors = (x, *others)
    if x.dtype not in ROW_TYPES or any(tensor.dtype != x.dtype or not tensor.is_cpu for tensor in tensors):
        return _CPU_FLOATS
    if any(tensor.stride(-1) != 1 for tensor in tensors):
        return _CONTIGUOUS
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return _GRADIENT
    return build.native()


def _threads(values: int) -> int:
    return 1 if values <= _FEW else torch.get_num_threads()


def _c_runs(x: Tensor, runs: Runs) -> _Runs:
    starts, slots = (c_int32 * len(runs.starts))(*runs.starts), (c_int32 * len(runs.slots))(*runs.slots)
    # ctypes keeps the two arrays alive with the structure.
    return _Runs(starts, slots, None, len(runs.slots), ROW_TYPES[x.dtype])


def _contiguous_fp32(*tensors: Tensor | None) -> bool:
    present = (tensor for tensor in tensors if tensor is not None)
    return all(tensor.dtype == torch.float32 and tensor.is_contiguous() and tensor.is_cpu for tensor in present)


def _fits(runs: Runs, rows: int, slots: int) -> bool:
    # C++ does not check its pointers: the runs must cover `rows` in order, each with an existing slot of its own.
    ordered = runs.starts[0] == 0 and runs.starts[-1] == rows and list(runs.starts) == sorted(runs.starts)
    inside = all(0 <= slot < slots for slot in runs.slots) and len(set(runs.slots)) == len(runs.slots)
    return ordered and inside and len(runs.starts) == len(runs.slots) + 1


def _by_rows(declined: Declined, runs: Runs, row: Callable[[slice, Runs], Tensor]) -> Tensor | Declined:
    # The references compute chunks of a pass, whose bits depend on where it starts; a row alone has the same shapes
    # wherever a prompt is cut. Calibration and evaluation, outside of inference mode, need speed.
    if not torch.is_inference_mode_enabled() or not runs.starts[-1]:
        return declined
    bounds = zip(pairwise(runs.starts), runs.slots, strict=True)
    rows = ((index, slot) for (first, end), slot in bounds for index in range(first, end))
    return torch.cat([row(slice(index, index + 1), Runs((0, 1), (slot,))) for index, slot in rows])


def decline_convolution(channels: int, taps: int) -> Declined | None:
    """Return why a convolution of this size is not supported, or None."""
    if channels % LANES or not 2 <= taps <= _MAX_TAPS:
        return _CHANNELS
    return None


def decline_delta(sizes: DeltaSizes) -> Declined | None:
    """Return why a delta rule of these sizes is not supported, or None."""
    if sizes.key_dim % LANES or sizes.value_dim % LANES or sizes.key_dim > _MAX_KEY_DIM:
        return _HEADS
    if sizes.by_channel and sizes.heads != sizes.key_heads:
        return _DELTA
    return None


def decline_scan(sizes: ScanSizes) -> Declined | None:
    """Return why a state space scan of these sizes is not supported, or None."""
    if sizes.head_dim % LANES or sizes.state_dim % LANES or sizes.state_dim > _MAX_KEY_DIM:
        return Declined("scan-size", {"multiple": LANES, "state_dim": _MAX_KEY_DIM})
    if sizes.by_channel and (sizes.heads, sizes.groups) != (1, 1):
        return _SCAN
    return None


def native_convolve(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, runs: Runs, silu: bool
) -> Tensor | Declined:
    library, (taps, channels) = _library(x), weight.shape
    if isinstance(library, Declined):
        return library
    if (declined := decline_convolution(channels, taps)) is not None:
        return _by_rows(declined, runs, lambda row, run: convolve(x[row], weight, bias, state, run, silu))
    if (
        not _contiguous_fp32(weight, bias, state)
        or state.shape[1:] != (taps - 1, channels)
        or x.shape[1:] != (channels,)
    ):
        return _CONVOLUTION
    if not _fits(runs, len(x), len(state)):
        return _RUNS
    y = x.new_empty(x.shape)
    pointers = map(pointer, (x, weight, bias, state, y))
    task = _Convolution(*pointers, x.stride(0), channels, taps, silu)
    library.convolve(ctypes.byref(_c_runs(x, runs)), ctypes.byref(task), _threads(x.numel()))
    return y


def native_delta_rule(
    qkv: Tensor, gates: Tensor, rate: Tensor, dt_bias: Tensor, state: Tensor, runs: Runs, sizes: DeltaSizes
) -> Tensor | Declined:
    """`recurrent.delta_rule`; queries and keys are normalized, and sums taken, in fp32."""
    library, width = _library(qkv, gates), sizes.key_heads * sizes.key_dim
    if isinstance(library, Declined):
        return library
    if (declined := decline_delta(sizes)) is not None:
        return _by_rows(
            declined, runs, lambda row, run: delta_rule(qkv[row], gates[row], rate, dt_bias, state, run, sizes)
        )
    values, shape = sizes.heads * sizes.value_dim, (sizes.heads, sizes.key_dim, sizes.value_dim)
    fitting = qkv.shape[1] == 2 * width + values and gates.shape == (len(qkv), sizes.heads + sizes.decays)
    fitting = fitting and rate.shape == (sizes.heads,) and dt_bias.shape == (sizes.decays,) and qkv.is_contiguous()
    if not _contiguous_fp32(rate, dt_bias, state) or state.shape[1:] != shape or not fitting:
        return _DELTA
    if not _fits(runs, len(qkv), len(state)):
        return _RUNS
    y, scratch = qkv.new_empty(len(qkv), values), torch.empty(len(qkv), 2 * width + sizes.heads + sizes.decays)
    pointers = (tensor.data_ptr() for tensor in (qkv, gates, rate, dt_bias, state, scratch, y))
    counts = sizes.heads, sizes.key_heads, sizes.key_dim, sizes.value_dim
    task = _Delta(*pointers, gates.stride(0), *counts, sizes.beta_scale, sizes.floor, sizes.by_channel)
    work = len(qkv) * sizes.heads * sizes.key_dim * sizes.value_dim
    library.delta(ctypes.byref(_c_runs(qkv, runs)), ctypes.byref(task), _threads(work))
    return y


def native_gated_norm(x: Tensor, gain: Tensor, eps: float, gate: Tensor, silu: bool) -> Tensor | Declined:
    library, size = _library(x, gain, gate), gain.shape[0]
    if isinstance(library, Declined):
        return library
    if size % LANES:
        return _by_rows(_NORM, Runs.alike(1, len(x)), lambda row, _: gated_norm(x[row], gain, eps, gate[row], silu))
    if not x.is_contiguous() or gate.shape != x.shape or x.shape[1] % size:
        return _NORM
    y = torch.empty_like(x)
    pointers = x.data_ptr(), gain.data_ptr(), gate.data_ptr(), y.data_ptr()
    task = _GatedNorm(*pointers, len(x), x.shape[1] // size, size, gate.stride(0), eps, silu)
    library.gated_norm(ctypes.byref(task), ROW_TYPES[x.dtype], _threads(x.numel()))
    return y


def native_scan(
    x: Tensor, steps: Tensor, rate: Tensor, dt_bias: Tensor, skip: Tensor, state: Tensor, runs: Runs, sizes: ScanSizes
) -> Tensor | Declined:
    """`recurrent.scan`, row by row, with sums in fp32."""
    library, inner = _library(x, steps), sizes.heads * sizes.head_dim
    if isinstance(library, Declined):
        return library
    if (declined := decline_scan(sizes)) is not None:
        return _by_rows(
            declined, runs, lambda row, run: scan(x[row], steps[row], rate, dt_bias, skip, state, run, sizes)
        )
    width, shape = sizes.groups * sizes.state_dim, (sizes.heads, sizes.state_dim, sizes.head_dim)
    fitting = x.shape[1] == inner + 2 * width and steps.shape == (len(x), sizes.steps) and x.is_contiguous()
    rates = (sizes.state_dim, sizes.head_dim) if sizes.by_channel else (sizes.heads,)
    fitting = fitting and rate.shape == rates and dt_bias.shape == skip.shape == (sizes.steps,)
    if not _contiguous_fp32(rate, dt_bias, skip, state) or state.shape[1:] != shape or not fitting:
        return _SCAN
    if not _fits(runs, len(x), len(state)):
        return _RUNS
    y, scratch = x.new_empty(len(x), inner), torch.empty(len(x), 2 * (width + sizes.heads))
    pointers = (tensor.data_ptr() for tensor in (x, steps, rate, dt_bias, skip, state, scratch, y))
    counts = sizes.heads, sizes.groups, sizes.head_dim, sizes.state_dim
    numbers = steps.stride(0), *counts, *sizes.limits, sizes.by_channel
    library.scan(
        ctypes.byref(_c_runs(x, runs)), ctypes.byref(_Scan(*pointers, *numbers)), _threads(len(x) * inner * 16)
    )
    return y


def native_group_norm(x: Tensor, gain: Tensor, eps: float, gate: Tensor, groups: int) -> Tensor | Declined:
    library, size = _library(x, gain, gate), gain.shape[0] // groups
    if isinstance(library, Declined):
        return library
    if size % LANES:
        return _by_rows(_NORM, Runs.alike(1, len(x)), lambda row, _: group_norm(x[row], gain, eps, gate[row], groups))
    if not x.is_contiguous() or gate.shape != x.shape or x.shape[1] != gain.shape[0]:
        return _NORM
    y = torch.empty_like(x)
    pointers = x.data_ptr(), gain.data_ptr(), gate.data_ptr(), y.data_ptr()
    task = _GroupNorm(*pointers, len(x), groups, size, gate.stride(0), eps)
    library.group_norm(ctypes.byref(task), ROW_TYPES[x.dtype], _threads(x.numel()))
    return y
