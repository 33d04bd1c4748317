"""Parts of layers by our own code on the CPU, whole: which of them it takes, and what one pass tells them.

A pass of few tokens spends its time on getting from one small step to the next. So parts run in one call, one after
another, where each of their steps has native code, with the bits that the steps have one by one. Does not know which
parts follow each other (`runtime.layers.chain`), or what a layer is.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from ctypes import addressof, c_int32, c_uint8
from dataclasses import dataclass
from operator import is_not
from typing import Generic, TypeVar

import torch
from torch import Tensor

from mycli.runtime.cache.kv_cache import PACKED, KVCache
from mycli.runtime.errors import Declined
from mycli.runtime.kernels.cpu.attention import CACHE_TYPES, FOREVER
from mycli.runtime.kernels.cpu.elementwise import GATE_TYPES
from mycli.runtime.kernels.cpu.layer import (
    CAttentionPart,
    CFeedForward,
    CHead,
    CLayerCache,
    CMlpPart,
    CPart,
    CPassRows,
    CPerLayerPart,
    CRotation,
)
from mycli.runtime.kernels.cpu.library import build
from mycli.runtime.kernels.cpu.library.build import Native
from mycli.runtime.layers.batch import Batch
from mycli.runtime.layers.linear import Changes, Linear
from mycli.runtime.layers.native.tensors import Around, NotNative, c_linear, c_norm, c_residual, pointer, vectors
from mycli.runtime.layers.norm import RMSNorm
from mycli.runtime.layers.recurrent import DeltaNet, ShortConv
from mycli.runtime.layers.rope import Rope
from mycli.runtime.models.experts_spec import ExpertsSpec
from mycli.runtime.models.layer_spec import PerLayerSpec
from mycli.runtime.models.part_spec import AttentionSpec, MlpSpec, RopeSpec

NATIVE_ROWS = 64  # of a pass: the steps of many take longer than getting from one to the next

_T = TypeVar("_T")


def attention_part(
    spec: AttentionSpec,
    around: Around,
    norms: tuple[RMSNorm | None, ...],
    qkv: Linear,
    o: Linear,
    sinks: Tensor | None,
) -> CAttentionPart:
    """Attention as layer.h has it; `norms` of queries, keys and values, `sinks` fp32. Raises NotNative."""
    rope = spec.rope
    if spec.clip is not None:
        raise NotNative("takes no clips")
    half = 0 if rope is None else vectors(rope.dim // 2, "what is turned of a head")
    return CAttentionPart(
        c_norm(around.norm),
        *(c_norm(norm) for norm in norms),
        c_linear(qkv),
        c_linear(o),
        c_residual(around),
        pointer(sinks),
        heads=spec.heads,
        kv_heads=spec.kv_heads,
        head_dim=vectors(spec.head_dim, "a head"),
        half=half,
        window=FOREVER if spec.window is None else spec.window,
        scale=spec.head_dim**-0.5 if spec.scale is None else spec.scale,
        softcap=spec.softcap or 0.0,
        interleaved=rope is not None and rope.interleaved,
        norms_rotated=spec.norm_after_rope,
        makes_keys=spec.kv_source is None,
        makes_values=spec.has_v_proj,
        gated=spec.gated,
    )


def gate_type(spec: MlpSpec | ExpertsSpec | PerLayerSpec) -> int:
    """`GateType` of steps.h. Raises NotNative."""
    if spec.activation not in GATE_TYPES or (spec.activation == "relu2" and not isinstance(spec, MlpSpec)):
        raise NotNative("takes SiLU and GELU of a gate, and squared ReLU in an MLP")
    return GATE_TYPES[spec.activation]


def per_layer_part(spec: PerLayerSpec, around: Around, layer: int, gate: Linear, projection: Linear) -> CPerLayerPart:
    """What a layer is told of its tokens as layer.h has it. Raises NotNative."""
    size, products = vectors(spec.gate.out_features, "what a layer is told"), (c_linear(gate), c_linear(projection))
    return CPerLayerPart(c_norm(around.norm), *products, c_residual(around), layer * size, size, gate_type(spec))


def feed(spec: MlpSpec, gate_up: Linear, down: Linear) -> CFeedForward:
    """An MLP by itself, as layer.h has it. Raises NotNative."""
    return CFeedForward(c_linear(gate_up), c_linear(down), vectors(spec.size, "an MLP"), gate_type(spec))


def mlp_part(spec: MlpSpec, around: Around, gate_up: Linear, down: Linear) -> CMlpPart:
    """An MLP as layer.h has it. Raises NotNative."""
    return CMlpPart(c_norm(around.norm), feed(spec, gate_up, down), c_residual(around))


def head_part(norm: RMSNorm, head: Linear) -> CHead:
    """What comes after the last layer, as chain.h has it. Raises NotNative."""
    return CHead(c_norm(norm), c_linear(head))


class NativePart(Generic[_T]):
    """A part made ready for native code, once; and again where what it is made of has been replaced.

    `norms`, `products`: all whose tensors may be, but for products that have `changes` in common; `others`: attributes
    with other tensors. Looked at in every pass, and so without detours.
    """

    def __init__(
        self,
        norms: Sequence[RMSNorm],
        products: Sequence[Linear],
        changes: Changes | None = None,
        others: Sequence[tuple[object, str]] = (),
    ) -> None:
        self.watched: list[tuple[object, str]] = [*others, *((norm, "weight") for norm in norms)]
        self.watched += [(linear, name) for linear in products for name in ("matmuls", "bias")]
        self.watched += [] if changes is None else [(changes, "last")]
        self._made_of: list[object] = []
        self._part: _T | None = None

    def get(self, make: Callable[[], _T]) -> _T | None:
        """The part, as `make` makes it; None where native code does not take it."""
        now = [getattr(one, name) for one, name in self.watched]
        if not self._made_of or any(map(is_not, self._made_of, now)):
            self._made_of = now  # held, so that nothing new can stand where these stood
            try:
                self._part = make()
            except NotNative:
                self._part = None
        return self._part


def native_code(x: Tensor) -> Native | None:
    """The code that takes rows x [T, hidden] of the stream; None where there is none, or they are too many."""
    if x.dtype != torch.bfloat16 or len(x) > NATIVE_ROWS or not x.is_cpu or torch.is_grad_enabled():
        return None
    found = build.native()
    return None if isinstance(found, Declined) else found


@dataclass(frozen=True)
class ReadyPart:
    """A part as native code has it. Of attention: which layer's keys and values it reads, and how its heads turn; of
    what keeps a state: which layer's, and by what it goes on."""

    part: CPart
    layer: int | None = None
    rope: RopeSpec | None = None
    mixer: DeltaNet | ShortConv | None = None


class Preparable(ABC):
    """What native code may take whole, once it has been made ready for it."""

    _prepared: NativePart[CPart]

    @abstractmethod
    def prepare(self) -> CPart:
        """As native code has it. Raises NotNative."""

    def placed(self, part: CPart) -> ReadyPart:
        """`part` with what says where it finds the keys, values or states that it reads."""
        return ReadyPart(part)

    def ready(self) -> ReadyPart | None:
        """As native code has it, made once; None where it does not take this."""
        part = self._prepared.get(self.prepare)
        return None if part is None else self.placed(part)

    @property
    def watched(self) -> Sequence[tuple[object, str]]:
        """The attributes of objects that `ready` depends on."""
        return self._prepared.watched


class NativePass:
    """One pass of few bf16 rows on the CPU, as native parts see it: whose rows they are, how they turn, the cache."""

    def __init__(self, library: Native, batch: Batch, cache: KVCache, rope: Rope, told: Tensor | None) -> None:
        self.library, self.batch, self.cache = library, batch, cache
        every = rope.every(max([span.length for span in batch.spans]))
        tables = rope.rows(batch.spans) if every is None else every
        self.rotations = tuple(tables)
        turns = [CRotation(*map(pointer, (one.cos, one.sin, one.query_scale))) for one in tables.values()]
        starts, lengths = batch.starts_and_lengths
        table, width = batch.padded_blocks
        slots, self.drafted = [span.state for span in batch.spans], [span for span in batch.spans if span.drafted]
        drafts = (c_uint8 * len(slots))(*(span.drafted > 0 for span in batch.spans))
        held = [(c_int32 * len(each))(*each) for each in (starts, lengths, table, slots)]
        self._held = held, drafts, tables, told  # the addresses below are theirs
        shape = starts[-1], len(lengths), width, 0 if told is None else told.stride(1)
        addresses = (*map(addressof, held), addressof(drafts), (CRotation * len(turns))(*turns), pointer(told), None)
        self.rows = CPassRows(*addresses, *shape, every is not None)

    @classmethod
    def make(
        cls, x: Tensor, batch: Batch, cache: KVCache, rope: Rope, told: Tensor | None = None
    ) -> "NativePass | None":
        """For the stream x [1, T, hidden], layers being `told` [1, T, layers, width]; None where native code does not
        take the pass."""
        if cache.dtype not in (torch.bfloat16, torch.int8, PACKED):
            return None
        library = native_code(x[0])
        return None if library is None else cls(library, batch, cache, rope, told)

    def place(self, ready: ReadyPart) -> CLayerCache:
        """Where attention finds the keys and values of its layer."""
        assert ready.layer is not None
        keys, values = self.cache.all(ready.layer)
        strides = keys.data.stride()
        return CLayerCache(
            *map(pointer, (keys.data, values.data, keys.scales, values.scales)),
            keys.data.shape[0],
            keys.data.shape[2],
            strides[0],
            strides[1],
            CACHE_TYPES[keys.data.dtype],
            0 if ready.rope is None else self.rotations.index(ready.rope),
        )
