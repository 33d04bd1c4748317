"""What lies between the products of a few tokens on the CPU by our own code: norm, rotation, activation.

Beside weights that leave nothing in the caches, each operation of torch takes longer to begin than to do, and these are
a dozen and a half of them a layer. The code is steps.h; it rounds where torch does. Each function is None where this
code cannot, and torch is to do it; `library` takes the place of this machine's.
"""

import ctypes

import torch
from torch import Tensor

from mycli.runtime.kernels.cpu.build import CRotation, Native, native

FEW = 16  # tokens, of all sequences together; from there on torch's threads pay
_LANES = 16


def _library(x: Tensor, width: int, given: Native | None) -> Native | None:
    """For x [sequences, tokens, ...] bf16 in rows of `width`."""
    if x.dtype != torch.bfloat16 or x.device.type != "cpu" or x.dim() < 3 or x.shape[0] * x.shape[1] > FEW:
        return None
    if width % _LANES or x.stride(-1) != 1 or x.requires_grad:
        return None
    found = given or native()
    return None if isinstance(found, str) else found


def rms_norm(x: Tensor, gain: Tensor, eps: float, library: Native | None = None) -> Tensor | None:
    """x [sequences, tokens, ..., size] to the same; gain [size] in the dtype of x."""
    size = x.shape[-1]
    found = _library(x, size, library)
    if found is None or gain.dtype != x.dtype:
        return None
    given, y = x.contiguous(), torch.empty(x.shape, dtype=x.dtype)
    found.norm(given.data_ptr(), given.numel() // size, size, gain.data_ptr(), eps, y.data_ptr())
    return y


def silu_multiply(gate_up: Tensor, library: Native | None = None) -> Tensor | None:
    """SiLU(gate) * up: gate_up [sequences, tokens, 2 * size], gate first, to [sequences, tokens, size]."""
    size = gate_up.shape[-1] // 2
    found = _library(gate_up, size, library)
    if found is None:
        return None
    given = gate_up.contiguous()
    y = torch.empty(*gate_up.shape[:-1], size, dtype=gate_up.dtype)
    found.gate(given.data_ptr(), y.numel() // size, size, y.data_ptr())
    return y


def rotate_few(x: Tensor, cos: Tensor, sin: Tensor, library: Native | None = None) -> Tensor | None:
    """As `runtime.layers.rope.rotate`: x [sequences, tokens, heads, head_dim], tables [tokens, head_dim / 2]."""
    sequences, tokens, heads, head_dim = x.shape
    found = _library(x, head_dim // 2, library)
    tables = cos.dtype == x.dtype and cos.is_contiguous() and sin.is_contiguous()
    if found is None or not tables or x.stride(2) != head_dim:
        return None
    y = torch.empty(x.shape, dtype=x.dtype)
    pointers = x.data_ptr(), cos.data_ptr(), sin.data_ptr(), y.data_ptr()
    sizes = sequences, tokens, heads, head_dim // 2, x.stride(0), x.stride(1)
    found.rotate(ctypes.byref(CRotation(*pointers, *sizes)))
    return y
