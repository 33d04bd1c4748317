"""Answers the messages of a conversation, shows replies as they stream, and saves the session file."""

import re
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, Self

from mycli.cli.chat.history import Conversation, SessionFile
from mycli.cli.command import Call
from mycli.cli.flags.records import ReasoningFlags
from mycli.cli.replies.generation import GrammarOfPrompt, describe, limit_reasoning
from mycli.cli.text.format import compact, draft_statistics, speed_statistics
from mycli.cli.text.progress import LiveMarkdown
from mycli.runtime.engine.replies.opened_model import OpenedModel
from mycli.runtime.engine.sequence import Request
from mycli.runtime.errors import UsageError
from mycli.runtime.sampling.params import SamplingParams
from mycli.runtime.tokenizer.chat_template import ChatTemplate, Message
from mycli.runtime.tokenizer.parsing.reasoning_parser import THINK, Part, ReasoningParser, prompt_end, reasoning_format
from mycli.runtime.tokenizer.stream import TextRules
from mycli.runtime.utils.units import human_bytes, pluralize

if TYPE_CHECKING:
    from mycli.runtime.engine.replies.completion import Completion

Overflow = Literal["refuse", "drop-oldest"]
REPLY_ROOM = 256  # tokens left for a reply when old turns are dropped, at most a quarter of the context


def thinking(template: ChatTemplate, enabled: bool) -> dict[str, bool]:
    """Return the template arguments that turn reasoning on or off. Raises UsageError if the template has none."""
    names = [name for name in ("enable_thinking", "thinking") if re.search(rf"\b{name}\b", template.source())]
    if not names:
        raise UsageError("the model's chat template cannot turn reasoning on or off", "omit --think")
    return dict.fromkeys(names, enabled)


@dataclass
class Chat:
    """A conversation with a loaded model; `arguments` are passed to its chat template.

    limit: tokens of a reply, None for all that the context has room for.
    """

    call: Call
    loaded: OpenedModel
    sampling: SamplingParams
    conversation: Conversation = field(default_factory=Conversation)
    stops: tuple[str, ...] = ()
    escapes: bool = False
    markdown: bool = False
    overflow: Overflow = "refuse"
    limit: int | None = None
    arguments: dict[str, Any] = field(default_factory=dict)
    session_file: SessionFile | None = None
    reasoning: ReasoningFlags = ReasoningFlags()
    last: "Completion | None" = None
    finished: bool = False

    def answer(self, text: str) -> None:
        """Stream the reply to `text` and the files read before it. A refused message is removed again."""
        self.ask(self.conversation.compose(text))

    def ask(self, message: str, *, replace_last: bool = False) -> None:
        """Stream the reply to `message`, or to it in place of the last one. Ctrl-C ends the reply and keeps it."""
        from mycli.runtime.engine.replies.completion import Completion
        from mycli.runtime.engine.replies.reader import ReplyReader

        model = self.loaded.model
        with self.conversation.attempt():
            if replace_last:
                self.conversation.undo()
            self.conversation.turns.append(Message("user", message))
            prompt = self._prompt()
            request = Request(
                tuple(prompt),
                self.sampling,
                self._limit(prompt),
                model.stop_ids,
                self._grammar(prompt),
                deadline=self.reasoning.deadline,
            )
            shown = reasoning_format(model.tokenizer).marks
            reader = ReplyReader(model.tokenizer, TextRules(self.stops), shown=shown)
            reply = Completion(self.loaded.engine, request, reader)
            text = self._stream(reply, prompt)
            self.conversation.turns.append(Message("assistant", text))
            if not replace_last:
                self.conversation.reading.clear()
        self.last = reply
        if self.call.out.json_mode:
            self.call.out.json_record({"model": self.loaded.source.name, **describe(reply)})
        else:
            if reply.finish_reason == "length" and len(reply.tokens) == self.limit:
                self.call.out.note(f"(stopped after {pluralize(self.limit, 'token')})")
            self.call.out.footer(self.statistics(reply))
        self.save_session()

    def _limit(self, prompt: list[int]) -> int | None:
        room = self.loaded.engine.context - len(prompt)
        return self.limit if self.limit is not None and self.limit < room else None

    @cached_property
    def _grammar(self) -> GrammarOfPrompt:
        return limit_reasoning(self.loaded, self.reasoning)

    def save_session(self) -> None:
        """Write the session file if there is one; called after every change of the conversation."""
        if self.session_file is not None:
            self.session_file.save(self.conversation, self.loaded.source.name)

    def tokens(self) -> list[int]:
        return self.loaded.model.tokenizer.apply_chat_template(self.conversation.messages(), **self.arguments)

    def _prompt(self) -> list[int]:
        # A conversation that does not fit is refused, or with --overflow drop-oldest shortened with a note: nothing is
        # dropped silently.
        context = self.loaded.engine.context
        ids = self.tokens()
        room = context - min(REPLY_ROOM, context // 4)
        if self.overflow == "drop-oldest" and len(ids) > room:
            before, hidden = len(ids), self.conversation.hidden
            ids = self._without_oldest(room)
            dropped = (self.conversation.hidden - hidden) // 2
            if dropped:
                turns = f"the oldest {pluralize(dropped, 'turn')}"
                self.call.out.note(f"({turns} dropped: {before - len(ids)} of {before} tokens)")
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
        # Binary search for the fewest hidden turns: each step tokenizes the whole conversation, which takes up to 1 s.
        low, high = self.conversation.hidden // 2 + 1, self.conversation.most_hidden // 2  # exchanges
        while low < high:
            middle = (low + high) // 2
            self.conversation.hidden = 2 * middle
            low, high = (low, middle) if len(self.tokens()) <= room else (middle + 1, high)
        self.conversation.hidden = 2 * high
        return self.tokens()

    def _stream(self, reply: "Completion", prompt: list[int]) -> str:
        tokenizer = self.loaded.model.tokenizer
        form = reasoning_format(tokenizer)
        parser = ReasoningParser(prompt_end(tokenizer, prompt), form)
        parts: list[Part] = []
        stream = iter(reply)
        out, loaded = self.call.out, self.loaded
        with _Display(self) as display:
            try:
                for piece in out.while_reading(stream, len(prompt), lambda: loaded.engine.tokens_read):
                    parts += (arrived := parser.feed(piece))
                    display.add(arrived)
            except KeyboardInterrupt:
                stream.close()  # type: ignore[attr-defined]  # a generator: closing it frees the sequence
                self.call.out.note("(stopped)")
            parts += (rest := parser.flush())
            display.add(rest)
        if reply.finish_reason == "context":
            self.call.out.warn("the reply stopped because the context is full; /undo or /clear frees it")
        # Templates remove <think> blocks of earlier replies. Other marks they render as text, and marks that are
        # special tokens may not be spelled in a message.
        names = (
            tokenizer.vocabulary[index] for index in tokenizer.control_ids if tokenizer.piece(index, False) is None
        )
        if form is not THINK or any(name in form.marks for name in names):
            return "".join(part.text for part in parts if not part.reasoning and not part.mark).lstrip()
        return "".join(part.text for part in parts)

    def statistics(self, reply: "Completion") -> str:
        timing, engine = reply.timing, self.loaded.engine
        return " · ".join(
            (
                *speed_statistics(len(reply.tokens), timing),
                f"prompt {timing.prompt} ({timing.cached} cached)",
                *draft_statistics(timing),
                f"ctx {compact(timing.prompt + len(reply.tokens))}/{compact(engine.context)}",
                human_bytes(self.loaded.memory_used()),
            )
        )


class _Display:
    """Shows a reply as it streams, reasoning dimmed, or rendered as Markdown."""

    def __init__(self, chat: Chat) -> None:
        self._out, self._escapes = chat.call.out, chat.escapes
        self._markdown = chat.markdown and chat.call.out.interactive
        self._live: LiveMarkdown | None = None
        self._reply = ExitStack()
        self._column = 0

    def add(self, parts: Iterable[Part]) -> None:
        for part in parts:
            if self._out.json_mode:  # the JSON object is printed at the end
                continue
            if part.mark and not part.reasoning:
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
        if self._live is not None:
            self._live.end()
        elif self._markdown:
            self._out.result("")
        self._reply.close()
