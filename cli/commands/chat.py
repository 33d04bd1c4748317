"""`mycli chat`: a conversation in the terminal."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated, get_args

from mycli.cli.chat.history import Conversation, SessionFile, require_conversation
from mycli.cli.chat.session import Chat, Overflow, thinking
from mycli.cli.chat.slash_commands import SlashCommands
from mycli.cli.chat.terminal import complete_commands, converse, edit_lines
from mycli.cli.command import Call, command
from mycli.cli.flags import options
from mycli.cli.flags.records import LoadFlags, PrefixCacheFlags, ReasoningFlags, SamplingFlags, TemplateFlags
from mycli.cli.load import load_engine, require_generative
from mycli.runtime.errors import ExitCode, UsageError
from mycli.runtime.hub.store import state_dir
from mycli.runtime.utils.files import expand_user

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
        options.option(
            "--session", "FILE", "Continue the conversation in this file, and save it there after every turn."
        ),
    ] = None,
    overflow: Annotated[
        str, options.option("--overflow", "refuse|drop-oldest", "What to do when the context is full.")
    ] = "refuse",
    think: Annotated[
        str | None, options.option("--think", "on|off", "Turn reasoning on or off.", show_default="from the template")
    ] = None,
    limit: Annotated[
        int | None,
        options.limit(
            "-n --max-tokens", "Maximum number of tokens of a reply.", show_default="the room of the context"
        ),
    ] = None,
    markdown: Annotated[bool, options.flag("--markdown", "Render replies as Markdown on a terminal.")] = False,
    escapes: options.Escapes = False,
    *,
    sampling: SamplingFlags,
    reasoning: ReasoningFlags,
    templates: TemplateFlags,
    prefix_cache: PrefixCacheFlags,
    loading: LoadFlags,
) -> ExitCode:
    """Chat with a model in the terminal.

    Ctrl-C stops a reply, Ctrl-D leaves, /? lists the commands. In a pipe every line is a message; with --json every
    reply is a JSON object on a line.
    """
    overflow_policy = options.choice("--overflow", overflow, get_args(Overflow))
    if think not in (None, "on", "off"):
        raise UsageError(f"--think {think} is not supported", "--think takes: on, off")
    sampling.check(call.out.warn)
    conversation = Conversation()
    session_file = None
    if session is not None:
        session = expand_user(session)
        session_file = SessionFile(session)  # before reading, so that a change by another program is noticed
        if session.is_file() and session.stat().st_size:
            conversation.load(session)
        require_conversation(session)
    if system is not None:
        conversation.system = system
    config = replace(prefix_cache.resolve(loading.resolve()), template=templates.resolve())
    loaded = load_engine(call, model, config)
    require_generative(loaded.model.runner.config)
    template = loaded.model.tokenizer.template
    if template is None:
        raise UsageError(f"{model} has no chat template", code="continue-text")
    params = sampling.resolve(loaded.model.defaults)
    if call.out.interactive:
        try:
            edit_lines(state_dir() / "chat_history", plain=call.out.plain)
        except OSError as error:
            call.out.warn(f"{state_dir() / 'chat_history'}: {error.strerror}: the history of this chat is not kept")
        call.out.note(f"{loaded.source.name} · {loaded.placement.device} · /? for help")
    if conversation.turns:
        call.out.note(f"({len(conversation.turns)} messages from {session})")
    chat = Chat(
        call,
        loaded,
        params,
        conversation,
        stops=tuple(sampling.stop or ()),
        escapes=escapes,
        markdown=markdown,
        overflow=overflow_policy,
        limit=None if limit == options.NO_LIMIT else limit,
        arguments={} if think is None else thinking(template, think == "on"),
        session_file=session_file,
        reasoning=reasoning,
    )
    commands = SlashCommands(chat)
    if call.out.interactive:
        complete_commands(commands)
    return converse(commands)
