"""The one loop that makes tokens: prefill what the cache does not hold, then sample and feed back, one token at a time.

`chat`, `run`, `bench` and `eval` all use it. Knows token ids and times; does not know text, templates or terminals.
"""

import time
from collections.abc import Generator, Iterator, Sequence
from itertools import chain

import torch
from torch import Tensor

from mycli.runtime.engine.model_runner import ModelRunner
from mycli.runtime.engine.stats import Timing
from mycli.runtime.errors import UsageError
from mycli.runtime.layers.batch import Batch
from mycli.runtime.memory.estimate import prefill_chunk
from mycli.runtime.sampling.sampler import Sampler, not_numbers


class Session:
    """A model with the memory of one conversation, or of several sequences that advance in step.

    Tokens stay in the cache between calls: a prompt that begins like the last conversation is only prefilled from where
    it differs.
    """

    def __init__(self, runner: ModelRunner, context: int, sequences: int = 1, chunk: int | None = None) -> None:
        self.runner = runner
        self.device = runner.device
        self.context = context
        self.chunk = chunk or prefill_chunk(self.device.type == "cuda")  # tokens of a prompt at once
        self.cache = runner.make_cache(context, sequences)
        runner.rope(self.cache)  # made now, not in the time of the first reply
        self._tokens: list[int] = []  # what the cache holds, of the first sequence
        self.timing = Timing()
        self.stopped = False  # whether the last generation ended by a stop token

    @property
    def nbytes(self) -> int:
        """Bytes of weights and cache."""
        return self.runner.nbytes + self.cache.nbytes

    def forget(self) -> None:
        """Start from an empty cache."""
        self._keep(0)

    def branch(self, sequences: int, context: int) -> "Session":
        """A session of `sequences` that begin with what this one, of one sequence, holds: one prefill serves all."""
        other = Session(self.runner, context, sequences)
        other.cache.copy_from(self.cache)
        other._tokens = list(self._tokens)
        return other

    def _keep(self, count: int) -> None:
        del self._tokens[count:]
        self.cache.truncate(count)

    def _forward(self, tokens: Tensor, logits: bool) -> Tensor:
        """Run tokens [sequences, n]; logits fp32 [sequences, vocab] of the last where wanted."""
        batch = Batch(tokens, self.cache.length, "last" if logits else "none")
        out = self.runner.run(batch, self.cache)
        self._tokens += tokens.tolist()[0]
        return tokens if out is None else out[:, -1]

    def prefill(self, prompt: Sequence[int]) -> Tensor:
        """Bring `prompt` into the cache and return the logits fp32 [sequences, vocab] after it.

        Raises UsageError where the prompt is empty or longer than the cache; nothing is ever cut off silently.
        """
        if not prompt:
            raise UsageError("the prompt is empty", "write something, or use a model that has a start token")
        if len(prompt) > self.context:
            raise UsageError(
                f"the prompt has {len(prompt)} tokens, the context room for {self.context}",
                code="more-context",
            )
        shared = 0
        for ours, theirs in zip(self._tokens, prompt[:-1], strict=False):  # the last token is always run: its logits
            if ours != theirs:
                break
            shared += 1
        self._keep(shared)
        self.timing = Timing(prompt=len(prompt), cached=shared)
        tokens = torch.tensor(prompt, device=self.device).expand(self.cache.sequences, -1)
        for start in range(shared, len(prompt), self.chunk):
            end = min(start + self.chunk, len(prompt))
            out = self._forward(tokens[:, start:end], logits=end == len(prompt))
        return out

    def generate(
        self,
        prompt: Sequence[int],
        sampler: Sampler,
        limit: int,
        stop: frozenset[int] = frozenset(),
    ) -> Generator[list[int], None, None]:
        """Yield the next token of every sequence, up to `limit` times.

        Ends when the first sequence draws a token of `stop` (which is not yielded), or when the context is full. A
        consumer that stops early leaves the cache as valid as one that does not.
        """
        began = time.perf_counter()
        self.stopped = False
        logits = self.prefill(prompt)
        sampler.observe(torch.tensor(prompt, device=self.device).expand(self.cache.sequences, -1))
        if limit < 1:
            return
        token = sampler.sample(logits)
        first = [(token[:, 0].tolist(), time.perf_counter() - began)]
        count = min(limit - 1, self.context - self.cache.length)
        for drawn, seconds in chain(first, self._following(token, sampler, count)):
            self.timing.token_seconds.append(seconds)
            if drawn[0] in stop:
                self.stopped = True
                return
            yield drawn

    def _following(self, token: Tensor, sampler: Sampler, count: int) -> Iterator[tuple[list[int], float]]:
        """The `count` tokens after `token` [sequences, 1], each with its seconds: without what the consumer did.

        The cache then holds all but the last that was asked for.
        """
        launches = self.runner.launches(token, sampler.device_sampling(), self.cache, count)
        if launches is not None:
            yield from self._launched(launches, int(token[0, 0]))
            return
        for _ in range(count):
            began = time.perf_counter()
            token = sampler.sample(self._forward(token, logits=True))
            yield token[:, 0].tolist(), time.perf_counter() - began

    def _launched(
        self, launches: Iterator[tuple[list[list[int]], float]], fed: int
    ) -> Iterator[tuple[list[int], float]]:
        """As `_following`, with the tokens of a launch sharing its time equally.

        The cache advances by what is asked for, not by what was made: the rest of a launch is as if it had not been.
        """
        for made, seconds in launches:
            for drawn in made:
                self._tokens.append(fed)
                self.cache.advance(1)
                if min(drawn) < 0:
                    raise not_numbers()
                fed = drawn[0]
                yield drawn, seconds / len(made)
