"""The interface of a pass and the record of what one pass computes."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from torch import Tensor

from mycli.runtime.cache.batch import Chunk
from mycli.runtime.cache.kv_cache import KVCache
from mycli.runtime.errors import Declined
from mycli.runtime.layers.rope import Rope
from mycli.runtime.layers.transformer import HiddenStateHook
from mycli.runtime.sampling.sampler import DeviceSampling

OnDecline = Callable[[Declined], None]  # receives why a pass was not compiled, or stopped being used
TokenSteps = tuple[list[list[int]], float]  # [steps][sequences], and the seconds they took; below 0: logits not finite


@dataclass(frozen=True)
class PassInput:
    """The input of one pass. It asks for logits of `chunks`, or with `sampling` for the next `count` tokens of each.

    sampling: the settings of each sequence.
    hook: receives the hidden states. For tokens each chunk is the last token of its sequence, blocks are reserved for
    `count` more, and nothing after a token of its `stop_ids` is needed.
    """

    chunks: Sequence[Chunk]
    cache: KVCache
    rope: Rope
    hook: HiddenStateHook | None = None
    sampling: Sequence[DeviceSampling] | None = None
    count: int = 1
    stop_ids: Sequence[frozenset[int]] = ()

    @cached_property
    def rows(self) -> int:
        rows = 0
        for chunk in self.chunks:
            rows += len(chunk.tokens)
        return rows

    @cached_property
    def longest(self) -> int:
        # Tokens of the longest sequence after the pass.
        return max([chunk.start + len(chunk.tokens) for chunk in self.chunks])


class Pass(Protocol):
    """One way of running a model."""

    @property
    def name(self) -> str: ...

    @property
    def samples(self) -> bool:
        """Whether `tokens` also draws with a temperature, rather than greedily only."""
        ...

    def takes(self, work: PassInput) -> Declined | None:
        """Return why this pass does not do `work`, or None if it does; called before any tensor is built."""
        ...

    def logits(self, work: PassInput) -> Tensor:
        """Return logits fp32 [rows, vocab] of the rows that the chunks ask for; the cache takes keys and values."""
        ...

    def tokens(self, work: PassInput) -> Iterator[TokenSteps]:
        """Yield the next tokens of each sequence, `work.count` or fewer, in one or several launches."""
        ...
