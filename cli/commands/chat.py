"""`mycli chat`: a conversation in the terminal, streamed; nothing is done to its context silently."""

from pathlib import Path
from typing import Annotated

import typer

from mycli.cli import options
from mycli.cli.chat.history import Conversation
from mycli.cli.chat.session import Chat, Overflow, thinking
from mycli.cli.chat.slash_commands import FENCE, SlashCommands
from mycli.cli.command import Call, command
from mycli.cli.load import choose_sampling, load
from mycli.runtime.errors import UsageError, UserError

EXAMPLES = (
    "mycli chat pico",
    'mycli chat pico --system "Answer briefly." --temperature 0',
    "mycli chat pico --session talk.json --overflow drop-oldest",
    'echo "My name is Leo." | mycli chat pico --json',
)
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


def _edit_lines(history: Path) -> None:
    """Line editing, pastes that arrive as a whole, and a history that its owner alone can read."""
    import atexit
    import readline

    history.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    history.touch(mode=0o600)
    history.chmod(0o600)
    readline.parse_and_bind("set enable-bracketed-paste on")
    readline.read_history_file(history)
    readline.set_history_length(HISTORY_LINES)
    readline.set_auto_history(False)  # `_remember` chooses
    atexit.register(readline.write_history_file, history)


def _remember(line: str) -> None:
    """A line for the history; what was pasted is not one, and the file could not tell its lines apart."""
    import readline

    last = readline.get_current_history_length()
    if "\n" not in line and line.strip() and (not last or readline.get_history_item(last) != line):
        readline.add_history(line)


def converse(commands: SlashCommands) -> None:
    """Read and answer until the person leaves. Ctrl-C at an empty prompt warns once, then raises KeyboardInterrupt."""
    call, warned = commands.chat.call, False
    while not commands.chat.finished:
        try:
            message = read_message(call)
        except EOFError:
            if call.out.interactive:
                call.out.result("")
            return
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
        except KeyboardInterrupt:
            call.out.note("\n(stopped)")


@command
def chat(
    call: Call,
    model: options.Model,
    system: Annotated[str | None, typer.Option("--system", help="System prompt.")] = None,
    session: Annotated[
        Path | None,
        typer.Option("--session", metavar="FILE", help="Go on with this conversation, and keep it after every turn."),
    ] = None,
    overflow: Annotated[
        str,
        typer.Option("--overflow", metavar="refuse|drop-oldest", help="What to do when the context is full."),
    ] = "refuse",
    think: Annotated[
        str | None, typer.Option("--think", metavar="on|off", help="Reasoning first.", show_default="the template's")
    ] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Render replies as Markdown on a terminal.")] = False,
    escapes: Annotated[
        bool, typer.Option("--escapes", help="Show control characters to a terminal as they are.")
    ] = False,
    temperature: options.Temperature = None,
    top_k: options.TopK = None,
    top_p: options.TopP = None,
    min_p: options.MinP = None,
    repetition_penalty: options.RepetitionPenalty = None,
    seed: options.Seed = None,
    stop: options.Stop = None,
    draft: options.Draft = "none",
    context: options.Context = None,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    kv: options.Kv = "auto",
    shadow: options.Shadow = False,
    allow_nonfinite: options.AllowNonfinite = False,
) -> None:
    """Talk with a model in the terminal.

    Ctrl-C stops a reply, Ctrl-D leaves, /? lists the commands. From a pipe, every line is a message;
    with --json each reply is an object on a line.
    """
    kinds: tuple[Overflow, ...] = ("refuse", "drop-oldest")
    if overflow not in kinds:
        raise UsageError(f"--overflow {overflow}: not known", "choose refuse or drop-oldest")
    if think not in (None, "on", "off"):
        raise UsageError(f"--think {think}: neither on nor off", "--think on")
    conversation = Conversation()
    if session is not None and session.exists():
        conversation.load(session)
    if system is not None:
        conversation.system = system
    loaded = load(
        call,
        model,
        device=device,
        dtype=dtype,
        kv=kv,
        shadow=shadow,
        context=context,
        draft=draft,
        allow_nonfinite=allow_nonfinite,
    )
    template = loaded.assistant.tokenizer.template
    if template is None:
        raise UsageError(f"{model} has no chat template", f"mycli run {model} PROMPT continues a text")
    sampling = choose_sampling(
        loaded.assistant.defaults,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
    )
    if call.out.interactive:
        from mycli.runtime.hub.resolve import state

        _edit_lines(state() / "chat_history")
        call.out.note(f"{loaded.source.name} · {loaded.placement.device} · /? for help")
    if conversation.turns:
        call.out.note(f"({len(conversation.turns)} messages from {session})")
    chat = Chat(
        call,
        loaded,
        sampling,
        conversation,
        stops=tuple(stop or ()),
        escapes=escapes,
        markdown=markdown,
        overflow="refuse" if overflow == "refuse" else "drop-oldest",
        arguments={} if think is None else thinking(template, think == "on"),
        session_file=session,
    )
    converse(SlashCommands(chat))
