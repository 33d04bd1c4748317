"""The layers of a decoder in order, for a pass: parts that follow each other in one native call, the rest by steps.

Knows the parts of layers, and when what they are made of has been replaced; does not know what any of them computes.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from operator import is_not
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from mycli.runtime.cache.kv_cache import KVCache
from mycli.runtime.kernels.cpu.layer import CChain, CLayerCache, CLayerStates
from mycli.runtime.layers.attention import PagedAttention
from mycli.runtime.layers.batch import Batch
from mycli.runtime.layers.block import Block, Parallel
from mycli.runtime.layers.layer_part import LayerPart, PassContext
from mycli.runtime.layers.native.parts import NativePass, ReadyPart
from mycli.runtime.layers.native.recurrent import StatesOfRun
from mycli.runtime.layers.recurrent import BatchStates, begin_texts
from mycli.runtime.layers.rope import Rope


@dataclass(eq=False)
class _Run:
    """Parts that follow each other and are one call; and that call by the cache that it reads."""

    parts: tuple[ReadyPart, ...]
    states: StatesOfRun
    chains: WeakKeyDictionary[KVCache, CChain] = field(default_factory=WeakKeyDictionary)

    def __call__(self, x: Tensor, native: NativePass) -> Tensor:
        kept = self.states.keep(native)
        x = self.chain(native)(native.library, native.rows, x)
        self.states.wait(native, kept)
        return x

    def chain(self, native: NativePass) -> CChain:
        """The call, which reads and writes the cache of a pass."""
        chain = self.chains.get(native.cache)
        if chain is None:
            places = [self._place(one, native) for one in self.parts]
            chain = self.chains[native.cache] = CChain([one.part for one in self.parts], places)
        return chain

    def _place(self, ready: ReadyPart, native: NativePass) -> CLayerCache | CLayerStates | None:
        if ready.mixer is not None:
            return self.states.place(ready, native.cache)
        return None if ready.layer is None else native.place(ready)


class Chain(nn.ModuleList):
    """The blocks of a model, run one after another."""

    def __init__(self, blocks: Iterable[Block]) -> None:
        layers = list(blocks)
        super().__init__(layers)
        self._parts = [part for block in layers for part in block.parts]
        watched = [pair for part in self._parts for pair in part.watched]
        self._objects, self._names = [one for one, _ in watched], [name for _, name in watched]
        self._made_of: list[object] = []
        self._pieces: list[_Run | LayerPart | Parallel] = []

    def _prepared(self) -> Sequence[_Run | LayerPart | Parallel]:
        """The parts in order, with those joined that native code takes. Looked at in every pass, and so in one go."""
        now = list(map(getattr, self._objects, self._names))
        if len(self._made_of) != len(now) or any(map(is_not, self._made_of, now)):
            self._made_of, self._pieces = now, []  # held, so that nothing new can stand where these stood
            run: list[ReadyPart] = []
            for part in [*self._parts, None]:
                ready = None if part is None else part.ready()
                if ready is not None:
                    run.append(ready)
                    continue
                self._pieces += [_Run(tuple(run), StatesOfRun(run))] if run else []
                self._pieces += [] if part is None else [part]
                run = []
        return self._pieces

    def whole(self, native: NativePass) -> CChain | None:
        """All of them as one call; None where some are not native, or keep states, which go on pass by pass."""
        pieces = self._prepared()
        if len(pieces) != 1 or not isinstance(pieces[0], _Run) or pieces[0].states.kept:
            return None
        return pieces[0].chain(native)

    def run(self, x: Tensor, batch: Batch, rope: Rope, cache: KVCache, told: Tensor | None = None) -> Tensor:
        """The residual stream x [1, T, hidden] through all of them. Keys, values and states go into the cache.

        `told`: what layers are told of each token beside, [1, T, layers, width].
        """
        begin_texts(batch, cache.states)
        native = NativePass.make(x, batch, cache, rope, told)
        pieces = self._parts if native is None else self._prepared()
        context: PassContext | None = None
        for piece in pieces:
            if isinstance(piece, _Run):
                assert native is not None
                x = piece(x, native)
                continue
            if context is None:
                states = BatchStates(batch, cache.states)
                each = None if told is None else lambda layer: told[..., layer, :]
                context = PassContext(rope.rows(batch.spans), PagedAttention(batch, cache), each, states)
            x = piece.run(x, context)
        return x
