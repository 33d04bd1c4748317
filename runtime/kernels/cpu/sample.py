"""The likeliest token, and softmax with a draw from it, on the CPU in C++ (draw.h)."""

from ctypes import c_int64

import torch
from torch import Tensor

from mycli.runtime.errors import Declined
from mycli.runtime.kernels.cpu.library import build

# One call replaces a dozen torch operations, each of which takes longer to start than to run after the pass of a large
# model, which leaves nothing in the caches.
_LOGITS = Declined("logits-not-fp32-rows")
_ONE_ROW = Declined("logits-not-one-fp32-row")


def best_tokens(logits: Tensor) -> list[int | None] | Declined:
    """Return the likeliest token of each row of fp32 logits [rows, vocab], the lowest id among equals.

    None for a row with NaN or infinity, or with nothing but -inf.
    """
    if logits.device.type != "cpu" or logits.dtype != torch.float32 or logits.stride(1) != 1:
        return _LOGITS
    library = build.native()
    if isinstance(library, Declined):
        return library
    rows, vocab = logits.shape
    tokens = (c_int64 * rows)()
    library.best(logits.data_ptr(), rows, logits.stride(0), vocab, tokens, torch.get_num_threads())
    return [None if token < 0 else token for token in tokens]


def softmax_draw(logits: Tensor, number: float, out: Tensor) -> int | Declined:
    """Write the softmax of fp32 logits [1, vocab] to `out` and return the token at which its sum passes `number`.

    0 <= number < 1 - 2^-50. Returns `vocab` if a logit is NaN or infinity, or all are -inf.
    """
    for row in (logits, out):
        if row.device.type != "cpu" or row.dtype != torch.float32 or len(row) != 1 or row.stride(1) != 1:
            return _ONE_ROW
    library = build.native()
    if isinstance(library, Declined):
        return library
    return library.softmax_draw(logits.data_ptr(), logits.shape[1], number, out.data_ptr())
