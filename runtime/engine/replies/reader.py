"""Reads a sequence's tokens into a reply: text up to a stop string, reasoning, tool calls, and why it ended."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Literal, cast

from mycli.runtime.engine.sequence import SequenceOutput
from mycli.runtime.errors import UsageError
from mycli.runtime.tokenizer.stream import StopMatcher, StreamDecoder, TextRules
from mycli.runtime.tokenizer.tokenizer import Tokenizer

if TYPE_CHECKING:  # torch takes a second to import, and most replies need no parsers
    from torch import Tensor

    from mycli.runtime.sampling.logprobs import TokenLogprob
    from mycli.runtime.tokenizer.parsing.reasoning_parser import Part, ReasoningFormat, ReasoningParser
    from mycli.runtime.tokenizer.parsing.recipient import RecipientReader
    from mycli.runtime.tokenizer.parsing.tool_formats import ToolFormat
    from mycli.runtime.tokenizer.parsing.tool_parser import ToolCall, ToolParser

ReplyEnd = Literal["stop", "stop_string", "length", "tool_calls", "cancelled", "deadline", "error"]


@dataclass(frozen=True)
class Piece:
    """The next part of reply `index` of a request. Text is withheld while it may be the start of a stop string or tag.

    parts: text, new calls and further parts of earlier calls, in the order of the output; tokens, logprobs: up to the
    token that completed a stop string; end: None while the reply continues; stop: the stop string that ended it;
    problem: the message if `end` is "error"; refused: the request itself is the cause; vector: of a text to embed, or
    scores of tokens; reasoning_tokens: the number of `tokens` that are reasoning, its tags included; prompt_tokens: as
    in `SequenceOutput`; text_logprobs: those of the tokens of text, each with the number of calls before it.
    """

    index: int = 0
    parts: "tuple[str | ToolCall, ...]" = ()
    reasoning: str = ""
    tokens: tuple[int, ...] = ()
    logprobs: "tuple[TokenLogprob, ...]" = ()
    prompt_logprobs: "tuple[TokenLogprob, ...]" = ()
    cached_tokens: int = 0
    end: ReplyEnd | None = None
    stop: str | None = None
    problem: str = ""
    vector: "Tensor | None" = None
    refused: bool = False
    reasoning_tokens: int = 0
    prompt_tokens: int = 0
    text_logprobs: "tuple[tuple[int, TokenLogprob], ...]" = ()

    @property
    def content(self) -> str:
        return "".join([part for part in self.parts if isinstance(part, str)])

    @property
    def calls(self) -> "tuple[ToolCall, ...]":
        return tuple([part for part in self.parts if not isinstance(part, str)])


class _MarkedPieces:
    """Token bytes that include the control tokens a parser needs to see; a tokenizer hides them all."""

    def __init__(self, tokenizer: Tokenizer, marks: Sequence[str], every: bool) -> None:
        self._tokenizer = tokenizer
        names = ((index, tokenizer.vocabulary[index] or "") for index in tokenizer.control_ids)
        self._shown = {
            index: name.encode() for index, name in names if name and (every or any(name in mark for mark in marks))
        }

    @property
    def strip_spaces(self) -> int:
        return self._tokenizer.strip_spaces

    def piece(self, token_id: int, first: bool) -> bytes | None:
        return self._shown.get(token_id) or self._tokenizer.piece(token_id, first)


def _call_marks(tokenizer: Tokenizer, tool_format: "ToolFormat") -> list[str]:
    # Control tokens that open calls; other marks may be words of a reasoning.
    names = {tokenizer.vocabulary[index] for index in tokenizer.control_ids}
    marks = [start for region in tool_format.regions for start in region.open.starts]
    return [mark for mark in (*marks, *tool_format.sections) if mark in names]


def join_parts(parts: "Iterable[str | ToolCall]") -> "tuple[str | ToolCall, ...]":
    """Join adjacent texts, and the parts of each call."""
    joined: list[str | ToolCall] = []
    for index, group in groupby(parts, lambda part: None if isinstance(part, str) else part.index):
        if index is None:
            joined.append("".join(cast("Iterator[str]", group)))
        else:
            from mycli.runtime.tokenizer.parsing.tool_parser import join_calls

            joined += join_calls(cast("Iterator[ToolCall]", group))
    return tuple(joined)


class ReplyReader:
    """Turns the outputs of one sequence into pieces. Their sum does not depend on how many tokens a step produced."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        text: TextRules | None = None,
        index: int = 0,
        *,
        prompt_end: str | None = None,
        reasoning: "ReasoningFormat | None" = None,
        tools: "ToolParser | None" = None,
        tool_format: "ToolFormat | None" = None,
        shown: Sequence[str] = (),
        before: Sequence[int] = (),
    ) -> None:
        """`prompt_end`: the last characters of a chat prompt, which may open a reasoning block; None for plain text.

        `reasoning`: its marks, None for <think>. `tools` parses calls written in `tool_format`; `shown`: control
        tokens in these texts are text; `before`: tokens of the text that the reply continues, empty for an answer.
        Raises UsageError for too many or too long stop strings.
        """
        self.index = index
        text = text or TextRules()
        marks, self._reasoning = list(shown), None
        if prompt_end is not None:
            from mycli.runtime.tokenizer.parsing.reasoning_parser import THINK, ReasoningParser

            reasoning = reasoning or THINK
            calls = () if tools is None or tool_format is None else _call_marks(tokenizer, tool_format)
            marks, self._reasoning = [*marks, *reasoning.marks], ReasoningParser(prompt_end, reasoning, calls)
            self._opening = reasoning.open
        self._recipient: RecipientReader | None = None
        if tool_format is not None:
            if tool_format.recipient and (prompt_end or "").endswith(tool_format.recipient):
                from mycli.runtime.tokenizer.parsing import recipient

                self._recipient = recipient.RecipientReader(tool_format.recipient)
            marks += [*tool_format.template_markers, *tool_format.ignored]
            for region in tool_format.regions:
                marks += [*region.open.starts, *(region.close.starts if region.close else ())]
        pieces = _MarkedPieces(tokenizer, marks, text.show_control) if marks or text.show_control else tokenizer
        self._decoder = StreamDecoder(pieces, before)
        self._matcher = StopMatcher(text.stops, text.include_stop)
        self._missing = text.min_tokens  # tokens to read before a stop string counts
        self._tools = tools
        # Whether there was a reasoning block, whether it had text, and whether there was content: white space around
        # the tags belongs to neither.
        self._reasoned, self._reasoning_begun, self._content_begun = False, False, False
        self._after_call = False
        self._calls = 0  # begun so far
        # Log-probabilities of tokens that may be text or a mark, and those of text.
        self._undecided: list[TokenLogprob] = []
        self._text_logprobs: list[tuple[int, TokenLogprob]] = []

    def feed(self, output: SequenceOutput) -> Piece:
        """Return what one output adds to the reply. The reply is over when the piece has an `end`."""
        count, reasoning_tokens, stopped, text = 0, 0, False, ""
        splits = []
        for token in output.tokens:
            if output.logprobs:
                self._undecided.append(output.logprobs[count])
            count += 1
            text, stopped = self._matcher.feed(self._decoder.feed(token), self._missing <= 0)
            self._missing -= 1
            if stopped:
                break
            inside = self._reasons
            splits.append(self._split(text, False))
            reasoning_tokens += inside or self._reasons
            text = ""
        if output.finish_reason is not None and not stopped:
            text, stopped = self._matcher.feed(self._decoder.flush(), self._missing < 0)
            text += "" if stopped else self._matcher.flush()
        ended = stopped or output.finish_reason is not None
        if ended:
            reasoning_tokens += stopped and self._reasons
            splits.append(self._split(text, True))
        text_logprobs, self._text_logprobs = tuple(self._text_logprobs), []
        return Piece(
            self.index,
            join_parts([part for parts, _ in splits for part in parts]),
            "".join([reasoning for _, reasoning in splits]),
            output.tokens[:count],
            output.logprobs[:count],
            output.prompt_logprobs,
            output.cached_tokens,
            self._end(output, stopped) if ended else None,
            self._matcher.matched,
            "" if output.error is None else output.error.message,
            refused=isinstance(output.error, UsageError),
            reasoning_tokens=reasoning_tokens,
            prompt_tokens=output.prompt_tokens,
            text_logprobs=text_logprobs,
        )

    @property
    def _reasons(self) -> bool:
        return self._reasoning is not None and self._reasoning.inside

    def _end(self, output: SequenceOutput, stopped: bool) -> ReplyEnd:
        called = self._tools is not None and self._tools.called
        if stopped:  # agents run calls if they are the reason for the end
            return "tool_calls" if called and self._tools is not None and not self._tools.incomplete else "stop_string"
        reason = output.finish_reason
        assert reason is not None
        if reason == "stop":
            return "tool_calls" if called else "stop"
        return "length" if reason == "context" else reason

    def _split(self, text: str, ended: bool) -> "tuple[list[str | ToolCall], str]":
        # The content with the calls in it, and the reasoning.
        if self._reasoning is None:
            if text:
                self._decide(text=True)
            return [text] if text else [], ""
        from mycli.runtime.tokenizer.parsing.reasoning_parser import Part

        parts: list[str | ToolCall] = []
        reasoning = ""
        for item in self._parse(self._reasoning, text, ended):
            if isinstance(item, Part):
                self._decide(text=False)
                self._reasoned = True
                reasoning += self._thought(item)
            elif isinstance(item, str):
                if self._reasoned and not self._content_begun:
                    item = item.lstrip()  # the blank line between reasoning and content
                if item:
                    self._decide(text=True)
                    # The parser drops white space around calls; interfaces with a single text would glue the parts.
                    parts.append(f"\n{item}" if self._after_call and self._content_begun else item)
                    self._content_begun, self._after_call = True, False
            else:
                self._decide(text=False)
                self._calls += bool(item.name)
                parts.append(item)
                self._after_call = True
        return parts, reasoning

    def _decide(self, text: bool) -> None:
        # A token that completes both text and something else counts for what it completes first.
        if text:
            self._text_logprobs += [(self._calls, logprob) for logprob in self._undecided]
        self._undecided = []

    def _parse(self, reasoning: "ReasoningParser", text: str, ended: bool) -> "Iterator[Part | str | ToolCall]":
        for part in reasoning.feed(text) + (reasoning.flush() if ended else []):
            if part.reasoning:
                yield part
            elif part.mark:
                self._decide(text=False)
            else:
                in_call = self._tools is not None and self._tools.in_call
                yield from self._content(part.text if self._recipient is None else self._recipient.feed(part.text))
                if in_call:  # the rest is of its closing mark
                    self._decide(text=False)
        if ended and self._recipient is not None:
            yield from self._content(self._recipient.feed("", ended=True))
        if self._tools is not None and ended:
            yield from self._tools.flush()

    def _content(self, text: str) -> "Iterable[str | ToolCall]":
        return (text,) if self._tools is None else self._tools.feed(text)

    def _thought(self, part: "Part") -> str:
        if part.mark:  # a later thought of a reply begins on a line of its own
            return "\n" if self._reasoning_begun and part.text.endswith(self._opening) else ""
        text = part.text if self._reasoning_begun else part.text.lstrip()
        self._reasoning_begun = self._reasoning_begun or bool(text)
        return text
