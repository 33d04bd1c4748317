"""Who guesses the next tokens cheaply, so that the target model can verify several of them in one pass.

Two proposers: a small model of the same vocabulary, and a lookup of what followed the same words earlier in the text.
They propose; `runtime.speculative.rejection_sampling` decides what stands. Does not know the target model.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from mycli.runtime.checkpoint.model_folder import ModelFolder
from mycli.runtime.device.placement import Placement
from mycli.runtime.engine.generate import Session
from mycli.runtime.engine.loader import load_model
from mycli.runtime.engine.model_runner import ModelRunner
from mycli.runtime.sampling.sampler import Sampler
from mycli.runtime.tokenizer.compatibility import check_vocabularies
from mycli.runtime.tokenizer.tokenizer import Tokenizer

NGRAMS = (4, 3, 2)  # lengths of the ending that is looked up, the longest first: it is the most telling


@dataclass(frozen=True)
class Proposal:
    """Tokens that may come next, and what each was drawn from: [tokens, vocab], None where it was not drawn at all.

    Row i is conditioned on the proposed tokens before it. None means that the token was certain: a point mass.
    """

    tokens: list[int]
    probabilities: Tensor | None = None


class Proposer(Protocol):
    """Guesses how a text goes on. `relative_cost`: of a token, in steps of the target; an expectation."""

    relative_cost: float

    @property
    def nbytes(self) -> int:
        """Bytes of memory held."""
        ...

    def begin(self, prompt: Sequence[int]) -> None:
        """A new reply: forget what `prompt` does not begin with."""
        ...

    def lag(self, length: int) -> int:
        """How many tokens of a text of `length` have yet to be read."""
        ...

    def propose(self, text: Sequence[int], count: int, sampler: Sampler) -> Proposal:
        """Up to `count` tokens after `text`, maybe none. Drawn as `sampler` draws, which observed all of `text`."""
        ...

    def truncate(self, length: int) -> None:
        """Forget what was read beyond the first `length` tokens: proposals that were refused."""
        ...


class DraftModel(Session):
    """A small model with a cache of its own, on the device of the target.

    Its context may be shorter than the text: it then has nothing to say.
    """

    def __init__(self, runner: ModelRunner, context: int, target_bytes: int) -> None:
        """`target_bytes`: the weights of the target; decoding is bound by reading them."""
        super().__init__(runner, min(context, runner.config.max_context))
        self.relative_cost = runner.nbytes / max(target_bytes, 1)

    def begin(self, prompt: Sequence[int]) -> None:
        """Keep what the cache and `prompt` share."""
        shared = 0
        for ours, theirs in zip(self._tokens, prompt, strict=False):
            if ours != theirs:
                break
            shared += 1
        self._keep(shared)

    def lag(self, length: int) -> int:
        """Tokens not in the cache."""
        return length - self.cache.length

    def propose(self, text: Sequence[int], count: int, sampler: Sampler) -> Proposal:
        """Each token is drawn with the settings of `sampler` from the draft's own distribution.

        Fewer than `count` where the context ends or the output is not a number; then what was read is forgotten, as
        NaN in the cache would spoil every later token.
        """
        count = min(count, self.context - len(text) + 1)
        tokens: list[int] = []
        if count < 1:
            return Proposal(tokens)
        new = torch.tensor([text[self.cache.length :]], device=self.device)
        for start in range(0, new.shape[1], self.chunk):
            end = min(start + self.chunk, new.shape[1])
            logits = self._forward(new[:, start:end], logits=end == new.shape[1])
        rows = sampler.probability_rows(count, logits.dtype)
        places = [None] * count if rows is None else torch.split(rows, 1)
        while True:
            token = sampler.sample_draft(logits, tokens, places[len(tokens)])
            if token is None:
                self.forget()
                break
            tokens.append(token)
            if len(tokens) == count:
                break
            logits = self._forward(torch.tensor([[token]], device=self.device), logits=True)
        return Proposal(tokens, None if rows is None else rows[: len(tokens)])

    def truncate(self, length: int) -> None:
        """Roll the cache back."""
        if length < self.cache.length:
            self._keep(length)


def load_draft(folder: ModelFolder, tokenizer: Tokenizer, target: ModelRunner, context: int) -> DraftModel:
    """The model of `folder` as a draft for `target`, beside it. Raises ModelError where its vocabulary is another."""
    check_vocabularies(tokenizer, folder.tokenizer())
    placement = Placement(target.device, target.dtype, kv=target.kv)
    return DraftModel(load_model(folder, placement), context, target.nbytes)


class PromptLookup:
    """Prompt lookup: finds the last place where the text's ending occurred before, and proposes what followed there.

    No weights and no pass: a proposal is a certainty, and what it costs is its part of the verifying pass.
    """

    relative_cost = 0.0

    def __init__(self) -> None:
        self._indexed = 0  # tokens of the text that were taken in
        self.nbytes = 0  # of tensors
        self._after: dict[tuple[int, ...], int] = {}  # an n-gram -> the position after its last occurrence

    def begin(self, prompt: Sequence[int]) -> None:
        """Start over."""
        self._indexed, self._after = 0, {}

    def lag(self, length: int) -> int:
        """Nothing has to be read in advance."""
        return 0

    def _index(self, text: Sequence[int]) -> None:
        """Take in the new tokens of `text`. Its ending is not entered yet: it would only find itself."""
        for end in range(max(self._indexed, 1), len(text)):
            for size in NGRAMS:
                if size <= end:
                    self._after[tuple(text[end - size : end])] = end
        self._indexed = len(text)

    def propose(self, text: Sequence[int], count: int, sampler: Sampler) -> Proposal:
        """What followed the longest known ending; what was just proposed counts as text, so that a loop goes on."""
        self._index(text)
        for size in NGRAMS:
            position = self._after.get(tuple(text[-size:]))
            if position is not None and size <= len(text):
                tokens: list[int] = []
                for index in range(position, position + count):
                    tokens.append(text[index] if index < len(text) else tokens[index - len(text)])
                return Proposal(tokens)
        return Proposal([])

    def truncate(self, length: int) -> None:
        """Proposals were never taken in."""
