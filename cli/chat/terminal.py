"""Reads the messages of a chat from a terminal or a pipe: line editing, pasted text, Ctrl-C and Ctrl-D."""

from contextlib import suppress
from pathlib import Path

from mycli.cli.chat.slash_commands import FENCE, SlashCommands
from mycli.cli.command import Call
from mycli.runtime.errors import ExitCode, UserError

HISTORY_LINES = 1000
_ASCII = {"ANSI_X3.4-1968", "US-ASCII"}  # names of the C locale's encoding


def read_message(call: Call) -> str:
    """Read a line, pasted text, or the text between two lines of three quotes. Raises EOFError at the end."""
    line = call.out.read_line(">>> ")
    if not line.lstrip().startswith(FENCE):
        return line
    lines = [line.lstrip().removeprefix(FENCE)]
    while not lines[-1].rstrip().endswith(FENCE):
        try:
            lines.append(call.out.read_line("... "))
        except EOFError:
            break
    lines[-1] = lines[-1].rstrip().removesuffix(FENCE)
    return "\n".join(lines).strip("\n")


def edit_lines(history: Path, plain: bool) -> None:
    """Turn on line editing with a private history file; unless `plain`, pasted text arrives as one message.

    Raises OSError if the history file cannot be used; lines can be edited all the same.
    """
    import atexit
    import locale
    import readline

    # readline takes the encoding of the locale. In the C locale it cannot hold other characters than ASCII, while
    # Python reads UTF-8 there.
    with suppress(locale.Error):  # a system without this locale
        if locale.nl_langinfo(locale.CODESET) in _ASCII:
            locale.setlocale(locale.LC_CTYPE, "C.UTF-8")
    readline.parse_and_bind(f"set enable-bracketed-paste {'off' if plain else 'on'}")
    readline.set_history_length(HISTORY_LINES)
    readline.set_auto_history(False)  # `_remember` adds lines
    history.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    history.touch(mode=0o600)
    history.chmod(0o600)
    readline.read_history_file(history)
    before = readline.get_current_history_length()

    def write() -> None:
        # Appended: another chat may have written its lines meanwhile.
        with suppress(OSError):
            readline.append_history_file(readline.get_current_history_length() - before, history)

    atexit.register(write)


def complete_commands(commands: SlashCommands) -> None:
    """Complete slash commands with Tab; in a message Tab does nothing."""
    import readline

    def offer(_: str, state: int) -> str | None:
        line = readline.get_line_buffer()[: readline.get_endidx()]
        matches = commands.complete(line) if line.startswith("/") else []
        return matches[state] if state < len(matches) else None

    readline.set_completer_delims(" ")
    readline.set_completer(offer)
    readline.parse_and_bind("tab: complete")


def _remember(line: str) -> None:
    # Pasted text is left out: in the history file its lines would become separate messages.
    import readline

    last = readline.get_current_history_length()
    if "\n" not in line and line.strip() and (not last or readline.get_history_item(last) != line):
        with suppress(UnicodeEncodeError):  # the locale lacks a character
            readline.add_history(line)


def _is_typing(call: Call) -> bool:
    # After Ctrl-C readline still has the text of the line.
    if not call.out.interactive:
        return False
    import readline

    return bool(readline.get_line_buffer())


def converse(commands: SlashCommands) -> ExitCode:
    """Answer messages until the end. Ctrl-C at an empty prompt warns once, then raises KeyboardInterrupt.

    Returns the code of the first error in a pipe; on a terminal, where the user saw the errors, always success.
    """
    call, warned, code = commands.chat.call, False, ExitCode.OK
    while not commands.chat.finished:
        try:
            message = read_message(call)
        except EOFError:
            if call.out.interactive:
                call.out.result("")
            break
        except KeyboardInterrupt:
            if _is_typing(call):
                warned = False
                call.out.note("")  # the next prompt is on a line of its own
                continue
            if warned:
                raise
            warned = True
            call.out.note("\n(press Ctrl-C again or Ctrl-D to leave)")
            continue
        except UserError as error:  # bytes that are not UTF-8: in a pipe they end the chat
            if not call.out.interactive:
                raise
            call.out.error(error)
            continue
        warned = False
        if not message.strip():
            continue
        if call.out.interactive:
            _remember(message)
        try:
            commands.handle(message)
        except UserError as error:
            call.out.error(error)
            if not call.out.interactive:
                code = code or error.exit_code
        except KeyboardInterrupt:
            call.out.note("\n(stopped)")
    return code
