"""A conversation with a loaded model: each message is answered, shown as it streams, measured and, if asked, kept.

Knows models, settings and the printer. Does not know what a person types to get here, see `cli.chat.slash_commands`.
"""

import re
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Self

from mycli.cli.chat.history import Conversation, SessionFile
from mycli.cli.command import Call
from mycli.cli.generation import describe
from mycli.cli.text.format import compact, speculation
from mycli.cli.text.progress import LiveMarkdown
from mycli.runtime.errors import UsageError
from mycli.runtime.open import OpenedModel
from mycli.runtime.sampling.params import SamplingParams
from mycli.runtime.tokenizer.chat_template import ChatTemplate, Message
from mycli.runtime.tokenizer.parsing.reasoning_parser import Part, ReasoningParser
from mycli.runtime.utils.units import human_bytes

if TYPE_CHECKING:
    from mycli.runtime.engine.completion import Completion

Overflow = Literal["refuse", "drop-oldest"]
REPLY_ROOM = 256  # tokens that dropping old turns leaves for a reply, at most a quarter of the context
PROMPT_END = 16  # tokens: more than an opening tag has


def thinking(template: ChatTemplate, wanted: bool) -> dict[str, bool]:
    """The template arguments that switch reasoning on or off. Raises UsageError for a template that knows none."""
    names = [name for name in ("enable_thinking", "thinking") if re.search(rf"\b{name}\b", template.source())]
    if not names:
        raise UsageError("the model's chat template has no switch for thinking", "omit --think")
    return dict.fromkeys(names, wanted)


@dataclass
class Chat:
    """One conversation and how it is held. `arguments` are the template's, `session_file` follows each turn."""

    call: Call
    loaded: OpenedModel
    sampling: SamplingParams
    conversation: Conversation = field(default_factory=Conversation)
    stops: tuple[str, ...] = ()
    escapes: bool = False
    markdown: bool = False
    overflow: Overflow = "refuse"
    arguments: dict[str, Any] = field(default_factory=dict)
    session_file: SessionFile | None = None
    last: "Completion | None" = None
    finished: bool = False

    def answer(self, text: str) -> None:
        """Stream the reply to `text` and to the files read before it. What is refused is taken back."""
        self.ask(self.conversation.compose(text))

    def ask(self, message: str, instead: bool = False) -> None:
        """Stream the reply to `message`; `instead`: of the last message. Ctrl-C ends it and keeps what was said."""
        from mycli.runtime.engine.completion import Completion

        with self.conversation.attempt():
            if instead:
                self.conversation.undo()
            self.conversation.turns.append(Message("user", message))
            prompt = self._prompt()
            reply = Completion(self.loaded.model, self.loaded.engine, prompt, self.sampling, stops=self.stops)
            text = self._stream(reply, prompt)
            self.conversation.turns.append(Message("assistant", text))
            if not instead:
                self.conversation.reading.clear()
        self.last = reply
        if self.call.out.json_mode:
            self.call.out.json_record({"model": self.loaded.source.name, **describe(reply)})
        else:
            self.call.out.footer(self.statistics(reply))
        self.keep()

    def keep(self) -> None:
        """Write the file of the session, so that it never lacks what was said nor holds what was taken back."""
        if self.session_file is not None:
            self.session_file.keep(self.conversation, self.loaded.source.name)

    def tokens(self) -> list[int]:
        """The ids of the conversation as the model is shown it."""
        return self.loaded.model.tokenizer.apply_chat_template(self.conversation.messages(), **self.arguments)

    def _prompt(self) -> list[int]:
        """The ids to answer; what does not fit is refused with the numbers, or old turns are hidden and it says so."""
        context = self.loaded.engine.context
        ids = self.tokens()
        room = context - min(REPLY_ROOM, context // 4)
        if self.overflow == "drop-oldest" and len(ids) > room:
            before, hidden = len(ids), self.conversation.hidden
            ids = self._without_oldest(room)
            dropped = (self.conversation.hidden - hidden) // 2
            if dropped:
                what = "turn is" if dropped == 1 else f"{dropped} turns are"
                self.call.out.note(f"(the oldest {what} dropped: {before - len(ids)} of {before} tokens)")
        if len(ids) > context:
            options = ["/undo", "/clear"]
            if not self.loaded.longest_context:
                options.append("start with a larger --ctx")
            if self.overflow != "drop-oldest":
                options.append("start with --overflow drop-oldest")
            raise UsageError(
                f"the conversation has {len(ids)} tokens, the context has room for {context}", " or ".join(options)
            )
        return ids

    def _without_oldest(self, room: int) -> list[int]:
        """The ids with as few turns hidden as leave at most `room`, or all that can be.

        Found by halving: each look tokenizes the whole conversation, which for a long one takes a second.
        """
        low, high = self.conversation.hidden // 2 + 1, self.conversation.most_hidden // 2  # exchanges
        while low < high:
            middle = (low + high) // 2
            self.conversation.hidden = 2 * middle
            low, high = (low, middle) if len(self.tokens()) <= room else (middle + 1, high)
        self.conversation.hidden = 2 * high
        return self.tokens()

    def _stream(self, reply: "Completion", prompt: list[int]) -> str:
        """Show the reply as it comes; its whole text."""
        splitter = ReasoningParser(self.loaded.model.tokenizer.decode(prompt[-PROMPT_END:]))
        pieces: list[str] = []
        stream = iter(reply)
        out, loaded = self.call.out, self.loaded
        with _Display(self) as shown:
            try:
                for piece in out.while_reading(stream, len(prompt), lambda: loaded.engine.tokens_read):
                    pieces.append(piece)
                    shown.add(splitter.feed(piece))
            except KeyboardInterrupt:
                stream.close()  # type: ignore[attr-defined]  # a generator: frees the session for the next turn
                self.call.out.note("(stopped)")
            shown.add(splitter.flush())
        if reply.finish_reason == "context":
            self.call.out.warn("the context is full, the reply was cut off; /undo or /clear makes room")
        return "".join(pieces)

    def statistics(self, reply: "Completion") -> str:
        """The line after a reply."""
        timing, engine = reply.timing, self.loaded.engine
        return " · ".join(
            (
                f"{len(reply.tokens)} tok",
                f"{timing.tokens_per_second:.0f} tok/s",
                f"TTFT {timing.first_token_seconds * 1e3:.0f} ms",
                f"prompt {timing.prompt} ({timing.cached} cached)",
                *speculation(timing),
                f"ctx {compact(timing.prompt + len(reply.tokens))}/{compact(engine.context)}",
                human_bytes(self.loaded.memory_used()),
            )
        )


class _Display:
    """Where a reply appears: plain as it streams, reasoning dimmed; or, when asked for, rendered as Markdown."""

    def __init__(self, chat: Chat) -> None:
        self._out, self._escapes = chat.call.out, chat.escapes
        self._markdown = chat.markdown and chat.call.out.interactive
        self._live: LiveMarkdown | None = None
        self._reply = ExitStack()
        self._column = 0

    def add(self, parts: Iterable[Part]) -> None:
        """Show more of the reply."""
        for part in parts:
            if self._out.json_mode:  # the object comes at the end
                continue
            if part.reasoning or not self._markdown:
                self._out.stream(part.text, raw=self._escapes, dim=part.reasoning)
                self._column = len(part.text) - part.text.rfind("\n") - 1
                continue
            if self._live is None:
                if self._column:
                    self._out.result("")
                self._live = self._out.markdown()
            self._live.add(part.text)

    def __enter__(self) -> Self:
        if not self._out.json_mode:
            self._reply.enter_context(self._out.reply(ends_line=not self._markdown))
        return self

    def __exit__(self, *_: object) -> None:
        """The reply is over: the next word begins on a line of its own."""
        if self._live is not None:
            self._live.end()
        elif self._markdown:
            self._out.result("")
        self._reply.close()
