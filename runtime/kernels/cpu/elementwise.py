"""What lies between the products on the CPU by our own code: norm, rotation, activation.

Beside weights that leave nothing in the caches, each operation of torch takes longer to begin than to do, and these are
a dozen and a half of them a layer. The code is steps.h; it rounds where torch does. A row's bits depend on neither the
rows beside it nor their number. Each function returns the reason where this code cannot.
"""

import ctypes

import torch
from torch import Tensor

from mycli.runtime.kernels.cpu import build
from mycli.runtime.kernels.cpu.build import CRotation, Native

_FEW = 16  # tokens, of all sequences together; of so few one thread is done before others are awake
_LANES = 16


def _library(x: Tensor, width: int) -> Native | str:
    """For x bf16 in rows of `width`."""
    if x.dtype != torch.bfloat16 or x.device.type != "cpu":
        return "takes bf16 on the CPU only"
    if width % _LANES or x.stride(-1) != 1:
        return f"takes contiguous rows in multiples of {_LANES}"
    if x.requires_grad:
        return "has no gradient"
    return build.native()


def _threads(tokens: int) -> int:
    return 1 if tokens <= _FEW else torch.get_num_threads()


def native_rms_norm(x: Tensor, gain: Tensor, eps: float) -> Tensor | str:
    """x [..., size] to the same; gain [size] in the dtype of x."""
    size = x.shape[-1]
    found = _library(x, size)
    if isinstance(found, str):
        return found
    if gain.requires_grad:
        return "has no gradient"
    if gain.dtype != x.dtype:
        return "takes a gain in the dtype of its input"
    given, y = x.contiguous(), torch.empty(x.shape, dtype=x.dtype)
    rows = given.numel() // size
    found.norm(given.data_ptr(), rows, size, gain.data_ptr(), eps, y.data_ptr(), _threads(rows))
    return y


def native_silu_multiply(gate_up: Tensor) -> Tensor | str:
    """SiLU(gate) * up: gate_up [..., 2 * size], gate first, to [..., size]."""
    size = gate_up.shape[-1] // 2
    found = _library(gate_up, size)
    if isinstance(found, str):
        return found
    given = gate_up.contiguous()
    y = torch.empty(*gate_up.shape[:-1], size, dtype=gate_up.dtype)
    rows = y.numel() // size
    found.gate(given.data_ptr(), rows, size, y.data_ptr(), _threads(rows))
    return y


def native_rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor | str:
    """As `runtime.layers.rope.rotate`: x [sequences, tokens, heads, head_dim], tables [tokens, head_dim / 2]."""
    sequences, tokens, heads, head_dim = x.shape
    found = _library(x, head_dim // 2)
    if isinstance(found, str):
        return found
    if cos.dtype != x.dtype or not (cos.is_contiguous() and sin.is_contiguous()) or x.stride(2) != head_dim:
        return "takes heads side by side, and contiguous tables in the dtype of its input"
    y = torch.empty(x.shape, dtype=x.dtype)
    pointers = x.data_ptr(), cos.data_ptr(), sin.data_ptr(), y.data_ptr()
    sizes = sequences, tokens, heads, head_dim // 2, x.stride(0), x.stride(1)
    found.rotate(ctypes.byref(CRotation(*pointers, *sizes)), _threads(sequences * tokens))
    return y
