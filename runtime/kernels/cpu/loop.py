"""Passes over the tokens that passes chose, several in one call: the structure of loop.h, and the call.

Knows addresses and shapes; whether anybody has to look at a token before the next one is made is the caller's to know.
"""

import ctypes
from collections.abc import Sequence
from ctypes import c_float, c_int64, c_void_p

import torch

from mycli.runtime.kernels.cpu.layer import CChain, CHead, CPassRows
from mycli.runtime.kernels.cpu.library.build import Native


class CLoop(ctypes.Structure):
    """`Loop` of loop.h."""

    _fields_ = [
        ("embedding", c_void_p),
        *((name, c_int64) for name in ("hidden", "choices")),
        ("stops", c_void_p),
        ("stop_count", c_int64),
        *((name, c_float) for name in ("embedding_scale", "logit_scale")),
    ]


def run_passes(
    library: Native, chain: CChain, head: CHead, loop: CLoop, rows: CPassRows, tokens: Sequence[int], passes: int
) -> list[list[int]]:
    """The likeliest tokens [passes][sequences] after `tokens`, one of each sequence of `rows`, each pass over those
    of the pass before; -1 for logits that are no numbers, and fewer passes after that or a stop.

    The cache takes the keys and values of what the passes were over. Raises what `CChain` raises.
    """
    made, room = c_int64(), (c_int64 * (len(tokens) * (passes + 1)))(*tokens)
    asked = ctypes.byref(rows), ctypes.byref(head), ctypes.byref(loop), passes, room, ctypes.byref(made)
    chain.check(library.run_passes(*chain.steps, *asked, torch.get_num_threads()), rows)
    count = len(tokens)
    found = list(room)[count : count * (made.value + 1)]
    return [found[at : at + count] for at in range(0, len(found), count)]
