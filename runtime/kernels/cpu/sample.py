"""A softmax and a draw from it on the CPU by our own code: in one call what are a dozen operations of torch.

Beside a large model's pass, which leaves nothing in the caches, each of those takes longer to begin than to do. The
code is draw.h.
"""

import torch
from torch import Tensor

from mycli.runtime.kernels.cpu import build


def softmax_draw(logits: Tensor, number: float, out: Tensor) -> int | str:
    """Probabilities of fp32 logits [1, vocab] to `out`, alike; the token at which their sum passes the share `number`.

    0 <= number < 1 - 2^-50; -inf is no chance. `vocab` where the logits are not numbers. The reason where this
    code cannot.
    """
    for one in (logits, out):
        if one.device.type != "cpu" or one.dtype != torch.float32 or len(one) != 1 or one.stride(1) != 1:
            return "takes one contiguous row of fp32 on the CPU"
    found = build.native()
    if isinstance(found, str):
        return found
    return found.softmax_draw(logits.data_ptr(), logits.shape[1], number, out.data_ptr())
