"""Who guesses the next tokens cheaply, so that the target model can verify several of them in one pass.

Two proposers: a small model of the same vocabulary, and a lookup of what followed the same words earlier in the text; a
third, `prediction`, ships with some models.
They propose; `runtime.speculative.rejection_sampling` decides what stands. Does not know the target model.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from mycli.runtime.cache.batch import Chunk
from mycli.runtime.cache.block_pool import BlockPool
from mycli.runtime.cache.block_table import BlockTable
from mycli.runtime.cache.prefix_index import PrefixIndex
from mycli.runtime.checkpoint.model_folder import ModelFolder
from mycli.runtime.device.placement import Placement
from mycli.runtime.engine.admission import reply_room
from mycli.runtime.engine.loader import load_model
from mycli.runtime.engine.model_runner import CacheShape, ModelRunner
from mycli.runtime.engine.speculation import Drafted, Heard, Listener
from mycli.runtime.errors import ModelError
from mycli.runtime.memory.plan import prefill_chunk
from mycli.runtime.tokenizer.compatibility import check_vocabularies
from mycli.runtime.tokenizer.tokenizer import Tokenizer

_TOGETHER = 8  # tokens of a text that are read in one pass with those of others
NGRAMS = (4, 3, 2)  # lengths of the ending that is looked up, the longest first: it is the most telling


@dataclass(frozen=True)
class Proposal:
    """Tokens that may come next, and what each was drawn from: [tokens, vocab], None where it was not drawn at all.

    Row i is conditioned on the proposed tokens before it. None means that the token was certain: a point mass.
    """

    tokens: list[int]
    probabilities: Tensor | None = None


class Proposer(Protocol):
    """Guesses how texts go on; a sequence is known by its number. `relative_cost`: of a token, in steps of the target.

    An expectation.
    """

    relative_cost: float

    @property
    def nbytes(self) -> int:
        """Bytes of memory held."""
        ...

    def lag(self, sequence: int, text: Sequence[int]) -> int:
        """How many tokens of the text have yet to be read."""
        ...

    def listener(self, heard: Iterable[Heard]) -> Listener | None:
        """As `Speculator.listener`."""
        ...

    def propose(self, asked: Sequence[Drafted]) -> list[Proposal]:
        """Tokens after each text, so many or fewer, drawn as its sampler draws, which observed the text."""
        ...

    def truncate(self, sequence: int, length: int) -> None:
        """Forget what was read beyond the first `length` tokens: proposals that were refused."""
        ...

    def end(self, sequence: int, text: Sequence[int]) -> None:
        """The sequence is over; this was its text."""
        ...

    def forget(self) -> None:
        """Keep nothing of texts that are over."""
        ...


@dataclass(eq=False)
class Drafting:
    """One text while `count` tokens are drafted for it; `rows` are their distributions."""

    asked: Drafted
    table: BlockTable
    count: int
    rows: Tensor | None = None
    logits: Tensor | None = None
    tokens: list[int] = field(default_factory=list)

    def draw(self) -> int | None:
        """One more token, by the logits [1, vocab] after those so far; None where they are not numbers."""
        assert self.logits is not None
        place = None if self.rows is None else self.rows[len(self.tokens) : len(self.tokens) + 1]
        token = self.asked.sampler.sample_draft(self.logits, self.tokens, place)
        if token is not None:
            self.tokens.append(token)
        return token


class DraftModel:
    """A small model with a cache of its own, on the device of the target.

    Its context may be shorter than a text, or its cache full: it then has nothing to say.
    """

    def __init__(self, runner: ModelRunner, shape: CacheShape, target_bytes: int) -> None:
        """`shape`: as of the target's cache; `target_bytes`: its weights; decoding is bound by reading them."""
        self.runner = runner
        self.context = min(shape.context, runner.config.max_context)
        self.cache = runner.make_cache(shape)
        self.relative_cost = runner.nbytes / max(target_bytes, 1)
        self._pool = BlockPool(shape.blocks, PrefixIndex(shape.block_size))
        self._tables: dict[int, BlockTable] = {}
        self._chunk = prefill_chunk(runner.device.type == "cuda")

    @property
    def nbytes(self) -> int:
        """Weights and cache."""
        return self.runner.nbytes + self.cache.nbytes

    def _table(self, sequence: int, text: Sequence[int]) -> BlockTable:
        table = self._tables.get(sequence)
        if table is None:
            table = self._tables[sequence] = BlockTable(self._pool)
            table.match(text)
        return table

    def lag(self, sequence: int, text: Sequence[int]) -> int:
        """Tokens not in the cache."""
        return len(text) - self._table(sequence, text).length

    def propose(self, asked: Sequence[Drafted]) -> list[Proposal]:
        """Each token is drawn with the settings of its sampler from the draft's own distribution; texts side by side.

        Fewer than asked for where context or cache end or the output is not a number; then what was read is forgotten,
        as NaN in the cache would spoil every later token.
        """
        drafting = [
            Drafting(one, self._table(one.sequence, one.text), min(one.count, reply_room(self.context, len(one.text))))
            for one in asked
        ]
        self._read([one for one in drafting if one.count > 0])
        going = [one for one in drafting if one.logits is not None]
        for one in going:
            assert one.logits is not None
            one.rows = one.asked.sampler.probability_rows(one.count, one.logits.dtype)
        while going:
            going = [one for one in going if self._draw(one)]
            self._run([(one, [one.tokens[-1]], 1) for one in going])
            going = [one for one in going if one.logits is not None]
        return [Proposal(one.tokens, None if one.rows is None else one.rows[: len(one.tokens)]) for one in drafting]

    def _read(self, drafting: Sequence[Drafting]) -> None:
        """Bring the texts into the cache, and the logits after each."""
        for one in drafting:
            text = one.asked.text
            while (missing := len(text) - one.table.length) > 0:
                last = missing <= self._chunk
                if last and missing <= _TOGETHER:
                    break
                start = one.table.length
                if not self._run([(one, text[start : start + self._chunk], int(last))]):
                    break
        short = [one for one in drafting if 0 < len(one.asked.text) - one.table.length <= _TOGETHER]
        self._run([(one, one.asked.text[one.table.length :], 1) for one in short])
        for one in drafting:
            if one.logits is not None:
                one.table.fill(one.asked.text, one.table.length)

    def _run(self, parts: Sequence[tuple[Drafting, Sequence[int], int]]) -> bool:
        """One pass over new tokens of each text and the logits after them, if wanted; False where no blocks are left.

        A text without blocks gets no logits.
        """
        taken = []
        for one, tokens, wanted in parts:
            one.logits = None
            if one.table.reserve(one.table.length + len(tokens)):
                taken.append((one, Chunk(tokens, one.table.length, tuple(one.table.blocks), wanted)))
        for source, target in self._pool.take_copies():
            self.cache.copy(source, target)
        if not taken:
            return False
        logits = self.runner.run([chunk for _, chunk in taken], self.cache)
        rows = iter(torch.split(logits, 1))
        for one, chunk in taken:
            one.table.length += len(chunk.tokens)
            one.logits = next(rows) if chunk.logits else None
        return True

    def _draw(self, one: Drafting) -> bool:
        """One more token; whether yet another is wanted."""
        if one.draw() is None:
            self._tables.pop(one.asked.sequence).discard()
            return False
        return len(one.tokens) < one.count

    def listener(self, heard: Iterable[Heard]) -> None:
        """It has hidden states of its own."""

    def truncate(self, sequence: int, length: int) -> None:
        """Roll the cache back."""
        if (table := self._tables.get(sequence)) is not None:
            table.truncate(length)

    def end(self, sequence: int, text: Sequence[int]) -> None:
        """What was read of the text is kept for others that begin alike."""
        table = self._tables.pop(sequence, None)
        if table is not None:
            table.truncate(len(text))
            table.release(text)

    def forget(self) -> None:
        """Keep nothing."""
        self._pool.clear()


def load_draft(folder: ModelFolder, tokenizer: Tokenizer, target: ModelRunner, shape: CacheShape) -> DraftModel:
    """The model of `folder` as a draft for `target`, beside it.

    Raises ModelError where its vocabulary is another, or where what it has read cannot be taken back.
    """
    if folder.config.has_recurrent:
        raise ModelError(
            f"{folder.config.model_type} cannot draft: its recurrent state cannot go back to before a refused token",
            "use a model whose layers all attend, or look drafts up in the text",
        )
    check_vocabularies(tokenizer, folder.tokenizer())
    placement = Placement(target.device, target.dtype, kv=target.kv)
    return DraftModel(load_model(folder, placement), shape, target.nbytes)


@dataclass
class _Lookup:
    """What is known of one text: how many of its tokens were taken in, and n-gram -> position after the last one."""

    indexed: int = 0
    after: dict[tuple[int, ...], int] = field(default_factory=dict)

    def index(self, text: Sequence[int]) -> None:
        """Take in the new tokens of `text`. Its ending is not entered yet: it would only find itself."""
        for end in range(max(self.indexed, 1), len(text)):
            for size in NGRAMS:
                if size <= end:
                    self.after[tuple(text[end - size : end])] = end
        self.indexed = len(text)

    def following(self, text: Sequence[int], count: int) -> list[int]:
        """What followed the longest known ending; what was just proposed counts as text, so that a loop goes on."""
        self.index(text)
        for size in NGRAMS:
            position = self.after.get(tuple(text[-size:]))
            if position is not None and size <= len(text):
                tokens: list[int] = []
                for index in range(position, position + count):
                    tokens.append(text[index] if index < len(text) else tokens[index - len(text)])
                return tokens
        return []


class PromptLookup:
    """Prompt lookup: finds the last place where the text's ending occurred before, and proposes what followed there.

    No weights and no pass: a proposal is a certainty, and what it costs is its part of the verifying pass.
    """

    relative_cost = 0.0

    def __init__(self) -> None:
        self.nbytes = 0  # of tensors
        self._texts: dict[int, _Lookup] = {}

    def lag(self, sequence: int, text: Sequence[int]) -> int:
        """Nothing has to be read in advance."""
        return 0

    def propose(self, asked: Sequence[Drafted]) -> list[Proposal]:
        """What followed."""
        return [
            Proposal(self._texts.setdefault(one.sequence, _Lookup()).following(one.text, one.count)) for one in asked
        ]

    def listener(self, heard: Iterable[Heard]) -> None:
        """It reads the text alone."""

    def truncate(self, sequence: int, length: int) -> None:
        """Proposals were never taken in."""

    def end(self, sequence: int, text: Sequence[int]) -> None:
        """Forget the text."""
        self._texts.pop(sequence, None)

    def forget(self) -> None:
        """Nothing is kept of texts that are over."""
