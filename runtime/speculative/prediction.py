"""The proposer that ships with some models: their head that predicts one token further, run token after token.

It hears the hidden states of the model's passes and keeps those that it has not read yet; its keys and values lie in a
cache of their own, position by position of the text from where it was first heard: what was begun from another text's
keys has no hidden states. Knows sequences by their numbers; what the head computes is `mtp_head`.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from mycli.runtime.cache.batch import Chunk
from mycli.runtime.cache.block_pool import BlockPool
from mycli.runtime.cache.block_table import BlockTable
from mycli.runtime.cache.prefix_index import PrefixIndex
from mycli.runtime.engine.admission import reply_room
from mycli.runtime.engine.model_runner import CacheShape
from mycli.runtime.engine.speculation import Drafted, Heard
from mycli.runtime.memory.plan import prefill_chunk
from mycli.runtime.speculative.mtp_head import MtpHead
from mycli.runtime.speculative.proposers import Drafting, Proposal


@dataclass(eq=False)
class _Followed:
    """One text: positions from `begin` on are in the cache, as far as `table` says, and `states` [n, hidden] are h of
    those after them."""

    begin: int
    table: BlockTable
    states: Tensor

    @property
    def read(self) -> int:
        """Where what is in the cache ends."""
        return self.begin + self.table.length

    @property
    def end(self) -> int:
        """Where what was heard ends."""
        return self.read + len(self.states)


class PredictionProposer:
    """The head as a `Proposer`. A text that it has not heard of, or no room for, leaves it nothing to say."""

    def __init__(self, head: MtpHead, shape: CacheShape) -> None:
        """`shape`: as of the target's cache."""
        self.head, self.shape = head, shape
        self.cache = head.make_cache(shape)
        self.relative_cost = head.read_bytes / max(head.target.nbytes, 1)
        self._pool = BlockPool(shape.blocks, PrefixIndex(shape.block_size))
        self._texts: dict[int, _Followed] = {}
        self._chunk = prefill_chunk(head.target.device.type == "cuda")

    @property
    def nbytes(self) -> int:
        """Weights and cache."""
        return self.head.nbytes + self.cache.nbytes

    def lag(self, sequence: int, text: Sequence[int]) -> int:
        """Hidden states that were heard and not read."""
        found = self._texts.get(sequence)
        return 0 if found is None else len(found.states)

    def listener(self, heard: Iterable[Heard]) -> Callable[[Tensor], None]:
        """As `Speculator.listener`."""
        parts = list(heard)

        def listen(hidden: Tensor) -> None:
            for one, states in zip(parts, torch.split(hidden, [one.count for one in parts]), strict=True):
                self._hear(one, states)

        return listen

    def _hear(self, one: Heard, states: Tensor) -> None:
        found = self._texts.get(one.sequence)
        if found is None or not found.begin <= one.start <= found.end:
            self._drop(one.sequence)
            found = self._texts[one.sequence] = _Followed(one.start, BlockTable(self._pool), states[:0])
        found.states = torch.cat((found.states, states[found.end - one.start :]))
        # Of a long prompt little is kept: each position but the last is read as soon as there are enough of them.
        while len(found.states) > self._chunk and found.read + self._chunk < len(one.text):
            if not found.table.reserve(found.table.length + self._chunk):
                return self._drop(one.sequence)
            self._run([(found, one.text[found.read + 1 :][: self._chunk], found.states[: self._chunk], 0)])
            found.states = found.states[self._chunk :].clone()

    def _drop(self, sequence: int) -> None:
        found = self._texts.pop(sequence, None)
        if found is not None:
            found.table.discard()

    def propose(self, asked: Sequence[Drafted]) -> list[Proposal]:
        """Each token is drawn with the settings of its sampler from what the head says; texts side by side."""
        drafting = [Drafting(one, table, count) for one in asked for table, count in [self._room(one)]]
        going = [one for one in drafting if one.count > 0]
        texts = [self._texts[one.asked.sequence] for one in going]
        pairs = zip(going, texts, strict=True)
        made = self._run([(text, one.asked.text[text.read + 1 :], text.states, 1) for one, text in pairs])
        for text in texts:
            text.states = text.states[:0]
        lengths = [text.table.length for text in texts]
        self._draw(going, *made)
        for text, length in zip(texts, lengths, strict=True):
            text.table.truncate(length)  # what was read after that stands for states that are not known
        return [Proposal(one.tokens, None if one.rows is None else one.rows[: len(one.tokens)]) for one in drafting]

    def _room(self, one: Drafted) -> tuple[BlockTable, int]:
        """Where a text lies, and how many tokens can be drafted after it: none where its last state was not heard."""
        found, context = self._texts.get(one.sequence), self.shape.context
        if found is None or not len(found.states) or found.end != len(one.text) - 1:
            return BlockTable(self._pool), 0
        count = min(one.count, reply_room(context, len(one.text)))
        fits = found.table.reserve(found.table.length + len(found.states) + max(count - 1, 0))
        return found.table, count if fits else 0

    def _draw(self, going: list[Drafting], states: Tensor, logits: Tensor) -> None:
        """All tokens of those under way, by g [texts, hidden] of their last positions and its logits."""
        for one in going:
            one.rows = one.asked.sampler.probability_rows(one.count, logits.dtype)
        while going:
            rows = []
            for row, one in enumerate(going):
                one.logits = logits[row : row + 1]
                if one.draw() is None:  # NaN in the cache would spoil every later token
                    self._drop(one.asked.sequence)
                elif len(one.tokens) < one.count:
                    rows.append(row)
            going, states = [going[row] for row in rows], states[rows]
            last = [(self._texts[one.asked.sequence], one.tokens[-1:]) for one in going]
            parts = [(text, tokens, state[None], 1) for (text, tokens), state in zip(last, states, strict=True)]
            states, logits = self._run(parts)

    def _run(self, parts: Sequence[tuple[_Followed, Sequence[int], Tensor, int]]) -> tuple[Tensor, Tensor]:
        """One pass over positions of each text, by the tokens after them and h, for which there is room.

        g of the last position of each [texts, hidden], and its logits where they are wanted.
        """
        if not parts:
            return torch.empty(0), torch.empty(0)
        chunks = [
            Chunk(tokens, found.table.length, tuple(found.table.blocks), wanted) for found, tokens, _, wanted in parts
        ]
        rope = self.head.target.rope(max(self.cache.block_size, *(chunk.length for chunk in chunks)))
        g, logits = self.head(chunks, torch.cat([states for _, _, states, _ in parts]), rope, self.cache)
        for found, tokens, _, _ in parts:
            found.table.length += len(tokens)
        ends = accumulate(chunk.count for chunk in chunks)
        return g[[end - 1 for end in ends]], logits

    def truncate(self, sequence: int, length: int) -> None:
        """Forget the states of refused tokens."""
        found = self._texts.get(sequence)
        if found is not None:
            found.states = found.states[: max(length - found.read, 0)]

    def end(self, sequence: int, text: Sequence[int]) -> None:
        """Forget the text."""
        self._drop(sequence)

    def forget(self) -> None:
        """Nothing is kept of texts that are over."""
