"""`mycli chat`: a conversation in the terminal, streamed; nothing is done to its context silently."""

from pathlib import Path
from typing import Annotated, get_args

import typer

from mycli.cli.chat.history import Conversation, SessionFile, require_conversation
from mycli.cli.chat.session import Chat, Overflow, thinking
from mycli.cli.chat.slash_commands import SlashCommands
from mycli.cli.chat.terminal import complete_commands, converse, edit_lines
from mycli.cli.command import Call, command
from mycli.cli.flags import options
from mycli.cli.flags.records import KeepFlags, LoadFlags, SamplingFlags
from mycli.cli.load import load_engine
from mycli.runtime.errors import ExitCode, UsageError
from mycli.runtime.hub.store import state_dir

EXAMPLES = (
    "mycli chat pico",
    'mycli chat pico --system "Answer briefly." --temperature 0',
    "mycli chat pico --session talk.json --overflow drop-oldest",
    'echo "My name is Leo." | mycli chat pico --json',
)


@command
def chat(
    call: Call,
    model: options.Model,
    system: options.System = None,
    session: Annotated[
        Path | None,
        typer.Option("--session", metavar="FILE", help="Continue this conversation, and save it after every turn."),
    ] = None,
    overflow: Annotated[
        str,
        typer.Option("--overflow", metavar="refuse|drop-oldest", help="What to do when the context is full."),
    ] = "refuse",
    think: Annotated[
        str | None, typer.Option("--think", metavar="on|off", help="Reasoning first.", show_default="the template's")
    ] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Render replies as Markdown on a terminal.")] = False,
    escapes: options.Escapes = False,
    *,
    drawn: SamplingFlags,
    kept: KeepFlags,
    loading: LoadFlags,
) -> ExitCode:
    """Talk with a model in the terminal.

    Ctrl-C stops a reply, Ctrl-D leaves, /? lists the commands. From a pipe, every line is a message;
    with --json each reply is an object on a line.
    """
    full = options.choice("--overflow", overflow, get_args(Overflow))
    if think not in (None, "on", "off"):
        raise UsageError(f"--think {think}: neither on nor off", "--think on")
    drawn.check()
    conversation = Conversation()
    kept_in = None
    if session is not None:
        kept_in = SessionFile(session)
        if session.is_file() and session.stat().st_size:
            conversation.load(session)
        require_conversation(session)
    if system is not None:
        conversation.system = system
    loaded = load_engine(call, model, kept.added(loading.resolve()))
    template = loaded.model.tokenizer.template
    if template is None:
        raise UsageError(f"{model} has no chat template", f"mycli run {model} PROMPT continues a text")
    sampling = drawn.resolve(loaded.model.defaults)
    if call.out.interactive:
        edit_lines(state_dir() / "chat_history", plain=call.out.plain)
        call.out.note(f"{loaded.source.name} · {loaded.placement.device} · /? for help")
    if conversation.turns:
        call.out.note(f"({len(conversation.turns)} messages from {session})")
    chat = Chat(
        call,
        loaded,
        sampling,
        conversation,
        stops=tuple(drawn.stop or ()),
        escapes=escapes,
        markdown=markdown,
        overflow=full,
        arguments={} if think is None else thinking(template, think == "on"),
        session_file=kept_in,
    )
    commands = SlashCommands(chat)
    if call.out.interactive:
        complete_commands(commands)
    return converse(commands)
