"""Parts of layers on few rows of bf16, many in one call: the structures of layer.h and chain.h, and the calls.

Knows addresses and shapes; which modules become which structure is decided in `runtime.layers.native`.
"""

import ctypes
from collections.abc import Callable, Iterable, Iterator, Sequence
from ctypes import c_float, c_int32, c_int64, c_uint8, c_void_p
from typing import get_args

import torch
from torch import Tensor

from mycli.runtime.errors import ResourceError
from mycli.runtime.kernels.cpu.experts import CChoice
from mycli.runtime.kernels.cpu.library.build import Native

MOST_PARTS = 3  # of a product
_NOT_FETCHED = 3  # what a chain returns where an expert could not be read
_FETCH = ctypes.CFUNCTYPE(c_int64, c_int64, ctypes.POINTER(c_int32), c_int64, ctypes.POINTER(c_uint8))


class CProduct(ctypes.Structure):
    """`Product` of layer.h."""

    _fields_ = [
        *((name, c_void_p) for name in ("packed", "dense")),
        *((name, c_int64) for name in ("outputs", "inputs")),
    ]


class CLinear(ctypes.Structure):
    """`Linear` of layer.h."""

    _fields_ = [("parts", CProduct * MOST_PARTS), ("count", c_int64), ("outputs", c_int64), ("bias", c_void_p)]


class CGain(ctypes.Structure):
    """`Gain` of layer.h."""

    _fields_ = [("gain", c_void_p), ("size", c_int64), ("eps", c_float), ("type", c_int32), ("centred", c_int32)]


class CSum(ctypes.Structure):
    """`Sum` of layer.h."""

    _fields_ = [("norm", CGain), ("scalar", c_void_p), ("hidden", c_int64), ("residual", c_float)]


class CAttentionPart(ctypes.Structure):
    """`AttentionPart` of layer.h."""

    _fields_ = [
        *((name, CGain) for name in ("norm", "q_norm", "k_norm", "v_norm")),
        *((name, CLinear) for name in ("qkv", "o")),
        ("sum", CSum),
        ("sinks", c_void_p),
        *((name, c_int64) for name in ("heads", "kv_heads", "head_dim", "half", "window")),
        *((name, c_float) for name in ("scale", "softcap")),
        *((name, c_int32) for name in ("interleaved", "norms_rotated", "makes_keys", "makes_values")),
        ("gated", c_int64),
    ]


class CFeed(ctypes.Structure):
    """`Feed` of layer.h."""

    _fields_ = [("gate_up", CLinear), ("down", CLinear), ("size", c_int64), ("gate_type", c_int64)]


class CMlpPart(ctypes.Structure):
    """`MlpPart` of layer.h."""

    _fields_ = [("norm", CGain), ("feed", CFeed), ("sum", CSum)]


class CParallelPart(ctypes.Structure):
    """`ParallelPart` of layer.h."""

    _fields_ = [("attention", CAttentionPart), ("mlp", CMlpPart)]


class CToldPart(ctypes.Structure):
    """`ToldPart` of layer.h."""

    _fields_ = [
        ("norm", CGain),
        *((name, CLinear) for name in ("gate", "projection")),
        ("sum", CSum),
        *((name, c_int64) for name in ("first", "size", "gate_type")),
    ]


class CExpertProduct(ctypes.Structure):
    """`ExpertProduct` of experts_part.h; it holds the arrays that it is given."""

    _fields_ = [
        *((name, ctypes.POINTER(c_void_p)) for name in ("weights", "biases")),
        *((name, c_int64) for name in ("outputs", "inputs", "stored")),
    ]


class Fetch:
    """`Fetch` of experts_part.h: asks `make_ready` for the experts that a pass has hit, piece by piece.

    make_ready: of a pass the first time, with the experts hit; the places in them of those that are ready then, and
    piece by piece of all. What it raises is raised by the pass.
    """

    def __init__(self, make_ready: Callable[[Sequence[int]], Iterable[Sequence[int]]]) -> None:
        self._make_ready = make_ready
        self._pieces: Iterator[Sequence[int]] = iter(())
        self._raised: BaseException | None = None
        self.function = _FETCH(self._fetch)

    def _fetch(self, piece: int, hit: Sequence[int], hits: int, ready: list[int]) -> int:
        try:
            if not piece:
                self._pieces = iter(self._make_ready(hit[:hits]))
            places = next(self._pieces)
        except BaseException as error:  # no exception passes through C
            self._raised = error
            return 0
        for place in places:
            ready[place] = 1
        return len(places)

    def failure(self) -> BaseException | None:
        """What was raised, if anything; it is let go of."""
        error, self._raised = self._raised, None
        return error


class CExpertsPart(ctypes.Structure):
    """`ExpertsPart` of experts_part.h; `fetcher` has the function that it fetches by, where it does."""

    fetcher: Fetch | None = None

    _fields_ = [
        *((name, CGain) for name in ("norm", "router_norm", "expert_norm", "expert_output_norm")),
        *((name, CGain) for name in ("shared_norm", "shared_output_norm")),
        *(("router", CLinear), ("gate_up", CExpertProduct), ("down", CExpertProduct)),
        *(("shared", CFeed), ("shared_gate", CLinear), ("sum", CSum), ("scales", c_void_p)),
        ("choice", CChoice),
        *((name, c_int64) for name in ("experts", "size", "gate_type")),
        ("fetch", _FETCH),
    ]


class CDeltaPart(ctypes.Structure):
    """`DeltaPart` of recurrent_part.h."""

    _fields_ = [
        *((name, CGain) for name in ("norm", "head_norm")),
        *((name, CLinear) for name in ("projection", "gates", "out")),
        ("sum", CSum),
        *((name, c_void_p) for name in ("weight", "bias", "rate", "dt_bias")),
        *((name, c_int64) for name in ("taps", "heads", "key_heads", "key_dim", "value_dim", "by_key_head")),
    ]


class CConvolutionPart(ctypes.Structure):
    """`ConvolutionPart` of recurrent_part.h."""

    _fields_ = [
        ("norm", CGain),
        *((name, CLinear) for name in ("projection", "out")),
        ("sum", CSum),
        *((name, c_void_p) for name in ("weight", "bias")),
        *((name, c_int64) for name in ("channels", "taps")),
    ]


class CTurn(ctypes.Structure):
    """`Turn` of layer.h."""

    _fields_ = [("cos", c_void_p), ("sin", c_void_p), ("scale", c_void_p)]


class CPassRows(ctypes.Structure):
    """`PassRows` of layer.h; it holds the array of turns that it is given."""

    _fields_ = [
        *((name, c_void_p) for name in ("starts", "lengths", "table", "slots", "drafts")),
        ("turns", ctypes.POINTER(CTurn)),
        *((name, c_void_p) for name in ("told", "kept")),
        *((name, c_int64) for name in ("rows", "sequences", "table_width", "told_width", "by_position")),
    ]


class CPlace(ctypes.Structure):
    """`Place` of layer.h."""

    _fields_ = [
        *((name, c_void_p) for name in ("keys", "values", "key_scales", "value_scales")),
        *((name, c_int64) for name in ("blocks", "block_size", "block_stride", "head_stride", "cache_type", "turn")),
    ]


class CStatePlace(ctypes.Structure):
    """`StatePlace` of recurrent_part.h."""

    _fields_ = [*((name, c_void_p) for name in ("inputs", "matrices")), ("slots", c_int64), ("at", c_int64)]


class CHead(ctypes.Structure):
    """`Head` of chain.h."""

    _fields_ = [("norm", CGain), ("product", CLinear)]


CPart = CAttentionPart | CMlpPart | CExpertsPart | CParallelPart | CToldPart | CDeltaPart | CConvolutionPart
_KINDS: dict[type[CPart], int] = {part: kind for kind, part in enumerate(get_args(CPart))}  # `StepKind` of chain.h


class _CStep(ctypes.Structure):
    """`Step` of chain.h."""

    _fields_ = [("kind", c_int64), ("part", c_void_p), ("place", c_void_p)]


class CChain:
    """Parts in order, and a place for each that reads the cache, ready to be run in one call; it holds them."""

    def __init__(self, parts: Sequence[CPart], places: Sequence[CPlace | CStatePlace | None]) -> None:
        self.parts, self._places = tuple(parts), places
        steps = [
            _CStep(_KINDS[type(part)], ctypes.addressof(part), None if place is None else ctypes.addressof(place))
            for part, place in zip(parts, places, strict=True)
        ]
        self.steps = (_CStep * len(steps))(*steps), len(steps)  # as native code takes them

    def __call__(self, library: Native, rows: CPassRows, x: Tensor) -> Tensor:
        """The stream x [..., hidden], bf16 and contiguous, through all parts. The cache takes keys, values and states.

        Raises ValueError where lengths, blocks or slots cannot be, and what fetching experts raises.
        """
        out = torch.empty_like(x)
        asked = *self.steps, ctypes.byref(rows), x.data_ptr(), out.data_ptr()
        self.check(library.run_parts(*asked, torch.get_num_threads()), rows)
        return out

    def check(self, failed: int, rows: CPassRows) -> None:
        """Raise what native code says went wrong, 0 for nothing, in a pass over `rows`."""
        if failed == 1:
            raise ResourceError(f"no memory for a pass of {rows.rows} rows", code="less-context")
        if failed == _NOT_FETCHED:
            fetchers = (part.fetcher for part in self.parts if isinstance(part, CExpertsPart))
            raise next(error for one in fetchers if one is not None and (error := one.failure()) is not None)
        if failed:
            raise ValueError("the lengths do not fit the blocks, or slots those that there are")


def run_head(library: Native, head: CHead, x: Tensor) -> Tensor:
    """The stream x [rows, hidden], bf16 and contiguous, normed and multiplied: bf16 [rows, vocab]."""
    out = x.new_empty(len(x), head.product.outputs)
    asked = ctypes.byref(head), len(x), x.data_ptr(), out.data_ptr()
    if library.run_head(*asked, torch.get_num_threads()):
        raise ResourceError(f"no memory for the logits of {len(x)} rows", code="less-context")
    return out
