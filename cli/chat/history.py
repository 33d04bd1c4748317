"""A conversation as data: its turns and system prompt, what can be taken back, and the file it is kept in.

Knows messages and files. Does not know models, tokens or terminals.
"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mycli.runtime.errors import ModelError, ResourceError, UsageError
from mycli.runtime.tokenizer.chat_template import Message
from mycli.runtime.utils.files import write_atomic
from mycli.runtime.utils.json_fields import Fields, read_object

HISTORY_VERSION = 1
MAX_FILE = 64 << 20  # bytes of a saved conversation
MAX_TURNS = 100_000
_KEYS = {"schema_version", "model", "system", "turns"}


@dataclass
class Conversation:
    """Turns of user and assistant in alternation, oldest first; the system prompt stands before them.

    `hidden` counts the oldest turns that the model is no longer shown; `reading` are files for the next message.
    """

    system: str | None = None
    turns: list[Message] = field(default_factory=list)
    hidden: int = 0
    reading: list[tuple[str, str]] = field(default_factory=list)

    def messages(self) -> list[Message]:
        """What the model is shown."""
        system = [] if self.system is None else [Message("system", self.system)]
        return [*system, *self.turns[self.hidden :]]

    def compose(self, text: str) -> str:
        """`text` as a message, with the files that were read before it."""
        return "\n\n".join([*(f"{name}:\n\n{content}" for name, content in self.reading), text])

    def clear(self) -> None:
        """Forget all but the system prompt."""
        self.turns, self.hidden, self.reading = [], 0, []

    @property
    def last_message(self) -> str:
        """The last thing the user said. Raises UsageError where there is nothing."""
        if len(self.turns) < 2:
            raise UsageError("nothing has been said yet", "write a message first")
        return self.turns[-2].content

    def undo(self) -> str:
        """Take back the last message and its reply; what was said."""
        message = self.last_message
        del self.turns[-2:]
        self.hidden = min(self.hidden, len(self.turns))
        return message

    @property
    def most_hidden(self) -> int:
        """Turns that may be hidden from the model: all but the message to answer."""
        return max(self.hidden, (len(self.turns) - 1) // 2 * 2)

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """Whatever ends the block by an exception leaves the conversation as it was."""
        turns, hidden, reading = list(self.turns), self.hidden, list(self.reading)
        try:
            yield
        except BaseException:
            self.turns, self.hidden, self.reading = turns, hidden, reading
            raise

    def save(self, path: Path, model: str) -> None:
        """Write to `path` in one step, readable by its owner alone, in place of an earlier conversation or of nothing.

        Raises UsageError for any other file, which is left alone, and ResourceError.
        """
        require_conversation(path)
        turns = [{"role": turn.role, "content": turn.content} for turn in self.turns]
        value = {"schema_version": HISTORY_VERSION, "model": model, "system": self.system, "turns": turns}
        write_private(path, json.dumps(value, indent=1) + "\n")

    def load(self, path: Path) -> str:
        """Take over what `save` wrote; the name of the model it was held with. Raises ModelError, changing nothing."""
        try:
            values = read_object(path, MAX_FILE)
            loaded, model = _parse(values)
        except ModelError as error:
            raise ModelError(error.message, "name a file that /save or --session wrote") from None
        self.clear()
        self.system, self.turns = loaded.system, loaded.turns
        return model


class SessionFile:
    """The file that follows a conversation, as long as nobody else writes to it. Made before it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._seen = self._state()

    def keep(self, conversation: Conversation, model: str) -> None:
        """Write it. Raises what `Conversation.save` does, and UsageError for what another wrote, which stays."""
        found = self._state()
        if found is not None and found != self._seen:
            message = f"{self.path}: another program has written to it, so this conversation is no longer kept there"
            raise UsageError(message, "keep it in another file: /save FILE")
        conversation.save(self.path, model)
        self._seen = self._state()

    def _state(self) -> tuple[int, int, int] | None:
        """What is another after each writing; None where there is no file."""
        try:
            found = os.stat(self.path.expanduser())
        except OSError:
            return None
        return found.st_ino, found.st_mtime_ns, found.st_size


def _parse(values: Fields) -> tuple[Conversation, str]:
    version = values.integer("schema_version")
    if version != HISTORY_VERSION:
        raise values.fail("schema_version", f"is {version}, this program reads {HISTORY_VERSION}")
    for key in values.values:
        if key not in _KEYS:
            raise values.fail(repr(key)[:60], "is not a field of a conversation")
    system = values.values.get("system")
    if system is not None:
        _check_text(values, "system", system)
    turns = [_turn(values, index, turn) for index, turn in enumerate(values.array("turns", dict, MAX_TURNS))]
    if len(turns) % 2:
        raise values.fail("turns", "must end with a reply of the assistant")
    return Conversation(system, turns), values.text("model")


def _turn(values: Fields, index: int, turn: dict[str, Any]) -> Message:
    place = f"turns[{index}]"
    if turn.keys() != {"role", "content"}:
        raise values.fail(place, "must have a role and a content")
    role = "assistant" if index % 2 else "user"
    if turn["role"] != role:
        raise values.fail(place, f"must be from the {role}, not {turn['role']!r:.40}")
    _check_text(values, place, turn["content"])
    return Message(role, turn["content"])  # type: ignore[arg-type]  # one of the two


def _check_text(values: Fields, place: str, text: object) -> None:
    if not isinstance(text, str):
        raise values.fail(place, "must hold a text")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise values.fail(place, "holds half of a surrogate pair") from None


def require_conversation(path: Path) -> None:
    """Raises UsageError unless a conversation may be written to `path`, or to what it links to.

    That is: there is nothing yet in a folder that can be written to, or an earlier conversation, or an empty file.
    """
    target = Path(os.path.realpath(path.expanduser()))
    if target.is_file():
        try:
            if target.stat().st_size:
                _parse(read_object(target, MAX_FILE))
        except ModelError:
            raise UsageError(f"{path}: holds something else, which is left alone", "name another file") from None
    elif target.exists():
        raise UsageError(f"{path}: not a regular file", "name another file")
    elif not os.access(target.parent, os.W_OK | os.X_OK):
        reason = "cannot be written to" if target.parent.is_dir() else "is not a folder"
        raise UsageError(f"{path}: {target.parent} {reason}", "name another file")


def write_private(path: Path, text: str) -> None:
    """Replace `path`, or what it links to, by a file with `text` and mode 0600, whole or not at all."""
    try:
        write_atomic(Path(os.path.realpath(path.expanduser())), text.encode(), private=True)
    except OSError as error:
        raise ResourceError(f"{path}: {error.strerror}", "name a file that can be written") from None
