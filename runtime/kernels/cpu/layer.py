"""Calls into C++ that run whole layer parts on few bf16 rows; the structures are those of layer.h and chain.h."""

import ctypes
from collections.abc import Callable, Iterable, Iterator, Sequence
from ctypes import c_float, c_int32, c_int64, c_uint8, c_void_p
from typing import NoReturn, get_args

import torch
from torch import Tensor

from mycli.runtime.errors import ResourceError
from mycli.runtime.kernels.cpu.experts import CChoice
from mycli.runtime.kernels.cpu.library.build import Native

# Each C* structure mirrors the C++ structure of the same name without the C in rowwise.h, layer.h, experts_part.h,
# recurrent_part.h, chain.h or loop.h: same fields, same order.
MAX_PRODUCTS = 3  # products side by side in one linear (query, key and value)
_NO_MEMORY, _NOT_FETCHED = 1, 3  # return codes of a chain
_FETCH = ctypes.CFUNCTYPE(c_int64, c_int64, ctypes.POINTER(c_int32), c_int64, ctypes.POINTER(c_uint8))


class CProduct(ctypes.Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("packed", "dense", "table")),
        *((name, c_int64) for name in ("outputs", "inputs", "portable")),
    ]


class CLinear(ctypes.Structure):
    _fields_ = [("parts", CProduct * MAX_PRODUCTS), ("count", c_int64), ("outputs", c_int64), ("bias", c_void_p)]


class CNormParams(ctypes.Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("gain", "bias")),
        ("size", c_int64),
        ("eps", c_float),
        *((name, c_int32) for name in ("type", "centred")),
    ]


class CResidualAdd(ctypes.Structure):
    _fields_ = [("norm", CNormParams), ("scalar", c_void_p), ("hidden", c_int64), ("multiplier", c_float)]


class CAttentionPart(ctypes.Structure):
    _fields_ = [
        *((name, CNormParams) for name in ("norm", "q_norm", "k_norm", "v_norm")),
        *((name, CLinear) for name in ("qkv", "o")),
        ("residual", CResidualAdd),
        ("sinks", c_void_p),
        *((name, c_int64) for name in ("heads", "kv_heads", "head_dim", "half", "window")),
        *((name, c_float) for name in ("scale", "softcap")),
        *((name, c_int32) for name in ("interleaved", "norms_rotated", "makes_keys", "makes_values")),
        *((name, c_int64) for name in ("gated", "portable")),
    ]


class CFeedForward(ctypes.Structure):
    _fields_ = [
        *((name, CLinear) for name in ("gate_up", "down")),
        *(("size", c_int64), ("gate_type", c_int32), ("gate_scale", c_float)),
    ]


class CMlpPart(ctypes.Structure):
    _fields_ = [("norm", CNormParams), ("feed", CFeedForward), ("residual", CResidualAdd)]


class CParallelPart(ctypes.Structure):
    _fields_ = [("attention", CAttentionPart), ("mlp", CMlpPart)]


class CPerLayerPart(ctypes.Structure):
    _fields_ = [
        ("norm", CNormParams),
        *((name, CLinear) for name in ("gate", "projection")),
        ("residual", CResidualAdd),
        *((name, c_int64) for name in ("offset", "size", "gate_type")),
    ]


class CExpertProduct(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.POINTER(c_void_p)) for name in ("weights", "biases")),
        *((name, c_int64) for name in ("outputs", "inputs", "stored")),
    ]


class Fetch:
    """The callback from C++ that reads the experts chosen by a pass into memory, batch by batch.

    `load(experts)` yields, for each batch, the indices into `experts` that are now in memory. The pass raises an
    exception of `load` again (`take_error`).
    """

    def __init__(self, load: Callable[[Sequence[int]], Iterable[Sequence[int]]]) -> None:
        self._load = load
        self._batches: Iterator[Sequence[int]] = iter(())
        self._error: BaseException | None = None
        self.function = _FETCH(self._fetch)

    def _fetch(self, batch: int, experts: Sequence[int], count: int, ready: list[int]) -> int:
        try:
            if not batch:
                self._batches = iter(self._load(experts[:count]))
            loaded = next(self._batches)
        except BaseException as error:  # an exception must not pass through C
            self._error = error
            return 0
        for index in loaded:
            ready[index] = 1
        return len(loaded)

    def take_error(self) -> BaseException | None:
        """Return and clear the exception of the last fetch."""
        error, self._error = self._error, None
        return error


class CExpertsPart(ctypes.Structure):
    fetcher: Fetch | None = None

    _fields_ = [
        *((name, CNormParams) for name in ("norm", "router_norm", "expert_norm", "expert_output_norm")),
        *((name, CNormParams) for name in ("shared_norm", "shared_output_norm")),
        *(("router", CLinear), ("gate_up", CExpertProduct), ("down", CExpertProduct)),
        *(("shared", CFeedForward), ("shared_gate", CLinear), ("residual", CResidualAdd), ("scales", c_void_p)),
        ("choice", CChoice),
        *((name, c_int64) for name in ("experts", "size", "gate_type")),
        ("fetch", _FETCH),
    ]


class CDeltaPart(ctypes.Structure):
    _fields_ = [
        *((name, CNormParams) for name in ("norm", "head_norm")),
        *((name, CLinear) for name in ("projection", "gates", "out")),
        ("residual", CResidualAdd),
        *((name, c_void_p) for name in ("weight", "bias", "rate", "dt_bias")),
        *((name, c_int64) for name in ("taps", "heads", "key_heads", "key_dim", "value_dim", "by_key_head")),
        ("beta_scale", c_float),
    ]


class CChannelDeltaPart(ctypes.Structure):
    _fields_ = [
        *((name, CNormParams) for name in ("norm", "head_norm")),
        *((name, CLinear) for name in ("projection", "gates", "decay_b", "gate_b", "out")),
        ("residual", CResidualAdd),
        *((name, c_void_p) for name in ("weight", "bias", "rate", "dt_bias")),
        *((name, c_int64) for name in ("taps", "heads", "head_dim")),
        ("floor", c_float),
    ]


class CMambaPart(ctypes.Structure):
    _fields_ = [
        *((name, CNormParams) for name in ("norm", "gated_norm")),
        *((name, CLinear) for name in ("projection", "out")),
        ("residual", CResidualAdd),
        *((name, c_void_p) for name in ("weight", "bias", "rate", "dt_bias", "skip")),
        *((name, c_int64) for name in ("taps", "heads", "groups", "head_dim", "state_dim", "norm_groups")),
        *((name, c_float) for name in ("low", "high")),
        ("multipliers", c_float * 5),
    ]


class CSelectivePart(ctypes.Structure):
    _fields_ = [
        *((name, CNormParams) for name in ("norm", "step_norm", "key_norm", "query_norm")),
        *((name, CLinear) for name in ("projection", "select", "step", "out")),
        ("residual", CResidualAdd),
        *((name, c_void_p) for name in ("weight", "bias", "rate", "dt_bias", "skip")),
        *((name, c_int64) for name in ("taps", "channels", "state_dim")),
    ]


class CParallelMixersPart(ctypes.Structure):
    _fields_ = [("attention", CAttentionPart), ("mamba", CMambaPart)]


class CConvolutionPart(ctypes.Structure):
    _fields_ = [
        ("norm", CNormParams),
        *((name, CLinear) for name in ("projection", "out")),
        ("residual", CResidualAdd),
        *((name, c_void_p) for name in ("weight", "bias")),
        *((name, c_int64) for name in ("channels", "taps")),
    ]


class CLatentPart(ctypes.Structure):
    _fields_ = [
        *((name, CNormParams) for name in ("norm", "q_norm", "kv_norm")),
        *((name, CLinear) for name in ("inputs", "q_b", "gate", "o")),
        ("residual", CResidualAdd),
        *((name, c_void_p) for name in ("keys", "values")),
        *((name, c_int64) for name in ("heads", "rank", "nope", "rope", "value", "rotates", "interleaved")),
        ("portable", c_int64),
        ("scale", c_float),
    ]


class CRotation(ctypes.Structure):
    _fields_ = [("cos", c_void_p), ("sin", c_void_p), ("scale", c_void_p)]


class CPassRows(ctypes.Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("starts", "lengths", "table", "window_table", "slots", "drafts")),
        ("rotations", ctypes.POINTER(CRotation)),
        *((name, c_void_p) for name in ("per_layer_inputs", "draft_inputs")),
        *((name, c_int64) for name in ("rows", "sequences", "table_width", "per_layer_stride", "by_position")),
    ]


class CLayerCache(ctypes.Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("keys", "values", "key_scales", "value_scales")),
        *(
            (name, c_int64)
            for name in ("blocks", "block_size", "block_stride", "head_stride", "cache_type", "rotation", "windowed")
        ),
    ]


class CLayerStates(ctypes.Structure):
    _fields_ = [*((name, c_void_p) for name in ("inputs", "matrices")), ("slots", c_int64), ("draft_offset", c_int64)]


class CMixerCaches(ctypes.Structure):
    _fields_ = [("attention", CLayerCache), ("mamba", CLayerStates)]


class CHead(ctypes.Structure):
    _fields_ = [("norm", CNormParams), ("product", CLinear)]


class CLoop(ctypes.Structure):
    _fields_ = [
        ("embedding", c_void_p),
        *((name, c_int64) for name in ("hidden", "choices")),
        ("stops", c_void_p),
        ("stop_count", c_int64),
        *((name, c_float) for name in ("embedding_scale", "logit_scale")),
    ]


CPart = (
    CAttentionPart
    | CMlpPart
    | CExpertsPart
    | CParallelPart
    | CPerLayerPart
    | CDeltaPart
    | CConvolutionPart
    | CLatentPart
    | CMambaPart
    | CChannelDeltaPart
    | CParallelMixersPart
    | CSelectivePart
)
CPlace = CLayerCache | CLayerStates | CMixerCaches  # where a part finds its keys and values, or its states
_KINDS: dict[type[CPart], int] = {part: kind for kind, part in enumerate(get_args(CPart))}  # `StepKind` of chain.h


class _CStep(ctypes.Structure):
    _fields_ = [("kind", c_int64), ("part", c_void_p), ("cache", c_void_p)]


class CChain:
    """Layer parts in order, each with the cache that it reads, run in one call; keeps all its structures alive."""

    def __init__(self, parts: Sequence[CPart], caches: Sequence[CPlace | None]) -> None:
        self.parts, self._caches = tuple(parts), caches
        steps = [
            _CStep(_KINDS[type(part)], ctypes.addressof(part), None if cache is None else ctypes.addressof(cache))
            for part, cache in zip(parts, caches, strict=True)
        ]
        self.steps = (_CStep * len(steps))(*steps), len(steps)  # the first two arguments of the C++ functions

    def __call__(self, library: Native, rows: CPassRows, x: Tensor) -> Tensor:
        """Run the parts on the residual stream x [..., hidden], contiguous bf16, and fill the cache.

        Raises ValueError if lengths, blocks or slots are out of range, ResourceError without memory, and whatever
        loading an expert raises.
        """
        out = torch.empty_like(x)
        arguments = *self.steps, ctypes.byref(rows), x.data_ptr(), out.data_ptr()
        if status := library.run_parts(*arguments, torch.get_num_threads()):
            self.raise_error(status, rows)
        return out

    def raise_error(self, status: int, rows: CPassRows) -> NoReturn:
        """Raise the error for a nonzero `status` that a C++ pass over `rows` returned."""
        if status == _NO_MEMORY:
            raise ResourceError(f"no memory for a pass of {rows.rows} rows", code="less-context")
        if status == _NOT_FETCHED:
            for part in self.parts:
                fetcher = part.fetcher if isinstance(part, CExpertsPart) else None
                if fetcher is not None and (error := fetcher.take_error()) is not None:
                    raise error
        raise ValueError("sequence lengths do not fit their cache blocks, or a state slot does not exist")


def run_head(library: Native, head: CHead, x: Tensor) -> Tensor:
    """Return the bf16 logits [rows, vocab] of the residual stream x [rows, hidden], contiguous bf16."""
    out = x.new_empty(len(x), head.product.outputs)
    arguments = ctypes.byref(head), len(x), x.data_ptr(), out.data_ptr()
    if library.run_head(*arguments, torch.get_num_threads()):
        raise ResourceError(f"no memory for the logits of {len(x)} rows", code="less-context")
    return out


def run_passes(
    library: Native, chain: CChain, head: CHead, loop: CLoop, rows: CPassRows, tokens: Sequence[int], passes: int
) -> list[list[int]]:
    """Return the greedy tokens [passes][sequences] that follow `tokens`, one of each sequence of `rows`.

    Ends early after a pass with a stop token, or with -1 for logits that are NaN or infinite. Keys and values of the
    tokens that were passes' inputs go to the cache. Raises the errors of `CChain`.
    """
    done, memory = c_int64(), (c_int64 * (len(tokens) * (passes + 1)))(*tokens)
    arguments = ctypes.byref(rows), ctypes.byref(head), ctypes.byref(loop), passes, memory, ctypes.byref(done)
    if status := library.run_passes(*chain.steps, *arguments, torch.get_num_threads()):
        chain.raise_error(status, rows)
    count = len(tokens)
    chosen = list(memory)[count : count * (done.value + 1)]
    return [chosen[start : start + count] for start in range(0, len(chosen), count)]
