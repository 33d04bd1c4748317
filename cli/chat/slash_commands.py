"""What can be typed in a chat after a slash. The docstring of each method is its line in /?.

Knows the conversation and its settings. Does not know how lines are read.
"""

import difflib
import math
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from mycli.cli.chat.session import Chat, thinking
from mycli.cli.text.input import read_document
from mycli.runtime.errors import UsageError
from mycli.runtime.utils.units import pluralize

FENCE = '"""'
METER = 40  # columns, fewer on a narrow terminal
PLAIN_WORDS = {"exit", "quit", "bye", "help", "?"}  # which a person may mean as commands
ALIASES = {"/help": "/?", "/h": "/?", "/exit": "/bye", "/quit": "/bye", "/q": "/bye"}  # what other programs say
PATHS = ("/read", "/save", "/load")  # commands that take a file


class SlashCommands:
    """Messages and commands of one chat, by the line that was typed."""

    def __init__(self, chat: Chat) -> None:
        self.chat = chat
        self._out = chat.call.out
        asking = (self.set, self.system, self.show, self.context, self.stats)
        changing = (self.read, self.retry, self.edit, self.undo, self.clear, self.save, self.load, self.bye)
        self.commands: dict[str, Callable[[str], None]] = {"/?": self.help}
        self.commands |= {f"/{method.__name__}": method for method in (*asking, *changing)}

    def handle(self, line: str) -> None:
        """One message or command. Raises UserError; the conversation goes on after it."""
        if not line.startswith("/"):
            self.chat.answer(line)
            if self._out.interactive and line.strip().lower() in PLAIN_WORDS:
                self._out.note("(that was a message to the model: /bye leaves, /? lists the commands)")
            return
        name, *rest = line.split(maxsplit=1)
        method = self.commands.get(ALIASES.get(name, name))
        if method is None:
            close = difflib.get_close_matches(name, [*self.commands, *ALIASES], 1, 0.6)
            meant = f"; did you mean {close[0]}?" if close else ""
            raise UsageError(
                f"{name}: no such command{meant}", "/? lists them; begin with a space to send it to the model"
            )
        method(rest[0].strip() if rest else "")

    def complete(self, line: str) -> list[str]:
        """What Tab offers for a line begun with a slash: commands, settings, files; each replaces its last word."""
        words = line.split(" ")
        if len(words) == 1:
            return [f"{name} " for name in self.commands if name.startswith(line) and name != "/?"]
        if words[0] == "/set" and len(words) == 2:
            return [f"{name} " for name in (*self._settings(), "think") if name.startswith(words[1])]
        if words[0] in PATHS and len(words) == 2:
            return complete_path(words[1])
        return []

    def help(self, argument: str) -> None:
        """list the commands"""
        rows = [(name, method.__doc__ or "") for name, method in self.commands.items()]
        self._out.card(
            "Commands", [*rows, (FENCE, "begins and ends a message of several lines; pasted lines are one message")]
        )

    def set(self, argument: str) -> None:
        """NAME VALUE: temperature, top_k, top_p, min_p, repetition_penalty, seed, or think on|off"""
        name, _, value = argument.removeprefix("parameter ").partition(" ")  # as Ollama spells it
        if not name:
            self.show("")
            return
        if name == "system":
            self.system(value or "none")
            return
        if name == "think":
            self._think(value)
            return
        kinds = self._settings()
        if name not in kinds:
            raise UsageError(f"/set {name}: no such setting", f"one of {', '.join([*kinds, 'think'])}")
        try:
            number = kinds[name](value)
        except ValueError:
            raise UsageError(f"/set {name}: {value!r} is not a number", f"/set {name} 1") from None
        if number is not None and not math.isfinite(number):
            raise UsageError(f"/set {name}: {value} is not a finite number", f"/set {name} 1")
        self.chat.sampling = replace(self.chat.sampling, **{name: number})  # type: ignore[arg-type]  # the name was checked

    @staticmethod
    def _settings() -> dict[str, Callable[[str], float | int | None]]:
        """What /set takes, and how each value is read."""
        return {
            "top_k": int,
            "seed": lambda text: None if text == "random" else int(text),
            **{key: float for key in ("temperature", "top_p", "min_p", "repetition_penalty")},
        }

    def _think(self, value: str) -> None:
        template = self.chat.loaded.model.tokenizer.template
        if value not in ("on", "off") or template is None:
            raise UsageError(f"/set think: {value!r} is neither on nor off", "/set think on")
        self.chat.arguments = thinking(template, value == "on")

    def system(self, argument: str) -> None:
        """[TEXT]: show or set the system prompt; none: without one"""
        if not argument:
            self._out.result(self.chat.conversation.system or "(no system prompt)")
            return
        self.chat.conversation.system = None if argument == "none" else argument
        self._out.note("(counts from the next message)")

    def show(self, argument: str) -> None:
        """show the model and the settings"""
        loaded, conversation = self.chat.loaded, self.chat.conversation
        config, settings = loaded.model.runner.config, vars(self.chat.sampling)
        if settings["seed"] is None:
            settings = {**settings, "seed": "random"}
        rows = [
            ("model", loaded.source.name),
            ("family", f"{config.model_type}, {config.parameters():,} parameters"),
            ("runs on", f"{loaded.placement.device}, {str(loaded.placement.dtype).removeprefix('torch.')}"),
            ("system", conversation.system or "none"),
            *((name, str(value)) for name, value in settings.items() if value != ()),
            *((name, "on" if wanted else "off") for name, wanted in self.chat.arguments.items()),
            ("overflow", self.chat.overflow),
            ("session", str(self.chat.session_file.path) if self.chat.session_file else "not kept"),
            ("turns", str(len(conversation.turns))),
        ]
        self._out.card("Settings", rows)

    def context(self, argument: str) -> None:
        """what fills the context: system prompt, turns, free"""
        chat, conversation = self.chat, self.chat.conversation
        size = chat.loaded.engine.context
        system = 0
        if conversation.system:
            system = len(chat.loaded.model.tokenizer.encode(conversation.system, add_special=False))
        whole = len(chat.tokens()) if conversation.turns else system
        turns, free = whole - system, size - whole
        width = max(1, min(METER, shutil.get_terminal_size().columns - 4))
        marks = [round(width * part / size) for part in (system, whole)]
        meter = "#" * marks[0] + "=" * (marks[1] - marks[0]) + "." * (width - marks[1])
        rows = [
            ("system", f"{system} tokens"),
            ("turns", f"{turns} tokens, {len(conversation.turns) - conversation.hidden} messages with their markup"),
            ("free", f"{free} of {size} tokens"),
        ]
        if conversation.hidden:
            rows.append(("dropped", f"{conversation.hidden} messages"))
        for name, text in conversation.reading:
            count = len(chat.loaded.model.tokenizer.encode(text, add_special=False))
            rows.append(("read", f"{name}, {pluralize(count, 'token')}, part of the next message"))
        self._out.card(f"[{meter}]", rows)

    def stats(self, argument: str) -> None:
        """statistics of the last reply"""
        self._out.result("no reply yet" if self.chat.last is None else self.chat.statistics(self.chat.last))

    def read(self, argument: str) -> None:
        """FILE: read a text file, as a part of the next message"""
        path = self._path("/read", argument)
        text = read_document(path)
        self.chat.conversation.reading.append((path.name, text))
        self._out.note(f"({path.name}: {pluralize(len(text), 'character')}, a part of the next message)")

    def retry(self, argument: str) -> None:
        """another reply to the last message"""
        self.chat.ask(self.chat.conversation.last_message, instead=True)

    def edit(self, argument: str) -> None:
        """[TEXT]: change the last message, in $EDITOR or to TEXT, and have it answered again"""
        before = self.chat.conversation.last_message
        after = argument or self._edited(before)
        if not after.strip() or after == before:
            self._out.note("(nothing was changed)")
            return
        self.chat.ask(after, instead=True)

    def _edited(self, text: str) -> str:
        editor = os.environ.get("VISUAL") or os.environ.get("EDITOR")
        if not editor or not self._out.interactive:
            raise UsageError("there is no editor", "/edit NEW TEXT, or set EDITOR")
        with tempfile.NamedTemporaryFile("w+", suffix=".txt", encoding="utf-8") as file:  # mode 0600
            file.write(text)
            file.flush()
            try:
                done = subprocess.run([*shlex.split(editor), file.name])
            except (OSError, ValueError) as error:
                raise UsageError(f"EDITOR={editor}: {error}", "/edit NEW TEXT, or set EDITOR") from None
            if done.returncode:
                raise UsageError(f"EDITOR={editor}: ended with {done.returncode}", "nothing was changed")
            return read_document(Path(file.name)).removesuffix("\n")  # by name: editors replace the file

    def undo(self, argument: str) -> None:
        """take the last message and its reply back"""
        message = self.chat.conversation.undo()
        self.chat.keep()
        self._out.note(f"(taken back: {message if len(message) <= 60 else message[:59] + '…'})")

    def clear(self, argument: str) -> None:
        """forget the conversation"""
        self.chat.conversation.clear()
        self.chat.loaded.engine.forget()
        self.chat.keep()
        self._out.note("(a new conversation)")

    def save(self, argument: str) -> None:
        """FILE: write the conversation"""
        kept = self.chat.session_file
        path = kept.path if kept and not argument else self._path("/save", argument)
        if kept and path == kept.path:
            self.chat.keep()
        else:
            self.chat.conversation.save(path, self.chat.loaded.source.name)
        self._out.note(f"({len(self.chat.conversation.turns)} messages saved to {path})")

    def load(self, argument: str) -> None:
        """FILE: go on with a saved conversation"""
        path = self._path("/load", argument)
        model = self.chat.conversation.load(path)
        self.chat.keep()
        held = "" if model == self.chat.loaded.source.name else f", held with {model}"
        self._out.note(f"({len(self.chat.conversation.turns)} messages loaded{held})")

    def bye(self, argument: str) -> None:
        """leave; /exit, /quit and Ctrl-D do too"""
        self.chat.finished = True

    @staticmethod
    def _path(command: str, argument: str) -> Path:
        if not argument:
            raise UsageError(f"{command} needs a file", f"{command} FILE")
        return Path(argument).expanduser()


def complete_path(begun: str) -> list[str]:
    """The files and folders whose path begins as `begun` does, folders with a slash; hidden ones when asked for."""
    folder, _, prefix = begun.rpartition("/")
    shown = f"{folder}/" if "/" in begun else ""
    try:
        entries = sorted(os.scandir(Path(shown or ".").expanduser()), key=lambda entry: entry.name)
    except OSError:
        return []
    return [
        f"{shown}{entry.name}{'/' if entry.is_dir() else ''}"
        for entry in entries
        if entry.name.startswith(prefix) and (prefix or not entry.name.startswith("."))
    ]
