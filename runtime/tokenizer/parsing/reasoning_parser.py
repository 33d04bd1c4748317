"""Separates the reasoning of a reply from its content while it streams, by the marks that a model writes around it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from mycli.runtime.tokenizer.tokenizer import Tokenizer


@dataclass(frozen=True)
class ReasoningFormat:
    """The marks around reasoning.

    template_markers: all occur in the chat templates of its models; turn: what the model writes between a reasoning and
    the `header` of its content; ignored: marks in the content that are not shown; frame: marks around the whole
    content; again: reasoning may also follow content.
    """

    open: str
    close: str
    template_markers: tuple[str, ...] = ()
    turn: str = ""
    header: str = ""
    ignored: tuple[str, ...] = ()
    frame: tuple[str, str] | None = None
    again: bool = False

    @property
    def marks(self) -> Sequence[str]:
        return (self.open, self.close, *self.ignored, *(self.frame or ()))

    @property
    def ending(self) -> str:
        """All that ends the reasoning, up to the content."""
        return self.close + self.turn + self.header

    def reasons(self, template: str) -> bool:
        """Return whether a model with this chat template writes reasoning."""
        return self is not THINK or self.open in template

    def opened_by(self, prompt_end: str) -> bool:
        """Return whether a prompt that ends so opens the reasoning."""
        return prompt_end.rstrip().endswith(self.open.rstrip())

    def closed_by(self, prompt_end: str) -> bool:
        return prompt_end.rstrip().endswith(self.close)


_PROMPT_END = 16  # tokens; no mark is longer
_FINAL = "<|channel|>final<|message|>"
_CONSTRAINED = tuple(
    f"<|channel|>final{kind}<|message|>" for kind in (" <|constrain|>json", "<|constrain|>json", " json")
)
THINK = ReasoningFormat("<think>", "</think>")
# The first format whose markers all occur is taken, else `THINK`.
REASONING_FORMATS = (
    ReasoningFormat(  # gpt-oss: every message of a reply has a header, of which only calls need the rest
        "<|channel|>analysis<|message|>",
        "<|end|>",
        ("<|channel|>analysis",),
        turn="<|start|>assistant",
        header=_FINAL,
        ignored=(
            "<|start|>assistant",
            _FINAL,
            *_CONSTRAINED,
            "<|channel|>commentary<|message|>",
            "<|end|>",
            "<|return|>",
        ),
        again=True,
    ),
    ReasoningFormat("<|channel>thought\n", "<channel|>", ("<|channel>thought",)),  # Gemma 4
    ReasoningFormat("[THINK]", "[/THINK]", ("[THINK]",)),  # Magistral, Ministral 3
    ReasoningFormat("<seed:think>", "</seed:think>", ("<seed:think>",)),
    ReasoningFormat("<think:opensource>", "</think:opensource>", ("<think{}>", ":opensource")),  # Hy 3
    ReasoningFormat("<|inner_prefix|>", "<|inner_suffix|>", ("<|inner_prefix|>",)),  # Apertus
    ReasoningFormat(  # Command R7B and A
        "<|START_THINKING|>",
        "<|END_THINKING|>",
        ("<|START_THINKING|>",),
        header="<|START_RESPONSE|>",
        ignored=("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
    ),
    ReasoningFormat(  # Solar Open
        "<|think|>",
        "<|end|>",
        ("<|begin|>assistant<|think|>",),
        turn="<|begin|>assistant",
        header="<|content|>",
        ignored=("<|begin|>assistant", "<|content|>", "<|end|>"),
    ),
    ReasoningFormat(
        "<think>", "</think>", ("<think>", "<response>"), frame=("<response>", "</response>")
    ),  # Granite 3.3
    ReasoningFormat("<think>", "</think>", ("<think>", "<answer>"), frame=("<answer>", "</answer>")),  # Hunyuan
)


def find_reasoning_format(template: str) -> ReasoningFormat:
    """Return the format of a model's reasoning by its chat template."""
    formats = (entry for entry in REASONING_FORMATS if all(marker in template for marker in entry.template_markers))
    return next(formats, THINK)


def reasoning_format(tokenizer: "Tokenizer") -> ReasoningFormat:
    """Return the format of the reasoning of a tokenizer's model. Raises ModelError as `ChatTemplate.source` does."""
    template = tokenizer.template
    return THINK if template is None else find_reasoning_format(template.source(tools=True))


def prompt_end(tokenizer: "Tokenizer", prompt: Sequence[int]) -> str:
    """Return the last characters of a prompt, more than an opening mark is long, with control tokens spelled out."""
    return tokenizer.spelled(prompt[-_PROMPT_END:])


@dataclass(frozen=True)
class Part:
    """A part of a reply. mark: it is no text but one of the format's marks."""

    text: str
    reasoning: bool
    mark: bool = False


class ReasoningParser:
    """Splits a streamed reply into parts, which joined are the reply.

    Between two contents of a reply, which no known model writes except gpt-oss, a blank line is added.
    """

    def __init__(self, prompt_end: str = "", form: ReasoningFormat = THINK, calls: Sequence[str] = ()) -> None:
        """prompt_end: the end of the prompt, where some templates write the opening mark.

        calls: marks of calls, which end the reasoning too: Qwen 3.5, GLM and Kimi K2 may call without closing it.
        """
        self._calls = tuple(calls)
        self._format = form
        self._state: Literal["before", "inside", "framed", "after"] = (
            "inside" if form.opened_by(prompt_end) else "before"
        )
        self._held = ""  # a possible start of a mark
        self._frame_end = ""  # the mark that ends the content, if one opened it
        self._content, self._gap = False, False  # whether content came, and then a mark

    @property
    def inside(self) -> bool:
        return self._state == "inside"

    def feed(self, text: str) -> list[Part]:
        self._held += text
        return list(self._parts(final=False))

    def flush(self) -> list[Part]:
        parts = list(self._parts(final=True))
        rest, self._held = self._held, ""
        return parts + ([Part(rest, self.inside)] if rest else [])

    def _parts(self, final: bool) -> Iterator[Part]:
        while self._held:
            state, rest = self._state, self._held
            if state in ("before", "framed"):
                yield from self._start(final)
            elif state == "inside":
                yield from self._until((self._format.close, *self._calls), final)
            else:
                yield from self._after(final)
            if (state, rest) == (self._state, self._held):
                return

    def _start(self, final: bool) -> Iterator[Part]:
        # At the start of the reply, and of the content, where a mark may open the reasoning or a frame.
        reasons = self._state == "before"
        marks = [self._format.open] if reasons else []
        marks += [self._format.frame[0]] if self._format.frame is not None else []
        start = self._held.lstrip()
        mark = next((mark for mark in marks if start.startswith(mark)), None)
        if mark is None:
            if final or not any(mark.startswith(start) for mark in marks):
                self._state = "after"
            return
        end = len(self._held) - len(start) + len(mark)
        opens = reasons and mark == self._format.open
        yield Part(self._held[:end], opens, mark=True)
        self._held = self._held[end:]
        self._state = "inside" if opens else "after"
        if not opens and self._format.frame is not None:
            self._frame_end = self._format.frame[1]

    def _after(self, final: bool) -> Iterator[Part]:
        if self._frame_end:
            yield from self._framed(final)
            return
        marks = self._format.ignored + ((self._format.open,) if self._format.again else ())
        yield from self._until(marks, final)

    def _until(self, marks: Sequence[str], final: bool) -> Iterator[Part]:
        # Yields the text before the first of `marks`, and that mark.
        places = [(at, mark) for mark in marks if (at := self._held.find(mark)) >= 0]
        if places:
            end, mark = min(places)
        else:
            end, mark = len(self._held) - (0 if final else _overlap(self._held, marks)), ""
        text, self._held = self._held[:end], self._held[end + len(mark) :]
        inside = self.inside
        if text and not inside:
            if self._gap and text.strip():
                yield Part("\n\n", False)
                self._gap = False
            self._content = self._content or bool(text.strip())
        if text:
            yield Part(text, inside)
        if not mark:
            return
        if mark in self._calls:
            self._held, self._state = mark + self._held, "after"
            return
        if inside:
            self._state = "framed" if self._format.frame is not None else "after"
        elif mark == self._format.open:
            self._state = "inside"
        self._gap = self._gap or self._content
        yield Part(mark, inside or self.inside, mark=True)

    def _framed(self, final: bool) -> Iterator[Part]:
        # The mark counts at the end of the reply only: a content may name it.
        text, mark = self._held, self._frame_end
        at = text.rfind(mark)
        ended = at >= 0 and not text[at + len(mark) :].strip()
        end = at if ended else len(text) - (0 if final else _overlap(text, (mark,)))
        self._held = text[end:]
        if text[:end]:
            yield Part(text[:end], False)
        if final and ended:
            yield Part(self._held, False, mark=True)
            self._held = ""


def _overlap(text: str, marks: Sequence[str]) -> int:
    # The length of the longest end of `text` that a mark begins with.
    longest = max(map(len, marks), default=0) - 1
    return next(
        (n for n in range(min(longest, len(text)), 0, -1) if any(mark.startswith(text[-n:]) for mark in marks)), 0
    )
