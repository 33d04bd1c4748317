"""The likeliest token, and a softmax and a draw from it, on the CPU by our own code: one call for a dozen of torch's.

Beside a large model's pass, which leaves nothing in the caches, each of those takes longer to begin than to do. The
code is draw.h.
"""

from ctypes import c_int64

import torch
from torch import Tensor

from mycli.runtime.errors import Declined
from mycli.runtime.kernels.cpu.library import build

_LOGITS = Declined("logits-not-fp32-rows")
_ONE_ROW = Declined("logits-not-one-fp32-row")


def best_tokens(logits: Tensor) -> list[int | None] | Declined:
    """The likeliest token of each row of fp32 logits [rows, vocab], the lowest id among equals; the reason where this
    code cannot say.

    None for a row with NaN or infinity, or with nothing but -inf.
    """
    if logits.device.type != "cpu" or logits.dtype != torch.float32 or logits.stride(1) != 1:
        return _LOGITS
    native = build.native()
    if isinstance(native, Declined):
        return native
    rows, vocab = logits.shape
    found = (c_int64 * rows)()
    native.best(logits.data_ptr(), rows, logits.stride(0), vocab, found, torch.get_num_threads())
    return [None if token < 0 else token for token in found]


def softmax_draw(logits: Tensor, number: float, out: Tensor) -> int | Declined:
    """Probabilities of fp32 logits [1, vocab] to `out`, alike; the token at which their sum passes the share `number`.

    0 <= number < 1 - 2^-50; -inf is no chance. `vocab` where the logits are not numbers. The reason where this
    code cannot.
    """
    for one in (logits, out):
        if one.device.type != "cpu" or one.dtype != torch.float32 or len(one) != 1 or one.stride(1) != 1:
            return _ONE_ROW
    found = build.native()
    if isinstance(found, Declined):
        return found
    return found.softmax_draw(logits.data_ptr(), logits.shape[1], number, out.data_ptr())
