"""The sampling state of a request in the engine: sampler, logprobs, hidden states."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mycli.runtime.engine.scheduled import ScheduledSequence
from mycli.runtime.engine.sequence import Request
from mycli.runtime.sampling.random_numbers import RandomNumbers
from mycli.runtime.sampling.sampler import DeviceSampling, Sampler

if TYPE_CHECKING:  # few requests ask for logprobs
    from mycli.runtime.engine.beams import BeamGroup
    from mycli.runtime.sampling.logprobs import LogprobRecorder, TokenLogprob


@dataclass
class RequestState:
    """Sampler and logprob recorder of one sequence.

    scored: prompt tokens whose logprobs were returned; beams: the search that the sequence belongs to.
    """

    sampler: Sampler
    recorder: "LogprobRecorder | None"
    settings: DeviceSampling | None  # for sampling in a pass, once the reply may end
    returned: int = 0  # logprobs
    scored: int = 1
    hidden: list[Tensor] = field(default_factory=list)  # final hidden states of the prompt, if requested
    choice_logits: Tensor | None = None  # of the tokens that the request scores
    beams: "BeamGroup | None" = None

    @classmethod
    def start(
        cls, request: Request, vocab_size: int, device: torch.device, limit: int, clock: Callable[[], float]
    ) -> "RequestState":
        """Create the state of a new sequence of at most `limit` tokens; its deadline is in seconds of `clock`.

        Raises UsageError for a bias of a token that does not exist.
        """
        recorder = constraint = None
        if request.logprobs is not None:
            from mycli.runtime.sampling.logprobs import LogprobRecorder

            recorder = LogprobRecorder(request.logprobs)
        if request.grammar is not None:
            from mycli.runtime.sampling.grammars.state import ReplyLimits

            ends_at = None if request.deadline is None else clock() + request.deadline
            constraint = request.grammar.start(ReplyLimits(limit, ends_at, clock))
        start = request.start
        seed = request.sampling.seed if start is None else start.seed
        numbers = RandomNumbers(seed, 0 if start is None else start.numbers)
        sampler = Sampler(
            request.sampling,
            vocab_size,
            device,
            constraint=constraint,
            recorder=recorder,
            numbers=numbers,
            stop_ids=request.stop_ids,
            min_tokens=request.min_tokens,
            token_filter=request.token_filter,
        )
        sampler.seen.observe_prompt(request.prompt)
        if start is not None:
            sampler.resume(start.tokens, start.shortened)
        return cls(sampler, recorder, None if request.beams else sampler.device_sampling())

    @property
    def device_sampling(self) -> DeviceSampling | None:
        """The settings with which a pass may sample the next tokens by itself, None if it may not."""
        return None if self.sampler.masks_tokens else self.settings

    def next_logprobs(self, count: int) -> "tuple[TokenLogprob, ...]":
        if self.recorder is None:
            return ()
        self.returned += count
        return tuple(self.recorder.entries[self.returned - count : self.returned])

    def keep_hidden(self, part: ScheduledSequence, hidden: Tensor) -> None:
        """Store the requested rows of the hidden states of `part`, [tokens, hidden]."""
        request = part.sequence.request
        if request.hidden_states == "all":
            if not part.start:  # the sequence was preempted: its prompt is computed again from the first token
                self.hidden.clear()
            self.hidden.append(hidden.clone())
        elif request.hidden_states == "last" and part.completes:
            self.hidden.append(hidden[-1:].clone())

    @property
    def all_hidden(self) -> Tensor | None:
        return torch.cat(self.hidden) if self.hidden else None

    def score(self, part: ScheduledSequence, logits: Tensor) -> "tuple[TokenLogprob, ...]":
        """Return the logprobs of the prompt tokens after the rows of `part` that were not returned before."""
        sequence = part.sequence
        first = max(self.scored, part.start + 1)
        end = min(part.start + part.count + 1, sequence.prompt_length)
        if first >= end:
            return ()
        from mycli.runtime.sampling.logprobs import token_logprobs

        self.scored = end
        rows = logits[first - 1 - part.start : end - 1 - part.start, : self.sampler.vocab_size]
        return tuple(token_logprobs(rows, sequence.tokens[first:end], sequence.request.logprobs or 0, ranked=True))
