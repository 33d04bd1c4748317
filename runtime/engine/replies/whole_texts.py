"""Computes the hidden states of texts with a bidirectional model: each text whole, several in a pass.

Such a model has no KV cache and no chunks: the states of all tokens change with every token that is added.
"""

from collections import deque

from mycli.runtime.engine.model_runner import ModelRunner
from mycli.runtime.engine.sequence import Request, SequenceOutput
from mycli.runtime.layers.bidirectional import encode_texts
from mycli.runtime.models.config import not_generative


class WholeTexts:
    """A queue of texts. chunk: tokens of a pass with more than one text; context: of the longest text."""

    def __init__(self, runner: ModelRunner, chunk: int, context: int) -> None:
        self._runner, self._chunk, self._context = runner, chunk, context
        self._waiting: deque[tuple[int, Request]] = deque()
        self._numbers = 0

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def submit(self, request: Request) -> int:
        """Queue a text and return its number. Raises UsageError for a request of anything but hidden states."""
        if request.hidden_states is None:
            raise not_generative(self._runner.config)
        request.reply_limit(self._context, self._context)
        self._numbers += 1
        self._waiting.append((self._numbers, request))
        return self._numbers

    def cancel(self, number: int) -> SequenceOutput | None:
        """Remove a text; return its output if it was waiting."""
        for entry in self._waiting:
            if entry[0] == number:
                self._waiting.remove(entry)
                return SequenceOutput(number, finish_reason="cancelled")
        return None

    def step(self) -> list[SequenceOutput]:
        """Run the next texts in one pass and return their hidden states."""
        batch: list[tuple[int, Request]] = []
        tokens = 0
        while self._waiting and (not batch or tokens + len(self._waiting[0][1].prompt) <= self._chunk):
            batch.append(self._waiting.popleft())
            tokens += len(batch[-1][1].prompt)
        texts = [request.prompt for _, request in batch]
        rope = self._runner.rope(max(map(len, texts)))
        states = encode_texts(self._runner.model, texts, rope, [request.token_types for _, request in batch])
        return [
            SequenceOutput(
                number, finish_reason="length", hidden=part[-1:] if request.hidden_states == "last" else part
            )
            for (number, request), part in zip(batch, states, strict=True)
        ]
