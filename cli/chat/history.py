"""The messages of a conversation, and the file in which they are saved."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mycli.runtime.errors import ModelError, ResourceError, UsageError
from mycli.runtime.tokenizer.chat_template import Message
from mycli.runtime.utils.files import expand_user, write_atomic
from mycli.runtime.utils.json_fields import Fields, read_object

HISTORY_VERSION = 1
MAX_FILE = 64 << 20  # bytes of a saved conversation
MAX_TURNS = 100_000
_KEYS = {"schema_version", "model", "system", "turns"}


@dataclass
class Conversation:
    """Alternating turns of user and assistant, oldest first, and the system prompt.

    `hidden`: number of oldest turns left out of the prompt; `reading`: (name, text) of files for the next message.
    """

    system: str | None = None
    turns: list[Message] = field(default_factory=list)
    hidden: int = 0
    reading: list[tuple[str, str]] = field(default_factory=list)

    def messages(self) -> list[Message]:
        system = [] if self.system is None else [Message("system", self.system)]
        return [*system, *self.turns[self.hidden :]]

    def compose(self, text: str) -> str:
        """Return a message of the files read before it and `text`."""
        return "\n\n".join([*(f"{name}:\n\n{content}" for name, content in self.reading), text])

    def clear(self) -> None:
        self.turns, self.hidden, self.reading = [], 0, []

    @property
    def last_message(self) -> str:
        """The last message of the user. Raises UsageError if there is none."""
        if len(self.turns) < 2:
            raise UsageError("there is no message yet", "write a message first")
        return self.turns[-2].content

    def undo(self) -> str:
        """Remove the last message and its reply, and return the message."""
        message = self.last_message
        del self.turns[-2:]
        self.hidden = min(self.hidden, len(self.turns))
        return message

    @property
    def most_hidden(self) -> int:
        """The number of turns that may be hidden: all but the message to answer."""
        return max(self.hidden, (len(self.turns) - 1) // 2 * 2)

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """Restore the conversation if the block ends with an exception."""
        turns, hidden, reading = list(self.turns), self.hidden, list(self.reading)
        try:
            yield
        except BaseException:
            self.turns, self.hidden, self.reading = turns, hidden, reading
            raise

    def save(self, path: Path, model: str) -> None:
        """Write the conversation to `path` atomically, with mode 0600.

        Raises UsageError for a file that is not a conversation, which is not replaced, and ResourceError.
        """
        require_conversation(path)
        turns = [{"role": turn.role, "content": turn.content} for turn in self.turns]
        value = {"schema_version": HISTORY_VERSION, "model": model, "system": self.system, "turns": turns}
        write_private(path, json.dumps(value, indent=1) + "\n")

    def load(self, path: Path) -> str:
        """Load what `save` wrote and return the name of its model. Raises ModelError and then changes nothing."""
        try:
            values = read_object(path, MAX_FILE)
            loaded, model = _parse(values)
        except ModelError as error:
            raise ModelError(error.message, "name a file written by /save or --session") from None
        self.clear()
        self.system, self.turns = loaded.system, loaded.turns
        return model


class SessionFile:
    """The file of --session; it is not overwritten after a change by another program. Create it before reading."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._seen = self._state()

    def save(self, conversation: Conversation, model: str) -> None:
        """Write the file. Raises what `Conversation.save` raises, and UsageError if another program changed it."""
        state = self._state()
        if state is not None and state != self._seen:
            message = f"{self.path} was changed by another program, so the conversation was not saved to it"
            raise UsageError(message, "save it to another file: /save FILE")
        conversation.save(self.path, model)
        self._seen = self._state()

    def _state(self) -> tuple[int, int, int] | None:
        # Differs after each write; None without a file.
        try:
            stat = os.stat(expand_user(self.path))
        except OSError:
            return None
        return stat.st_ino, stat.st_mtime_ns, stat.st_size


def _parse(values: Fields) -> tuple[Conversation, str]:
    version = values.integer("schema_version")
    if version != HISTORY_VERSION:
        raise values.fail("schema_version", f"is {version}; this program reads {HISTORY_VERSION}")
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
        raise values.fail(place, "must be a string")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise values.fail(place, "contains an unpaired surrogate") from None


def require_conversation(path: Path) -> None:
    """Raise UsageError unless `path`, or its link target, can be created, is empty or holds a conversation."""
    target = Path(os.path.realpath(expand_user(path)))
    if target.is_file():
        try:
            if target.stat().st_size:
                _parse(read_object(target, MAX_FILE))
        except ModelError:
            raise UsageError(f"{path} is not a conversation and was not replaced", "name another file") from None
    elif target.exists():
        raise UsageError(f"{path}: not a regular file", "name another file")
    elif not os.access(target.parent, os.W_OK | os.X_OK):
        reason = "is not writable" if target.parent.is_dir() else "is not a folder"
        raise UsageError(f"{path}: {target.parent} {reason}", "name another file")


def write_private(path: Path, text: str) -> None:
    """Write `text` to `path`, or to its link target, atomically and with mode 0600."""
    try:
        write_atomic(Path(os.path.realpath(expand_user(path))), text.encode(), private=True)
    except OSError as error:
        raise ResourceError(f"{path}: {error.strerror}", "name a writable file") from None
