"""What recurrent layers have in place of attention by our own code on the CPU, whole: which it takes, and its states.

As `runtime.layers.native` for the other parts. Where tokens are drafted states stay as they were, and what they are to
go on by is kept for whoever settles them. Does not know the recurrence.
"""

from collections.abc import Sequence

import torch

from mycli.runtime.cache.kv_cache import KVCache
from mycli.runtime.errors import Declined
from mycli.runtime.kernels.cpu.layer import CConvolutionPart, CDeltaPart, CLayerStates
from mycli.runtime.kernels.cpu.recurrent import decline_convolution, decline_delta
from mycli.runtime.layers.native.parts import NativePass, ReadyPart
from mycli.runtime.layers.native.tensors import Around, NotNative, c_linear, c_norm, c_residual, pointer
from mycli.runtime.layers.recurrent import Convolution, DeltaNet, ShortConv, wait_for_drafts

CRecurrentPart = CDeltaPart | CConvolutionPart


def _taken(why: Declined | None) -> None:
    if why is not None:
        raise NotNative(why)


def _convolution(convolution: Convolution) -> tuple[int | None, int | None]:
    taps, channels = convolution.weight.shape
    _taken(decline_convolution(channels, taps))
    return pointer(convolution.weight), pointer(convolution.bias)


def _delta_part(mixer: DeltaNet, around: Around) -> CDeltaPart:
    spec, head_norm = mixer.spec, c_norm(mixer.norm)
    _taken(decline_delta(mixer.sizes))
    if mixer.norm.weight.dtype != torch.bfloat16:
        raise NotNative("takes norms of heads with gains of bf16")
    return CDeltaPart(
        c_norm(around.norm),
        head_norm,
        *(c_linear(linear) for linear in (mixer.projection, mixer.gates, mixer.out)),
        c_residual(around),
        *_convolution(mixer.convolution),
        *(pointer(one) for one in (mixer.rate, mixer.dt_bias)),
        taps=spec.convolution.taps,
        heads=spec.heads,
        key_heads=spec.key_heads,
        key_dim=spec.key_dim,
        value_dim=spec.value_dim,
        by_key_head=spec.by_key_head,
    )


def recurrent_part(mixer: DeltaNet | ShortConv, around: Around) -> CRecurrentPart:
    """A mixer as recurrent_part.h has it. Raises NotNative."""
    if isinstance(mixer, DeltaNet):
        return _delta_part(mixer, around)
    return CConvolutionPart(
        c_norm(around.norm),
        *(c_linear(linear) for linear in (mixer.projection, mixer.out)),
        c_residual(around),
        *_convolution(mixer.convolution),
        channels=mixer.spec.convolution.channels,
        taps=mixer.spec.convolution.taps,
    )


class StatesOfRun:
    """The states that parts of one call, `ready`, keep; and how they go on where tokens are drafted."""

    def __init__(self, ready: Sequence[ReadyPart]) -> None:
        self._mixers = [(one.layer, one.mixer) for one in ready if one.mixer is not None and one.layer is not None]
        self._width = sum(sum(mixer.widths) for _, mixer in self._mixers)

    @property
    def kept(self) -> bool:
        """Whether any of them keeps a state."""
        return bool(self._mixers)

    def place(self, ready: ReadyPart, cache: KVCache) -> CLayerStates:
        """Where a part finds the states of its layer."""
        before = 0
        for layer, mixer in self._mixers:
            if layer == ready.layer:
                break
            before += sum(mixer.widths)
        assert ready.layer is not None
        states = cache.states.layer(ready.layer)
        return CLayerStates(*map(pointer, (*states, None)[:2]), cache.states.slots, before)

    def keep(self, native: NativePass) -> torch.Tensor | None:
        """Room for what states are to go on by, shown to native code; None where nothing is drafted."""
        kept = None
        if native.drafted and self._width:
            kept = torch.empty(native.rows.rows * self._width, dtype=torch.bfloat16)
        native.rows.draft_inputs = pointer(kept)
        return kept

    def wait(self, native: NativePass, kept: torch.Tensor | None) -> None:
        """The states of drafted sequences go on, by what has been kept, once it is known how many tokens stand."""
        store, rows, at = native.cache.states, native.rows.rows, 0
        for layer, mixer in () if kept is None else self._mixers:
            parts = []
            for width in mixer.widths:
                assert kept is not None
                parts.append(kept[at * rows : (at + width) * rows].view(1, rows, width))
                at += width
            for span in native.drafted:
                wait_for_drafts(store, span, tuple(parts), store.layer(layer), mixer.advance)
