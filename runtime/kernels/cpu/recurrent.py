"""What recurrent layers do with their states on the CPU by our own code, recurrent.h: token after token, in one order.

A row's bits depend on neither the rows beside it nor how its text was cut into passes. Each function returns the reason
where this code cannot. The twins are `runtime.kernels.recurrent`'s.
"""

import ctypes
from ctypes import c_float, c_int32, c_int64, c_void_p

import torch
from torch import Tensor

from mycli.runtime.errors import Declined
from mycli.runtime.kernels.cpu.library import build
from mycli.runtime.kernels.cpu.library.build import LANES, ROW_TYPES, Native
from mycli.runtime.kernels.recurrent import DeltaSizes, Runs

_FEW = 1 << 15  # values of a pass: of so few one thread is done before others are awake
_MOST_TAPS, _MOST_KEYS = 64, 256
_CPU_FLOATS = Declined("cpu-floats-only")
_CONTIGUOUS = Declined("rows-not-contiguous")
_GRADIENT = Declined("no-gradient")
_CHANNELS = Declined("convolution-size", {"multiple": LANES, "taps": _MOST_TAPS})
_HEADS = Declined("delta-rule-size", {"multiple": LANES, "key_dim": _MOST_KEYS})
_CONVOLUTION = Declined("convolution-operands")
_DELTA = Declined("delta-rule-operands")
_RUNS = Declined("runs-without-own-slots")
_NORM = Declined("gated-norm-operands", {"multiple": LANES})


class _Runs(ctypes.Structure):
    """`Runs` of recurrent.h."""

    _fields_ = [
        ("starts", ctypes.POINTER(c_int32)),
        ("slots", ctypes.POINTER(c_int32)),
        ("stays", c_void_p),
        ("runs", c_int64),
        ("type", c_int32),
    ]


class _Convolution(ctypes.Structure):
    """`Convolution` of recurrent.h."""

    _fields_ = [
        *((name, c_void_p) for name in ("x", "weight", "bias", "state", "y")),
        *((name, c_int64) for name in ("stride", "channels", "taps")),
        ("silu", c_int32),
    ]


class _Delta(ctypes.Structure):
    """`Delta` of recurrent.h."""

    _fields_ = [
        *((name, c_void_p) for name in ("qkv", "gates", "rate", "dt_bias", "state", "scratch", "y")),
        *((name, c_int64) for name in ("stride", "heads", "key_heads", "key_dim", "value_dim")),
    ]


class _GatedNorm(ctypes.Structure):
    """`GatedNorm` of recurrent.h."""

    _fields_ = [
        *((name, c_void_p) for name in ("x", "gain", "gate", "y")),
        *((name, c_int64) for name in ("rows", "heads", "size", "stride")),
        ("eps", c_float),
    ]


def _library(x: Tensor, *others: Tensor) -> Native | Declined:
    """For x and `others`, of one dtype and contiguous in the last dimension."""
    tensors = (x, *others)
    if x.dtype not in ROW_TYPES or any(one.dtype != x.dtype or not one.is_cpu for one in tensors):
        return _CPU_FLOATS
    if any(one.stride(-1) != 1 for one in tensors):
        return _CONTIGUOUS
    if torch.is_grad_enabled() and any(one.requires_grad for one in tensors):
        return _GRADIENT
    return build.native()


def _threads(values: int) -> int:
    return 1 if values <= _FEW else torch.get_num_threads()


def _rows(x: Tensor, runs: Runs) -> _Runs:
    starts, slots = (c_int32 * len(runs.starts))(*runs.starts), (c_int32 * len(runs.slots))(*runs.slots)
    # The structure keeps what its pointers point at alive.
    return _Runs(starts, slots, None, len(runs.slots), ROW_TYPES[x.dtype])


def _exact(*tensors: Tensor | None) -> bool:
    return all(one is None or (one.dtype == torch.float32 and one.is_contiguous() and one.is_cpu) for one in tensors)


def _fits(runs: Runs, rows: int, slots: int) -> bool:
    """Whether the runs are those of so many rows, in slots that there are, each once."""
    ordered = runs.starts[0] == 0 and runs.starts[-1] == rows and list(runs.starts) == sorted(runs.starts)
    inside = all(0 <= slot < slots for slot in runs.slots) and len(set(runs.slots)) == len(runs.slots)
    return ordered and inside and len(runs.starts) == len(runs.slots) + 1


def decline_convolution(channels: int, taps: int) -> Declined | None:
    """Why such a convolution is not taken; None where it is."""
    if channels % LANES or not 2 <= taps <= _MOST_TAPS:
        return _CHANNELS
    return None


def decline_delta(sizes: DeltaSizes) -> Declined | None:
    """Why a delta rule of such sizes is not taken; None where it is."""
    if sizes.key_dim % LANES or sizes.value_dim % LANES or sizes.key_dim > _MOST_KEYS:
        return _HEADS
    return None


def native_convolve(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, runs: Runs, silu: bool
) -> Tensor | Declined:
    """As `runtime.kernels.recurrent.convolve`."""
    found, (taps, channels) = _library(x), weight.shape
    if isinstance(found, Declined):
        return found
    if (why := decline_convolution(channels, taps)) is not None:
        return why
    if not _exact(weight, bias, state) or state.shape[1:] != (taps - 1, channels) or x.shape[1:] != (channels,):
        return _CONVOLUTION
    if not _fits(runs, len(x), len(state)):
        return _RUNS
    y = x.new_empty(x.shape)
    pointers = (
        x.data_ptr(),
        weight.data_ptr(),
        None if bias is None else bias.data_ptr(),
        state.data_ptr(),
        y.data_ptr(),
    )
    task = _Convolution(*pointers, x.stride(0), channels, taps, silu)
    found.convolve(ctypes.byref(_rows(x, runs)), ctypes.byref(task), _threads(x.numel()))
    return y


def native_delta_rule(
    qkv: Tensor, gates: Tensor, rate: Tensor, dt_bias: Tensor, state: Tensor, runs: Runs, sizes: DeltaSizes
) -> Tensor | Declined:
    """As `runtime.kernels.recurrent.delta_rule`; queries and keys are normed, and all is summed, in fp32."""
    found, width = _library(qkv, gates), sizes.key_heads * sizes.key_dim
    if isinstance(found, Declined):
        return found
    if (why := decline_delta(sizes)) is not None:
        return why
    values, shape = sizes.heads * sizes.value_dim, (sizes.heads, sizes.key_dim, sizes.value_dim)
    fitting = qkv.shape[1] == 2 * width + values and gates.shape == (len(qkv), 2 * sizes.heads)
    if not _exact(rate, dt_bias, state) or state.shape[1:] != shape or not fitting or not qkv.is_contiguous():
        return _DELTA
    if not _fits(runs, len(qkv), len(state)):
        return _RUNS
    y, scratch = qkv.new_empty(len(qkv), values), torch.empty(len(qkv), 2 * (width + sizes.heads))
    pointers = (one.data_ptr() for one in (qkv, gates, rate, dt_bias, state, scratch, y))
    task = _Delta(*pointers, gates.stride(0), sizes.heads, sizes.key_heads, sizes.key_dim, sizes.value_dim)
    work = len(qkv) * sizes.heads * sizes.key_dim * sizes.value_dim
    found.delta(ctypes.byref(_rows(qkv, runs)), ctypes.byref(task), _threads(work))
    return y


def native_gated_norm(x: Tensor, gain: Tensor, eps: float, gate: Tensor) -> Tensor | Declined:
    """As `runtime.kernels.recurrent.gated_norm`, rounded once."""
    found, size = _library(x, gain, gate), gain.shape[0]
    if isinstance(found, Declined):
        return found
    if size % LANES or not x.is_contiguous() or gate.shape != x.shape or x.shape[1] % size:
        return _NORM
    y = torch.empty_like(x)
    pointers = x.data_ptr(), gain.data_ptr(), gate.data_ptr(), y.data_ptr()
    task = _GatedNorm(*pointers, len(x), x.shape[1] // size, size, gate.stride(0), eps)
    found.gated_norm(ctypes.byref(task), ROW_TYPES[x.dtype], _threads(x.numel()))
    return y
