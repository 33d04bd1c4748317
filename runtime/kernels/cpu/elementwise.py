"""What lies between the products on the CPU by our own code: norm, rotation, activation.

Beside weights that leave nothing in the caches, each operation of torch takes longer to begin than to do, and these are
a dozen and a half of them a layer. The code is steps.h; it rounds where torch does. A row's bits depend on neither the
rows beside it nor their number. Each function returns the reason where this code cannot. What is a single operation of
torch anyway, rounded once (squared ReLU), is left to it: a call from here takes as long.
"""

import ctypes
import math

import torch
from torch import Tensor

from mycli.runtime.errors import Declined
from mycli.runtime.kernels.cpu.library import build
from mycli.runtime.kernels.cpu.library.build import LANES, ROW_TYPES, CNorm, CRotateTask, Native

_CPU_FLOATS = Declined("cpu-floats-only")
_ROWS = Declined("rows-not-whole-vectors", {"multiple": LANES})
_GRADIENT = Declined("no-gradient")
_GAIN = Declined("norm-gain-layout")
_GATE = Declined("gate-layout")
_ROTATE_BF16 = Declined("rotates-bf16-only")
_TABLE_SHAPES = Declined("rotary-table-shapes")
_TABLE_LAYOUT = Declined("rotary-layout")

_FEW = 16  # tokens, of all sequences together; of so few one thread is done before others are awake
GATE_TYPES = {"silu": 0, "gelu_tanh": 1, "relu2": 2, "swiglu_clamped": 3}  # `GateType` of steps.h; relu2 has no gate


def _library(x: Tensor, width: int) -> Native | Declined:
    """For x bf16 or fp32 in rows of `width`."""
    if x.dtype not in ROW_TYPES or not x.is_cpu:
        return _CPU_FLOATS
    if width % LANES or x.stride(-1) != 1:
        return _ROWS
    if x.requires_grad:
        return _GRADIENT
    return build.native()


def threads_for(tokens: int) -> int:
    """How many share a step over so many tokens."""
    return 1 if tokens <= _FEW else torch.get_num_threads()


def _tokens(x: Tensor) -> int:
    """Of x [sequences, tokens, ..., size] or [tokens, size]: heads are no tokens."""
    return math.prod(x.shape[:-1][:2])


def native_rms_norm(x: Tensor, gain: Tensor, eps: float) -> Tensor | Declined:
    """x bf16 or fp32 [..., size] to the same, rounded once; gain [size] in its dtype, or in fp32 as 1 + w is."""
    return _normed(x, gain, eps, centred=False)


def native_layer_norm(x: Tensor, gain: Tensor, eps: float) -> Tensor | Declined:
    """As `native_rms_norm`, the mean taken away first."""
    return _normed(x, gain, eps, centred=True)


def _normed(x: Tensor, gain: Tensor, eps: float, centred: bool) -> Tensor | Declined:
    size = x.shape[-1]
    found = _library(x, size)
    if isinstance(found, Declined):
        return found
    if gain.requires_grad:
        return _GRADIENT
    if gain.dtype not in (x.dtype, torch.float32) or not gain.is_contiguous():
        return _GAIN
    given = x.contiguous()
    y = torch.empty_like(given)
    pointers = given.data_ptr(), gain.data_ptr(), y.data_ptr()
    task = CNorm(*pointers, given.numel() // size, size, eps, ROW_TYPES[x.dtype], ROW_TYPES[gain.dtype], centred)
    found.norm(ctypes.byref(task), threads_for(_tokens(x)))
    return y


def _gated(gate_up: Tensor, gate_type: int) -> Tensor | Declined:
    """gate_up bf16 or fp32 [..., 2 * size] to [..., size]; `gate_type` is one of steps.h."""
    size = gate_up.shape[-1] // 2
    found = _library(gate_up, size)
    if isinstance(found, Declined):
        return found
    given, y = gate_up.contiguous(), gate_up.new_empty(*gate_up.shape[:-1], size)
    found.gate(
        gate_type,
        ROW_TYPES[given.dtype],
        given.data_ptr(),
        y.numel() // size,
        size,
        y.data_ptr(),
        threads_for(_tokens(y)),
    )
    return y


def native_silu_multiply(gate_up: Tensor) -> Tensor | Declined:
    """SiLU(gate) * up: gate_up [..., 2 * size], gate first, to [..., size]."""
    return _gated(gate_up, GATE_TYPES["silu"])


def native_gelu_multiply(gate_up: Tensor) -> Tensor | Declined:
    """GELU(gate) * up, by the tanh approximation; shapes as in `native_silu_multiply`."""
    return _gated(gate_up, GATE_TYPES["gelu_tanh"])


def native_clamped_swiglu(gate_up: Tensor) -> Tensor | Declined:
    """As `reference.clamped_swiglu`, rounded where it is; gate_up [..., 2 * size], both in turn, to [..., size]."""
    return _gated(gate_up, GATE_TYPES["swiglu_clamped"])


def native_weigh_rows(x: Tensor, gate: Tensor) -> Tensor | Declined:
    """x bf16 or fp32 [..., size] times the sigmoid of gate [..., 1] or [..., size], rounded first; in the dtype
    of both."""
    size = x.shape[-1]
    found = _library(x, size)
    if isinstance(found, Declined):
        return found
    if gate.dtype != x.dtype or gate.requires_grad:
        return _GATE
    given, weights, y = x.contiguous(), gate.contiguous(), x.new_empty(x.shape)
    rows, each = x.numel() // size, gate.shape == x.shape
    assert each or gate.shape == (*x.shape[:-1], 1)
    pointers = given.data_ptr(), weights.data_ptr(), rows, size, each, y.data_ptr()
    found.weigh(ROW_TYPES[x.dtype], *pointers, threads_for(rows))
    return y


def native_rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor | Declined:
    """As `runtime.layers.rope.rotate`: x bf16 [sequences, tokens, heads, head_dim], tables [tokens, dim / 2].

    In fp32 torch's products and sums have a row's bits wherever it lies.
    """
    sequences, tokens, heads, head_dim = x.shape
    half = cos.shape[-1]
    if x.dtype != torch.bfloat16:
        return _ROTATE_BF16
    found = _library(x, half)
    if isinstance(found, Declined):
        return found
    if 2 * half > head_dim or sin.shape != cos.shape:
        return _TABLE_SHAPES
    if cos.dtype != x.dtype or not (cos.is_contiguous() and sin.is_contiguous()) or x.stride(2) != head_dim:
        return _TABLE_LAYOUT
    y = x.new_empty(x.shape)
    pointers = x.data_ptr(), cos.data_ptr(), sin.data_ptr(), y.data_ptr()
    sizes = sequences, tokens, heads, head_dim, half, x.stride(0), x.stride(1)
    found.rotate(ctypes.byref(CRotateTask(*pointers, *sizes, interleaved)), threads_for(sequences * tokens))
    return y
