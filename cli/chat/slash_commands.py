"""The slash commands of `mycli chat`; the docstring of each method is its line in /?."""

import difflib
import math
import os
import re
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
from mycli.runtime.utils.files import expand_user
from mycli.runtime.utils.units import pluralize

FENCE = '"""'
METER = 40  # columns, fewer on a narrow terminal
PLAIN_WORDS = {"exit", "quit", "bye", "help", "?"}  # messages that were probably meant as commands
ALIASES = {"/help": "/?", "/h": "/?", "/exit": "/bye", "/quit": "/bye", "/q": "/bye"}  # commands of other programs
PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")
PATHS = ("/read", "/save", "/load")  # commands that take a file


class SlashCommands:
    """Handles the lines of a chat: messages and commands."""

    def __init__(self, chat: Chat) -> None:
        self.chat = chat
        self._out = chat.call.out
        settings = (self.set, self.system, self.show, self.context, self.stats)
        actions = (self.read, self.retry, self.edit, self.undo, self.clear, self.save, self.load, self.bye)
        self.commands: dict[str, Callable[[str], None]] = {"/?": self.help}
        self.commands |= {f"/{method.__name__}": method for method in (*settings, *actions)}

    def handle(self, line: str) -> None:
        """Handle a message or command. Raises UserError, after which the conversation continues."""
        if not line.startswith("/"):
            self.chat.answer(line)
            if self._out.interactive and line.strip().lower() in PLAIN_WORDS:
                self._out.note("(sent to the model as a message; /bye leaves, /? lists the commands)")
            return
        name, *rest = line.split(maxsplit=1)
        method = self.commands.get(ALIASES.get(name, name))
        if method is None:
            close = difflib.get_close_matches(name, [*self.commands, *ALIASES], 1, 0.6) if name != "/" else []
            similar = f"; did you mean {close[0]}?" if close else ""
            hint = "/? lists the commands; start with a space to send a message that begins with /"
            raise UsageError(f"{name}: no such command{similar}", hint)
        method(rest[0].strip() if rest else "")

    def complete(self, line: str) -> list[str]:
        """Return the completions of the last word of a line that begins with a slash: commands, settings, files."""
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
            "Commands", [*rows, (FENCE, "start and end a message of several lines; pasted lines are one message")]
        )

    def set(self, argument: str) -> None:
        """NAME VALUE: temperature, top_k, top_p, min_p, a penalty, seed, or think on|off"""
        # `parameter NAME VALUE` as in Ollama, NAME=VALUE, and the names of the options, which have hyphens.
        _, name, value = re.split(r"([^\s=]*)[\s=]*", argument.removeprefix("parameter "), maxsplit=1)
        name = name.replace("-", "_")
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
            raise UsageError(f"/set {name}: no such setting", f"use one of: {', '.join([*kinds, 'think'])}")
        if not value:
            raise UsageError(f"/set {name} needs a value", f"for example: /set {name} 1; /show prints the settings")
        try:
            number = kinds[name](value)
        except ValueError:
            raise UsageError(f"/set {name}: {value!r} is not a number", f"for example: /set {name} 1") from None
        if number is not None and not math.isfinite(number):
            raise UsageError(f"/set {name}: {value} is not a finite number", f"for example: /set {name} 1")
        self.chat.sampling = replace(self.chat.sampling, **{name: number})  # type: ignore[arg-type]  # the name was checked

    @staticmethod
    def _settings() -> dict[str, Callable[[str], float | int | None]]:
        return {
            "top_k": int,
            "seed": lambda text: None if text == "random" else int(text),
            **dict.fromkeys(("temperature", "top_p", "min_p", *PENALTIES), float),
        }

    def _think(self, value: str) -> None:
        template = self.chat.loaded.model.tokenizer.template
        if value not in ("on", "off"):
            problem = f": {value!r} is not on or off" if value else " needs a value"
            raise UsageError(f"/set think{problem}", "for example: /set think on")
        if template is None:
            raise UsageError("/set think: the model has no chat template", "start with --chat-template FILE")
        try:
            self.chat.arguments = thinking(template, value == "on")
        except UsageError as error:  # its hint names the option
            raise UsageError(f"/set think: {error}", "the model decides whether it reasons") from None

    def system(self, argument: str) -> None:
        """[TEXT]: show or set the system prompt; none removes it"""
        if not argument:
            self._out.result(self.chat.conversation.system or "(no system prompt)")
            return
        self.chat.conversation.system = None if argument == "none" else argument
        self._out.note("(takes effect with the next message)")

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
            *((name, "on" if enabled else "off") for name, enabled in self.chat.arguments.items()),
            ("overflow", self.chat.overflow),
            ("session", str(self.chat.session_file.path) if self.chat.session_file else "none"),
            ("messages", str(len(conversation.turns))),
        ]
        self._out.card("Settings", rows)

    def context(self, argument: str) -> None:
        """show how much of the context is used"""
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
            ("turns", f"{turns} tokens, {len(conversation.turns) - conversation.hidden} messages"),
            ("free", f"{free} of {size} tokens"),
        ]
        if conversation.hidden:
            rows.append(("dropped", f"{conversation.hidden} messages"))
        for name, text in conversation.reading:
            count = len(chat.loaded.model.tokenizer.encode(text, add_special=False))
            rows.append(("read", f"{name}, {pluralize(count, 'token')}, for the next message"))
        self._out.card(f"[{meter}]", rows)

    def stats(self, argument: str) -> None:
        """show the statistics of the last reply"""
        self._out.result("no reply yet" if self.chat.last is None else self.chat.statistics(self.chat.last))

    def read(self, argument: str) -> None:
        """FILE: add a text file to the next message"""
        path = self._path("/read", argument)
        text = read_document(path)
        self.chat.conversation.reading.append((path.name, text))
        self._out.note(f"({path.name}: {pluralize(len(text), 'character')} added to the next message)")

    def retry(self, argument: str) -> None:
        """generate the last reply again"""
        self.chat.ask(self.chat.conversation.last_message, replace_last=True)

    def edit(self, argument: str) -> None:
        """[TEXT]: change the last message, in $EDITOR or to TEXT, and answer it again"""
        before = self.chat.conversation.last_message
        after = argument or self._edited(before)
        if not after.strip() or after == before:
            self._out.note("(the message was not changed)")
            return
        self.chat.ask(after, replace_last=True)

    def _edited(self, text: str) -> str:
        editor = os.environ.get("VISUAL") or os.environ.get("EDITOR")
        if not editor or not self._out.interactive:
            raise UsageError("no editor: EDITOR is not set", "use /edit NEW TEXT, or set EDITOR")
        with tempfile.NamedTemporaryFile("w+", suffix=".txt", encoding="utf-8") as file:  # mode 0600
            file.write(text)
            file.flush()
            try:
                done = subprocess.run([*shlex.split(editor), file.name])
            except (OSError, ValueError) as error:
                raise UsageError(f"EDITOR={editor}: {error}", "use /edit NEW TEXT, or set EDITOR") from None
            if done.returncode:
                raise UsageError(f"EDITOR={editor}: exit code {done.returncode}", "the message was not changed")
            return read_document(Path(file.name)).removesuffix("\n")  # by name: editors replace the file

    def undo(self, argument: str) -> None:
        """remove the last message and its reply"""
        message = self.chat.conversation.undo()
        self.chat.save_session()
        self._out.note(f"(removed: {message if len(message) <= 60 else message[:59] + '…'})")

    def clear(self, argument: str) -> None:
        """start a new conversation"""
        self.chat.conversation.clear()
        self.chat.loaded.engine.forget()
        self.chat.save_session()
        self._out.note("(a new conversation)")

    def save(self, argument: str) -> None:
        """FILE: save the conversation"""
        session = self.chat.session_file
        path = session.path if session and not argument else self._path("/save", argument)
        if session and path == session.path:
            self.chat.save_session()
        else:
            self.chat.conversation.save(path, self.chat.loaded.source.name)
        self._out.note(f"({len(self.chat.conversation.turns)} messages saved to {path})")

    def load(self, argument: str) -> None:
        """FILE: continue a saved conversation"""
        path = self._path("/load", argument)
        model = self.chat.conversation.load(path)
        self.chat.save_session()
        other = "" if model == self.chat.loaded.source.name else f", with replies of {model}"
        self._out.note(f"({len(self.chat.conversation.turns)} messages loaded{other})")

    def bye(self, argument: str) -> None:
        """leave, as /exit, /quit and Ctrl-D"""
        self.chat.finished = True

    @staticmethod
    def _path(command: str, argument: str) -> Path:
        if not argument:
            raise UsageError(f"{command} needs a file", f"{command} FILE")
        return expand_user(argument)


def complete_path(beginning: str) -> list[str]:
    """Return the paths that start with `beginning`, folders with a slash; hidden files only after a typed dot."""
    folder, _, prefix = beginning.rpartition("/")
    shown = f"{folder}/" if "/" in beginning else ""
    try:
        entries = sorted(os.scandir(expand_user(shown or ".")), key=lambda entry: entry.name)
    except OSError:
        return []
    return [
        f"{shown}{entry.name}{'/' if entry.is_dir() else ''}"
        for entry in entries
        if entry.name.startswith(prefix) and (prefix or not entry.name.startswith("."))
    ]
