"""Beam search: keeps the most likely replies to a prompt, with the rules and results of transformers' `generate`.

`BeamSearch` chooses continuations by their log-probabilities; `BeamGroup` maps them to sequences of the engine. Beams
are branches of one sequence: they share its blocks, and a block is copied when a beam writes to it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from mycli.runtime.cache.block_table import BlockTable
from mycli.runtime.engine.sequence import BeamOptions, FinishReason, Request, RequestSequence, SequenceOutput, Status
from mycli.runtime.errors import UsageError, UserError
from mycli.runtime.sampling.sampler import not_finite

_NEVER: Literal["never"] = "never"
# Removes a sequence from the engine and returns its output.
Finish = Callable[[RequestSequence, FinishReason, UserError | None], SequenceOutput]


@dataclass(frozen=True)
class Beam:
    """Tokens after the prompt, and the sum of their log-probabilities."""

    tokens: tuple[int, ...]
    score: float


@dataclass(frozen=True)
class Continuation:
    """The beam `parent`, extended by `token`."""

    parent: int
    token: int


class BeamSearch:
    """The state of one search: running beams, and the best finished ones with their final scores."""

    def __init__(self, options: BeamOptions, limit: int, stop_ids: frozenset[int]) -> None:
        # transformers runs one beam as greedy decoding, which ends at the first end token.
        self._early: bool | str = options.early_stopping if options.width > 1 else True
        self.options, self._limit, self._stop_ids = options, limit, stop_ids
        self.running = [Beam((), 0.0)]
        self.finished: list[Beam] = []  # the best first
        self._improvable = True

    def extend(self, log_probs: Tensor) -> list[Continuation]:
        """Take log_probs fp32 [running, vocab]; return the next running beams, an empty list at the end."""
        width, length = self.options.width, len(self.running[0].tokens) + 1
        scores = log_probs + log_probs.new_tensor([beam.score for beam in self.running])[:, None]
        # Enough candidates for `width` running beams even if the best ones are all end tokens.
        count = min(max(2, 1 + len(self._stop_ids)) * width, scores.numel())
        best, places = scores.flatten().topk(count)
        running: list[tuple[Beam, Continuation]] = []
        ended: list[Beam] = []
        for rank, (score, place) in enumerate(zip(best.tolist(), places.tolist(), strict=True)):
            parent, token = divmod(place, scores.shape[1])
            beam = Beam((*self.running[parent].tokens, token), score)
            if token not in self._stop_ids and length < self._limit:
                running.append((beam, Continuation(parent, token)))
            elif rank < width:  # lower ranks only replace running beams that ended, as in transformers
                ended.append(Beam(beam.tokens, score / length**self.options.length_penalty))
        self._finish(ended)
        running = running[:width]
        self.running = [beam for beam, _ in running]
        return [continuation for _, continuation in running] if self._continues(length) else []

    def end_early(self) -> None:
        """End the search with the next tokens, as if they reached the limit."""
        self._limit = len(self.running[0].tokens) + 1

    @property
    def _full(self) -> bool:
        return len(self.finished) >= self.options.width

    def _finish(self, ended: Sequence[Beam]) -> None:
        if not self._improvable or (self._full and self._early is True):
            return
        self.finished = sorted([*self.finished, *ended], key=lambda beam: -beam.score)[: self.options.width]

    def _continues(self, length: int) -> bool:
        if not self.running or (self._full and self._early is True):
            return False
        # A running beam is scored as if it ended now. "never" assumes the length at which its score would be best,
        # which with a penalty above 0 is the limit; the search then ends only when no better reply is possible.
        penalty = self.options.length_penalty
        hypothetical = self._limit if self._early == _NEVER and penalty > 0 else length
        best = self.running[0].score / hypothetical**penalty
        self._improvable = self._improvable and (not self._full or best > self.finished[-1].score)
        return self._improvable


@dataclass
class BeamGroup:
    """The sequences that hold the running beams of one search; the first `replies` members return its results.

    rows: log-probabilities after the tokens of each sequence that has been computed to its end.
    """

    search: BeamSearch
    members: list[RequestSequence]
    replies: int
    rows: dict[int, Tensor] = field(default_factory=dict)
    begun: bool = False

    @classmethod
    def start(
        cls, request: Request, options: BeamOptions, members: list[RequestSequence], replies: int, room: int
    ) -> "BeamGroup":
        """Return the group of a new search; `room`: as returned by `beam_room`."""
        search = BeamSearch(options, min(members[0].limit, room), request.stop_ids)
        return cls(search, members, replies)

    def add(self, number: int, logits: Tensor, finish: Finish) -> list[SequenceOutput]:
        """Store the logits fp32 [1, vocab] after a sequence, and extend the beams once all are computed.

        Returns the outputs of the replies if the search has ended.
        """
        if self.members[0].status is Status.FINISHED:  # another beam of this pass has ended the search
            return []
        if not bool(logits.max().isfinite()):
            return self.end(finish, "error", not_finite())
        self.rows[number] = logits.log_softmax(dim=-1)
        # The first pass computes the prompt alone; all beams branch from its row.
        if len(self.rows) < (len(self.members) if self.begun else 1) or self._advance():
            return []
        ended = zip(self.end(finish, "stop"), self.results(), strict=True)
        return [replace(output, tokens=tokens, finish_reason=reason) for output, (tokens, reason) in ended]

    def end(self, finish: Finish, reason: FinishReason, error: UserError | None = None) -> list[SequenceOutput]:
        """Remove all sequences of the search; return the outputs of those that are replies."""
        # The first one last: its branches would be queued as replies of their own.
        outputs = [finish(member, reason, error) for member in reversed(self.members)]
        return outputs[::-1][: self.replies]

    def _advance(self) -> bool:
        # Extend the beams by a token each; False if the search has ended.
        parents = self.members if self.begun else self.members[:1]
        continuations = self.search.extend(torch.cat([self.rows[member.id] for member in parents]))
        self.rows, self.begun = {}, True
        if not continuations:
            return False
        _reassign(self.members, parents, continuations)
        return True

    def results(self) -> list[tuple[tuple[int, ...], FinishReason]]:
        """Return the tokens of each reply, without an end token, and why it ended."""
        stop_ids = self.members[0].request.stop_ids
        replies: list[tuple[tuple[int, ...], FinishReason]] = []
        for beam in self.search.finished[: self.replies]:
            stopped = beam.tokens[-1] in stop_ids
            replies.append((beam.tokens[:-1], "stop") if stopped else (beam.tokens, "length"))
        return replies


def _reassign(
    members: Sequence[RequestSequence], parents: Sequence[RequestSequence], continuations: Sequence[Continuation]
) -> None:
    # Beams move between sequences, so blocks are passed on instead of copied: each parent gives its table to one
    # continuation, and the others branch from it. A member that was preempted has no blocks: it gets its tokens now and
    # is recomputed when it is admitted.
    tokens = [[*parents[extended.parent].tokens, extended.token] for extended in continuations]
    tables = {member.id: member.table for member in members if member.status is Status.RUNNING}
    heirs: dict[int, list[RequestSequence]] = {}
    for member, extended in zip(members, continuations, strict=True):
        if member.id in tables:
            heirs.setdefault(parents[extended.parent].id, []).append(member)
    # Parents without continuations release theirs first: there are as many recurrent states as running sequences, so a
    # branch would not find a free one.
    for number, table in tables.items():
        if number not in heirs:
            table.release()
    inherited = _inherited(tables, heirs)
    for member, text in zip(members, tokens, strict=True):
        member.tokens = text
        if member.id in tables:
            member.table = inherited.get(member.id) or member.table.sibling()


def _inherited(
    tables: Mapping[int, BlockTable], heirs: Mapping[int, Sequence[RequestSequence]]
) -> dict[int, BlockTable]:
    inherited: dict[int, BlockTable] = {}
    for number, (first, *others) in heirs.items():
        if number in tables:  # otherwise the parent waits for blocks, and its heirs are computed again
            inherited |= {member.id: tables[number].branch() for member in others}
            inherited[first.id] = tables[number]
    return inherited


def beam_room(request: Request, beams: BeamOptions, blocks: int, block_size: int) -> int:
    """Return how many tokens each beam of a request may have, so that all fit a cache of `blocks` at the same time.

    Raises UsageError if the request asks for more.
    """
    # Full blocks of the prompt are shared; the block in which it ends is copied by each beam that writes to it. The
    # bound ignores that beams share tokens after the prompt, too: how many is not known before.
    prompt = len(request.prompt)
    room = (blocks - prompt // block_size) // beams.width * block_size - prompt % block_size
    if room < max(request.limit or 1, 1):
        limit = "a token" if request.limit is None else f"{request.limit} tokens"
        raise UsageError(
            f"{beams.width} beams of {limit} after {prompt} prompt tokens do not fit the cache of "
            f"{blocks * block_size} tokens",
            code="fewer-beams",
            data={"beams": beams.width, "tokens": max(room, 0)},
        )
    return room


def check_beams(beams: BeamOptions, replies: int, running: int, vocabulary: int, stop_ids: int) -> None:
    """Raise UsageError for more beams than sequences can run or tokens exist, and for more replies than beams."""
    width = beams.width
    if replies > width:
        raise UsageError(f"{replies} replies need as many beams; there are {width}", f"ask for at most {width} replies")
    if width > running:
        raise UsageError(f"{width} beams, but at most {running} sequences run at the same time", code="fewer-beams")
    if width * max(2, 1 + stop_ids) > vocabulary:
        raise UsageError(f"{width} beams are too many for a vocabulary of {vocabulary} tokens", "use fewer beams")
