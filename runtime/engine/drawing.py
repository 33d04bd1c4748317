"""What follows in each sequence of a pass: tokens drafted before it, drawn after it, and their log-probabilities.

Every sequence draws from random numbers of its own. Knows logits and turns; does not know caches.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mycli.runtime.cache.batch import Chunk
from mycli.runtime.engine.sequence import Request
from mycli.runtime.engine.speculation import Drafted, Heard, Listener, Speculator
from mycli.runtime.engine.turns import Turn
from mycli.runtime.errors import UserError
from mycli.runtime.sampling.logprobs import LogprobRecorder, TokenLogprob, token_logprobs
from mycli.runtime.sampling.sampler import sample_rows
from mycli.runtime.sampling.sampler import Sampler


@dataclass
class Live:
    """What belongs to a sequence beside its tokens. `scored`: tokens of the prompt whose logprobs were given."""

    sampler: Sampler
    recorder: LogprobRecorder | None
    told: int = 0  # logprobs that were given
    scored: int = 1

    @classmethod
    def start(cls, request: Request, vocab_size: int, device: torch.device) -> "Live":
        """Of a new sequence. Raises UsageError for a bias of a token that there is not."""
        recorder = None if request.logprobs is None else LogprobRecorder(request.logprobs)
        constraint = None if request.grammar is None else request.grammar.start()
        sampler = Sampler(request.sampling, vocab_size, device, constraint=constraint, recorder=recorder)
        sampler.observe_ids(request.prompt)
        return cls(sampler, recorder)

    def tell(self, count: int) -> tuple[TokenLogprob, ...]:
        """The logprobs of the next `count` tokens drawn; none where none are wanted."""
        if self.recorder is None:
            return ()
        self.told += count
        return tuple(self.recorder.rows[0][self.told - count : self.told])

    def score(self, turn: Turn, logits: Tensor) -> tuple[TokenLogprob, ...]:
        """Logprobs of those tokens of the prompt that come after the rows of `turn` and were not told before."""
        sequence = turn.sequence
        first = max(self.scored, turn.start + 1)
        end = min(turn.start + turn.count + 1, sequence.prompt)
        if first >= end:
            return ()
        self.scored = end
        rows = logits[first - 1 - turn.start : end - 1 - turn.start, : self.sampler.vocab_size]
        return tuple(token_logprobs(rows, sequence.tokens[first:end], sequence.request.logprobs or 0))


def draft_tokens(
    speculator: Speculator | None, turns: Sequence[Turn], live: Mapping[int, Live]
) -> dict[int, list[int]]:
    """Tokens that may come next, by sequence, for those who want some."""
    if speculator is None:
        return {}
    asked = [
        Drafted(turn.sequence.id, turn.sequence.tokens, turn.drafts, live[turn.sequence.id].sampler)
        for turn in turns
        if turn.drafts
    ]
    found = speculator.propose(asked) if asked else []
    return {one.sequence: tokens for one, tokens in zip(asked, found, strict=True)}


def pass_listener(speculator: Speculator | None, turns: Sequence[Turn], chunks: Sequence[Chunk]) -> Listener | None:
    """What is to be shown the hidden states of the pass over `chunks`."""
    if speculator is None:
        return None
    pairs = zip(turns, chunks, strict=True)
    return speculator.listener(
        Heard(turn.sequence.id, chunk.start, len(chunk.tokens), turn.sequence.tokens) for turn, chunk in pairs
    )


def draw_tokens(
    draws: Sequence[tuple[Turn, range]],
    drafted: Mapping[int, list[int]],
    logits: Tensor,
    live: Mapping[int, Live],
    speculator: Speculator | None,
) -> dict[int, list[int] | UserError]:
    """What follows in each sequence, or why nothing can: by `logits`, of which each has its rows."""
    drawn: dict[int, list[int] | UserError] = {}
    plain, places = list[int](), list[int]()
    for turn, rows in draws:
        number = turn.sequence.id
        if not drafted.get(number):
            plain.append(number)
            places.append(rows.start)
            continue
        assert speculator is not None
        try:
            drawn[number] = speculator.accept(number, logits[rows.start : rows.stop], live[number].sampler)
        except UserError as error:
            drawn[number] = error
    if plain:
        chosen = logits if places == list(range(len(logits))) else logits[places]
        found = sample_rows(chosen, [live[number].sampler for number in plain])
        for number, token in zip(plain, found, strict=True):
            drawn[number] = token if isinstance(token, UserError) else [token]
    return drawn
