"""The layers of a decoder in order, for a pass: parts that follow each other in one native call, the rest by steps.

Knows the parts of layers, and when what they are made of has been replaced; does not know what any of them computes.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import is_not
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from mycli.runtime.cache.kv_cache import KVCache
from mycli.runtime.kernels.cpu.layer import CChain
from mycli.runtime.layers.attention import PagedAttention
from mycli.runtime.layers.batch import Batch
from mycli.runtime.layers.block import Block, Parallel
from mycli.runtime.layers.layer_part import LayerPart, PassContext
from mycli.runtime.layers.native import NativePass, ReadyPart
from mycli.runtime.layers.recurrent import BatchStates
from mycli.runtime.layers.rope import Rope

Told = Callable[[int], Tensor]  # as `PassContext.told`


@dataclass(eq=False)
class _Run:
    """Parts that follow each other and are one call; and that call by the cache that it reads."""

    parts: tuple[ReadyPart, ...]
    chains: WeakKeyDictionary[KVCache, CChain]

    def __call__(self, x: Tensor, native: NativePass) -> Tensor:
        chain = self.chains.get(native.cache)
        if chain is None:
            chain = self.chains[native.cache] = native.chain(self.parts)
        return chain(native.library, native.rows, x)


class Chain(nn.ModuleList):
    """The blocks of a model, run one after another."""

    def __init__(self, blocks: Iterable[Block]) -> None:
        layers = list(blocks)
        super().__init__(layers)
        self._parts = [part for block in layers for part in block.parts]
        watched = [pair for part in self._parts if isinstance(part, LayerPart) for pair in part.watched()]
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
                ready = part.ready() if isinstance(part, LayerPart) else None
                if ready is not None:
                    run.append(ready)
                    continue
                self._pieces += [_Run(tuple(run), WeakKeyDictionary())] if run else []
                self._pieces += [] if part is None else [part]
                run = []
        return self._pieces

    def run(self, x: Tensor, batch: Batch, rope: Rope, cache: KVCache, told: Told | None = None) -> Tensor:
        """The residual stream x [1, T, hidden] through all of them. Keys, values and states go into the cache."""
        native = NativePass.make(x, batch, cache, rope)
        pieces = self._parts if native is None else self._prepared()
        context: PassContext | None = None
        for piece in pieces:
            if isinstance(piece, _Run):
                assert native is not None
                x = piece(x, native)
                continue
            if context is None:
                states = BatchStates(batch, cache.states)
                context = PassContext(rope.rows(batch.spans), PagedAttention(batch, cache), told, states)
            x = piece.run(x, context)
        return x
