"""From the tokens of one sequence to what a client is told: text, reasoning, calls of tools, and why it ended.

Knows tokens and text, and which of them are markup. Does not know protocols, threads or engines.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from mycli.runtime.engine.sequence import FinishReason, SequenceOutput
from mycli.runtime.sampling.logprobs import TokenLogprob
from mycli.runtime.tokenizer.parsing.reasoning_parser import CLOSE, OPEN, ReasoningParser
from mycli.runtime.tokenizer.parsing.tool_formats import ToolFormat
from mycli.runtime.tokenizer.parsing.tool_parser import ToolCall, ToolParser
from mycli.runtime.tokenizer.stream import MAX_STOP_LENGTH, StopMatcher, StreamDecoder
from mycli.runtime.tokenizer.tokenizer import Tokenizer

ReplyEnd = Literal["stop", "stop_string", "length", "tool_calls", "cancelled", "deadline", "error"]


@dataclass(frozen=True)
class Piece:
    """What is newly certain of the reply number `index` of a request.

    `tokens` is how many were drawn for it; `stop` the stop string that ended it; `problem` why it ended with "error".
    """

    index: int
    content: str = ""
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()
    tokens: int = 0
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    cached_tokens: int = 0
    end: ReplyEnd | None = None
    stop: str | None = None
    problem: str = ""


class MarkedPieces:
    """The bytes of tokens, with those shown that are markup to be read: a tokenizer hides the special ones."""

    def __init__(self, tokenizer: Tokenizer, marks: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        names = ((index, tokenizer.vocabulary[index] or "") for index in tokenizer.control_ids)
        self._shown = {index: name.encode() for index, name in names if name and any(name in mark for mark in marks)}

    @property
    def strip_spaces(self) -> int:
        """How many spaces the start of a text loses."""
        return self._tokenizer.strip_spaces

    def piece(self, token_id: int, first: bool) -> bytes | None:
        """The bytes of a token, None for one that shows nothing."""
        return self._shown.get(token_id) or self._tokenizer.piece(token_id, first)


class ReplyReader:
    """Feed the outputs of a sequence, get pieces. Joined, they are the reply whatever the steps were."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        index: int,
        stops: Sequence[str] = (),
        *,
        prompt_end: str | None = None,
        tools: ToolParser | None = None,
        form: ToolFormat | None = None,
    ) -> None:
        """`prompt_end`: the end of a conversation's prompt, after which a reply may reason first; None for a text.

        `tools` reads calls, written in `form`.
        """
        self.index = index
        marks = [] if prompt_end is None else [OPEN, CLOSE]
        if form is not None:
            marks += [*form.marks, *form.ignored]
            for region in form.regions:
                marks += [*region.open.starts, *(region.close.starts if region.close else ())]
        self._decoder = StreamDecoder(MarkedPieces(tokenizer, marks) if marks else tokenizer)
        self._matcher = StopMatcher(stops)
        self._stops = tuple(stops)
        self._tail = ""  # of what was decoded, to say which stop string was found
        self._splitter = None if prompt_end is None else ReasoningParser(prompt_end)
        self._tools = tools
        self._reasoned, self._thought, self._spoke = False, False, False
        self.ended = False

    def feed(self, output: SequenceOutput) -> Piece:
        """What one output of the engine makes certain; nothing after the end."""
        text = "".join([self._decoder.feed(token) for token in output.tokens])
        end = output.finish_reason
        if end is not None:
            text += self._decoder.flush()
        certain, found = self._matcher.feed(text)
        if end is not None and not found:
            certain += self._matcher.flush()
        stop = self._found_stop(text) if found else None
        self._tail = (self._tail + text)[-MAX_STOP_LENGTH:]
        self.ended = found or end is not None
        content, reasoning, calls = self._parts(certain)
        return Piece(
            self.index,
            content,
            reasoning,
            calls,
            len(output.tokens),
            output.logprobs,
            output.prompt_logprobs,
            output.cached_tokens,
            self._reason(end, found) if self.ended else None,
            stop,
            "" if output.error is None else output.error.message,
        )

    def _found_stop(self, text: str) -> str:
        """Which of the stop strings ended the reply: the one completed first, of two the longer."""
        whole = self._tail + text
        places = ((at + len(stop), -len(stop), stop) for stop in self._stops if (at := whole.find(stop)) >= 0)
        return min(places, default=(0, 0, ""))[2]

    def _reason(self, end: FinishReason | None, found: bool) -> ReplyEnd:
        if found:
            return "stop_string"
        if end in (None, "stop"):
            return "tool_calls" if self._tools is not None and self._tools.called else "stop"
        return "length" if end in ("length", "context") else end  # type: ignore[return-value]  # the others are the same

    def _parts(self, text: str) -> tuple[str, str, tuple[ToolCall, ...]]:
        """Content, reasoning and calls in `text`, and at the end in what was held back."""
        if self._splitter is None:
            return text, "", ()
        parts = self._splitter.feed(text) + (self._splitter.flush() if self.ended else [])
        reasoning = content = ""
        calls: list[ToolCall] = []
        for part in parts:
            if part.reasoning:
                self._reasoned = True
                reasoning += self._clean(part.text)
                continue
            for one in [part.text] if self._tools is None else self._tools.feed(part.text):
                content, calls = self._add(content, calls, one)
        for one in self._tools.flush() if self._tools is not None and self.ended else ():
            content, calls = self._add(content, calls, one)
        return content, reasoning, tuple(calls)

    def _add(self, content: str, calls: list[ToolCall], one: str | ToolCall) -> tuple[str, list[ToolCall]]:
        if isinstance(one, ToolCall):
            return content, [*calls, one]
        if self._reasoned and not self._spoke:
            one = one.lstrip()  # the blank line between the reasoning and the reply
        self._spoke = self._spoke or bool(one)
        return content + one, calls

    def _clean(self, text: str) -> str:
        """Reasoning without its tags and the line break after the first."""
        if text.endswith(CLOSE):
            text = text.removesuffix(CLOSE)
        if not self._thought:
            text = text.lstrip().removeprefix(OPEN).lstrip()
        self._thought = self._thought or bool(text)
        return text
