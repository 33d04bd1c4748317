"""Proposers of draft tokens: a small draft model. `lookup` and `mtp` are the others."""

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
from mycli.runtime.engine.loading.loader import load_model
from mycli.runtime.engine.model_runner import ModelRunner
from mycli.runtime.engine.sequence import reply_room
from mycli.runtime.engine.speculation import ComputedTokens, DraftRequest
from mycli.runtime.errors import ModelError
from mycli.runtime.layers.transformer import HiddenStateHook
from mycli.runtime.memory.cache_shape import CacheShape
from mycli.runtime.memory.plan import prefill_chunk
from mycli.runtime.tokenizer.compatibility import check_vocabularies
from mycli.runtime.tokenizer.tokenizer import Tokenizer

NO_PROPOSAL = -1  # as evidence
_SHORT = 8  # up to this many unread tokens of several sequences are computed in one pass


@dataclass(frozen=True)
class Proposal:
    """Draft tokens and the distributions [tokens, vocab] they were drawn from; None for tokens that were not drawn.

    Row i is conditioned on the proposed tokens before it. None stands for a point mass on each token.
    """

    tokens: list[int]
    probabilities: Tensor | None = None


class Proposer(Protocol):
    """Proposes the next tokens of sequences. relative_cost: expected cost of a draft token in steps of the target."""

    relative_cost: float

    @property
    def nbytes(self) -> int: ...

    def lag(self, sequence: int, tokens: Sequence[int]) -> int:
        """Return how many tokens of a sequence the proposer has not computed yet."""
        ...

    def evidence(self, sequence: int, tokens: Sequence[int]) -> int:
        """Return the reliability class of the next proposal, whose acceptance is learned separately; or NO_PROPOSAL."""
        ...

    def hidden_state_hook(self, parts: Iterable[ComputedTokens]) -> HiddenStateHook | None: ...

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]: ...

    def truncate(self, sequence: int, length: int) -> None: ...

    def finish(self, sequence: int, tokens: Sequence[int]) -> None: ...

    def forget(self) -> None: ...


@dataclass(eq=False)
class DraftState:
    """The draft of one sequence in progress: at most `count` tokens; `rows` are their distributions."""

    request: DraftRequest
    table: BlockTable
    count: int
    rows: Tensor | None = None
    logits: Tensor | None = None  # [1, vocab], after the tokens so far
    tokens: list[int] = field(default_factory=list)

    def sample(self) -> int | None:
        assert self.logits is not None
        out = None if self.rows is None else self.rows[len(self.tokens) : len(self.tokens) + 1]
        token = self.request.sampler.sample_draft(self.logits, self.tokens, out)
        if token is not None:
            self.tokens.append(token)
        return token

    @property
    def proposal(self) -> Proposal:
        return Proposal(self.tokens, None if self.rows is None else self.rows[: len(self.tokens)])


class DraftModel:
    """A small model with its own cache, on the device of the target.

    It proposes nothing for a sequence that exceeds its context or for which its cache has no blocks.
    """

    def __init__(self, runner: ModelRunner, shape: CacheShape, target_bytes: int) -> None:
        """shape: of the target's cache; target_bytes: of its weights, since decoding is bound by reading them."""
        self.runner = runner
        self.context = min(shape.context, runner.config.max_context)
        self.cache = runner.make_cache(shape.without_windows())
        runner.rope(self.context)  # else built again for every longer sequence, where blocks are short
        self.relative_cost = runner.nbytes / max(target_bytes, 1)
        self._pool = BlockPool(shape.blocks, PrefixIndex(shape.block_size))
        self._tables: dict[int, BlockTable] = {}
        self._chunk = prefill_chunk(runner.device.type == "cuda")

    @property
    def nbytes(self) -> int:
        return self.runner.nbytes + self.cache.nbytes

    def _table(self, sequence: int, tokens: Sequence[int]) -> BlockTable:
        table = self._tables.get(sequence)
        if table is None:
            table = self._tables[sequence] = BlockTable(self._pool)
            table.match(tokens)
        return table

    def lag(self, sequence: int, tokens: Sequence[int]) -> int:
        return len(tokens) - self._table(sequence, tokens).length

    def evidence(self, sequence: int, tokens: Sequence[int]) -> int:
        return 0

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        """Sample drafts for all requests together, token by token.

        A draft is shorter than requested where the context or the cache ends, or logits are not finite. Then the
        sequence is dropped from the cache: NaN there would spoil every later token.
        """
        drafts = []
        for request in requests:
            room = reply_room(self.context, len(request.tokens))
            drafts.append(DraftState(request, self._table(request.sequence, request.tokens), min(request.count, room)))
        self._compute_prefixes([draft for draft in drafts if draft.count > 0])
        active = [draft for draft in drafts if draft.logits is not None]
        for draft in active:
            assert draft.logits is not None
            draft.rows = draft.request.sampler.probability_rows(draft.count, draft.logits.dtype)
        while active:
            active = [draft for draft in active if self._sample(draft)]
            self._run([(draft, [draft.tokens[-1]], 1) for draft in active])
            active = [draft for draft in active if draft.logits is not None]
        return [draft.proposal for draft in drafts]

    def _compute_prefixes(self, drafts: Sequence[DraftState]) -> None:
        # Long prefixes are computed one sequence at a time, in chunks; the last few tokens of all share one pass.
        for draft in drafts:
            tokens = draft.request.tokens
            while (missing := len(tokens) - draft.table.length) > 0:
                last = missing <= self._chunk
                if last and missing <= _SHORT:
                    break
                start = draft.table.length
                if not self._run([(draft, tokens[start : start + self._chunk], int(last))]):
                    break
        short = [draft for draft in drafts if 0 < len(draft.request.tokens) - draft.table.length <= _SHORT]
        self._run([(draft, draft.request.tokens[draft.table.length :], 1) for draft in short])
        for draft in drafts:
            if draft.logits is not None:
                draft.table.fill(draft.request.tokens, draft.table.length)

    def _run(self, parts: Sequence[tuple[DraftState, Sequence[int], int]]) -> bool:
        """Run a pass over new tokens of each draft and set its logits; False if no draft has blocks left.

        parts: draft, tokens, and 1 if the logits after them are needed, else 0.
        """
        runnable = []
        for draft, tokens, logits_count in parts:
            draft.logits = None
            if draft.table.reserve(draft.table.length + len(tokens)):
                chunk = Chunk(tokens, draft.table.length, tuple(draft.table.blocks), logits_count)
                runnable.append((draft, chunk))
        for source, target in self._pool.take_copies():
            self.cache.copy(source, target)
        if not runnable:
            return False
        logits = self.runner.run([chunk for _, chunk in runnable], self.cache)
        rows = iter(torch.split(logits, 1))
        for draft, chunk in runnable:
            draft.table.length += len(chunk.tokens)
            draft.logits = next(rows) if chunk.logits else None
        return True

    def _sample(self, draft: DraftState) -> bool:
        if draft.sample() is None:
            self._tables.pop(draft.request.sequence).discard()
            return False
        return len(draft.tokens) < draft.count

    def hidden_state_hook(self, parts: Iterable[ComputedTokens]) -> None:
        return None

    def truncate(self, sequence: int, length: int) -> None:
        if (table := self._tables.get(sequence)) is not None:
            table.truncate(length)

    def finish(self, sequence: int, tokens: Sequence[int]) -> None:
        table = self._tables.pop(sequence, None)
        if table is not None:
            table.truncate(len(tokens))
            table.release(tokens)

    def forget(self) -> None:
        self._pool.clear()


def load_draft(folder: ModelFolder, tokenizer: Tokenizer, target: ModelRunner, shape: CacheShape) -> DraftModel:
    """Load the model of `folder` as a draft model for `target`.

    Raises ModelError if its vocabulary differs, or if it cannot discard refused tokens.
    """
    if folder.config.has_recurrent:
        raise ModelError(
            f"{folder.config.model_type} cannot draft: its recurrent state cannot go back to before a refused token",
            "use a draft model with attention in all layers, or prompt lookup",
        )
    check_vocabularies(tokenizer, folder.tokenizer())
    placement = Placement(target.device, target.dtype, kv=target.kv)
    return DraftModel(load_model(folder, placement), shape, target.nbytes)
