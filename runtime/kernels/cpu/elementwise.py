"""Norms, rotation and activations on the CPU in C++ (steps.h), with the rounding of the torch operations they replace.

A row's bits depend on neither the other rows nor their number. Each function returns `Declined` for what it does not
support.
"""

import ctypes
import math

import torch
from torch import Tensor
from torch.nn import functional

from mycli.runtime.errors import Declined
from mycli.runtime.kernels.cpu.library import build
from mycli.runtime.kernels.cpu.library.build import LANES, ROW_TYPES, CNorm, CRotateTask, Native, pointer

# After the products of a large model nothing is left in the caches, and each torch operation takes longer to start than
# to run, at about 18 operations in a layer. Squared ReLU stays with torch: it is one operation there, and a call from
# here takes as long.
_CPU_FLOATS = Declined("cpu-floats-only")
_ROWS = Declined("rows-not-whole-vectors", {"multiple": LANES})
_GRADIENT = Declined("no-gradient")
_GAIN = Declined("norm-gain-layout")
_GATE = Declined("gate-layout")
_TABLE_SHAPES = Declined("rotary-table-shapes")
_TABLE_LAYOUT = Declined("rotary-layout")

_FEW = 16  # tokens of all sequences; up to here one thread finishes before others are awake
# `GateType` of steps.h by activation and whether there is a gate.
GATE_TYPES = {
    ("silu", True): 0,
    ("gelu_tanh", True): 1,
    ("relu2", False): 2,
    ("swiglu_clamped", True): 3,
    ("relu2", True): 4,
    ("gelu_tanh", False): 5,
    ("swiglu_halves", True): 6,
    ("gelu", False): 7,
}


def _library(x: Tensor, width: int) -> Native | Declined:
    if x.dtype not in ROW_TYPES or not x.is_cpu:
        return _CPU_FLOATS
    if width % LANES or x.stride(-1) != 1:
        return _ROWS
    if x.requires_grad:
        return _GRADIENT
    return build.native()


def threads_for(tokens: int) -> int:
    return 1 if tokens <= _FEW else torch.get_num_threads()


def _tokens(x: Tensor) -> int:
    # x is [sequences, tokens, ..., size] or [tokens, size]: heads are no tokens.
    return math.prod(x.shape[:-1][:2])


def native_rms_norm(x: Tensor, gain: Tensor, eps: float) -> Tensor | Declined:
    """RMSNorm of x bf16 or fp32 [..., size], rounded once; gain [size] has the dtype of x, or is fp32 as 1 + w is."""
    return _norm(x, gain, eps, None, centred=False)


def native_layer_norm(x: Tensor, gain: Tensor, eps: float, bias: Tensor | None = None) -> Tensor | Declined:
    """`reference.layer_norm`; gain as in `native_rms_norm`, and bias of its dtype."""
    return _norm(x, gain, eps, bias, centred=True)


def _norm(x: Tensor, gain: Tensor, eps: float, bias: Tensor | None, centred: bool) -> Tensor | Declined:
    size = x.shape[-1]
    library = _library(x, size)
    if isinstance(library, Declined):
        return library
    if gain.requires_grad:
        return _GRADIENT
    if gain.dtype not in (x.dtype, torch.float32) or not gain.is_contiguous():
        return _GAIN
    if bias is not None and (bias.dtype != gain.dtype or not bias.is_contiguous() or bias.requires_grad):
        return _GAIN
    rows = x.contiguous()
    y = torch.empty_like(rows)
    pointers = map(pointer, (rows, gain, bias, y))
    task = CNorm(*pointers, rows.numel() // size, size, eps, ROW_TYPES[x.dtype], ROW_TYPES[gain.dtype], centred)
    library.norm(ctypes.byref(task), threads_for(_tokens(x)))
    return y


def _whole(size: int) -> int:
    return -(-size // LANES) * LANES


def _padded(x: Tensor, parts: int, zeros: int) -> Tensor:
    # Contiguous rows, with zeros after each of `parts` equal parts, `zeros` in all. Rows that are no whole vectors are
    # not left to torch: the bits of its activations depend on where a value lies in its tensor.
    if not zeros:
        return x.contiguous()
    rows = x.reshape(*x.shape[:-1], parts, x.shape[-1] // parts)
    return functional.pad(rows, (0, zeros // parts)).flatten(-2)


def _gate(gate_up: Tensor, activation: str, gated: bool = True) -> Tensor | Declined:
    parts = 1 + gated
    size = gate_up.shape[-1] // parts
    width = _whole(size)
    library = _library(gate_up, width)
    if isinstance(library, Declined):
        return library
    rows = _padded(gate_up, 1 if activation == "swiglu_clamped" else parts, parts * (width - size))
    y = rows.new_empty(*rows.shape[:-1], width)
    row_type, count, threads = ROW_TYPES[rows.dtype], y.numel() // width, threads_for(_tokens(y))
    library.gate(GATE_TYPES[activation, gated], row_type, rows.data_ptr(), count, width, y.data_ptr(), threads)
    return y if size == width else y[..., :size].contiguous()


def native_silu_multiply(gate_up: Tensor) -> Tensor | Declined:
    """SiLU(gate) * up: gate_up [..., 2 * size], gate first, to [..., size]."""
    return _gate(gate_up, "silu")


def native_gelu_multiply(gate_up: Tensor) -> Tensor | Declined:
    """GELU(gate) * up by the tanh approximation; shapes as in `native_silu_multiply`."""
    return _gate(gate_up, "gelu_tanh")


def native_relu_square_multiply(gate_up: Tensor) -> Tensor | Declined:
    """ReLU(gate)^2 * up; shapes as in `native_silu_multiply`."""
    return _gate(gate_up, "relu2")


def native_gelu_tanh(x: Tensor) -> Tensor | Declined:
    """GELU(x) by the tanh approximation."""
    return _gate(x, "gelu_tanh", gated=False)


def native_gelu(x: Tensor) -> Tensor | Declined:
    """GELU(x) without an approximation."""
    return _gate(x, "gelu", gated=False)


def native_clamped_swiglu(gate_up: Tensor) -> Tensor | Declined:
    """`reference.clamped_swiglu`: gate_up [..., 2 * size], gate and up alternating, to [..., size]."""
    return _gate(gate_up, "swiglu_clamped")


def native_swiglu_halves(gate_up: Tensor) -> Tensor | Declined:
    """`reference.swiglu_halves`; shapes as in `native_silu_multiply`."""
    return _gate(gate_up, "swiglu_halves")


def native_weigh_rows(x: Tensor, gate: Tensor) -> Tensor | Declined:
    """x bf16 or fp32 [..., size] times the rounded sigmoid of gate [..., 1] or [..., size], which has its dtype."""
    size = x.shape[-1]
    width = _whole(size)
    library = _library(x, width)
    if isinstance(library, Declined):
        return library
    if gate.dtype != x.dtype or gate.requires_grad:
        return _GATE
    per_value = gate.shape == x.shape
    assert per_value or gate.shape == (*x.shape[:-1], 1)
    values, gates = _padded(x, 1, width - size), _padded(gate, 1, per_value * (width - size))
    y, rows = torch.empty_like(values), values.numel() // width
    pointers = values.data_ptr(), gates.data_ptr(), rows, width, per_value, y.data_ptr()
    library.weigh(ROW_TYPES[x.dtype], *pointers, threads_for(rows))
    return y if size == width else y[..., :size].contiguous()


def native_rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor | Declined:
    """`reference.rotate_heads`: x bf16 or fp32 [sequences, tokens, heads, head_dim], tables [tokens, dim / 2]."""
    sequences, tokens, heads, head_dim = x.shape
    half = cos.shape[-1]
    library = _library(x, half)
    if isinstance(library, Declined):
        return library
    if 2 * half > head_dim or sin.shape != cos.shape:
        return _TABLE_SHAPES
    if cos.dtype != x.dtype or not (cos.is_contiguous() and sin.is_contiguous()) or x.stride(2) != head_dim:
        return _TABLE_LAYOUT
    y = x.new_empty(x.shape)
    pointers = x.data_ptr(), cos.data_ptr(), sin.data_ptr(), y.data_ptr()
    sizes = sequences, tokens, heads, head_dim, half, x.stride(0), x.stride(1)
    task = CRotateTask(*pointers, *sizes, interleaved)
    library.rotate(ROW_TYPES[x.dtype], ctypes.byref(task), threads_for(sequences * tokens))
    return y
