"""A conversation read from a terminal or a pipe: line editing, pastes, messages of several lines, Ctrl-C and Ctrl-D.

Knows lines. Does not know what is answered, see `cli.chat.session`, nor what a line that begins with a slash does.
"""

from pathlib import Path

from mycli.cli.chat.slash_commands import FENCE, SlashCommands
from mycli.cli.command import Call
from mycli.runtime.errors import ExitCode, UserError

HISTORY_LINES = 1000


def read_message(call: Call) -> str:
    """What a person wants to say: a line, what was pasted, or all between two lines of three quotes.

    Raises EOFError at the end.
    """
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
    """Line editing, pastes that arrive as a whole, and a history that its owner alone can read.

    `plain`: a terminal that knows no escape sequences, so that pastes arrive as lines.
    """
    import atexit
    import readline

    history.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    history.touch(mode=0o600)
    history.chmod(0o600)
    readline.parse_and_bind(f"set enable-bracketed-paste {'off' if plain else 'on'}")
    readline.read_history_file(history)
    readline.set_history_length(HISTORY_LINES)
    readline.set_auto_history(False)  # `_remember` chooses
    atexit.register(readline.write_history_file, history)


def complete_commands(commands: SlashCommands) -> None:
    """Tab completes what begins with a slash; in a message it does nothing."""
    import readline

    def offer(_: str, state: int) -> str | None:
        line = readline.get_line_buffer()[: readline.get_endidx()]
        found = commands.complete(line) if line.startswith("/") else []
        return found[state] if state < len(found) else None

    readline.set_completer_delims(" ")
    readline.set_completer(offer)
    readline.parse_and_bind("tab: complete")


def _remember(line: str) -> None:
    """A line for the history; what was pasted is not one, and the file could not tell its lines apart."""
    import readline

    last = readline.get_current_history_length()
    if "\n" not in line and line.strip() and (not last or readline.get_history_item(last) != line):
        readline.add_history(line)


def converse(commands: SlashCommands) -> ExitCode:
    """Read and answer until the person leaves. Ctrl-C at an empty prompt warns once, then raises KeyboardInterrupt.

    Returns success on a terminal, where a person saw what was refused; from a pipe the code of the first refusal.
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
            if warned:
                raise
            warned = True
            call.out.note("\n(Ctrl-C again or Ctrl-D leaves)")
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
