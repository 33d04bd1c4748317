"""`mycli chat`: a conversation in the terminal, streamed; nothing is done to its context silently."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mycli.cli import options
from mycli.cli.command import Call, command
from mycli.cli.loading import Loaded, choose_sampling, load
from mycli.cli.output import gib
from mycli.runtime.errors import UsageError, UserError
from mycli.runtime.template import Message

if TYPE_CHECKING:
    from mycli.runtime.assistant import Reply
    from mycli.runtime.sampling import Sampling

EXAMPLES = (
    "mycli chat pico",
    'mycli chat pico --system "Answer briefly." --temperature 0',
)
HISTORY_LINES = 1000
FENCE = '"""'


def compact(count: int) -> str:
    """212 as 212, 1234 as 1.2k."""
    return str(count) if count < 1000 else f"{count / 1000:.1f}k"


@dataclass
class Chat:
    """One conversation: the turns so far, the settings, and what `/` commands do to them."""

    call: Call
    loaded: Loaded
    sampling: "Sampling"
    system: str | None = None
    stops: tuple[str, ...] = ()
    escapes: bool = False
    turns: list[Message] = field(default_factory=list)
    last: "Reply | None" = None
    finished: bool = False

    def answer(self, text: str) -> None:
        """Stream the reply to `text`. Ctrl-C ends it and keeps what was said; a refused turn is taken back."""
        from mycli.runtime.assistant import Reply

        self.turns.append(Message("user", text))
        try:
            system = [] if self.system is None else [Message("system", self.system)]
            prompt = self.loaded.assistant.tokenizer.chat([*system, *self.turns])
            reply = Reply(self.loaded.assistant, self.loaded.session, prompt, self.sampling, stops=self.stops)
            pieces = self._stream(reply)
        except UserError:
            self.turns.pop()
            raise
        self.turns.append(Message("assistant", "".join(pieces)))
        self.last = reply
        self.call.out.footer(self.statistics(reply))

    def _stream(self, reply: "Reply") -> list[str]:
        pieces: list[str] = []
        stream = iter(reply)
        try:
            for piece in stream:
                pieces.append(piece)
                self.call.out.stream(piece, raw=self.escapes)
        except KeyboardInterrupt:
            stream.close()  # type: ignore[attr-defined]  # a generator: frees the session for the next turn
            self.call.out.result("")
            self.call.out.note("(stopped)")
            return pieces
        self.call.out.result("")
        if reply.finish_reason == "context":
            self.call.out.warn("the context is full, the reply was cut off; /clear starts anew")
        return pieces

    def statistics(self, reply: "Reply") -> str:
        """The line after a reply."""
        timing, session = reply.timing, self.loaded.session
        model = self.loaded.assistant.model
        return " · ".join(
            (
                f"{len(reply.tokens)} tok",
                f"{timing.tokens_per_second:.0f} tok/s",
                f"TTFT {timing.first_token_seconds * 1e3:.0f} ms",
                f"prompt {timing.prompt} ({timing.cached} cached)",
                f"ctx {compact(session.cache.length)}/{compact(session.capacity)}",
                gib(model.nbytes + session.cache.nbytes),
            )
        )

    # Slash commands: the docstring is the help line.

    def help(self, argument: str) -> None:
        """list the commands"""
        rows = [(name, method.__doc__ or "") for name, method in self.commands().items()]
        self.call.out.card("Commands", [*rows, (FENCE, "begins and ends a message of several lines")])

    def clear(self, argument: str) -> None:
        """forget the conversation"""
        self.turns.clear()
        self.loaded.session.forget()
        self.call.out.note("(a new conversation)")

    def set(self, argument: str) -> None:
        """/set NAME VALUE: temperature, top_k, top_p, min_p, repetition_penalty, seed or system"""
        name, _, value = argument.partition(" ")
        if name == "system":
            self.system = value or None
            return
        kinds: dict[str, Callable[[str], float | int | None]] = {
            "top_k": int,
            "seed": lambda text: None if text == "random" else int(text),
            **{key: float for key in ("temperature", "top_p", "min_p", "repetition_penalty")},
        }
        if name not in kinds:
            raise UsageError(f"/set {name}: no such setting", f"one of {', '.join([*kinds, 'system'])}")
        try:
            number = kinds[name](value)
        except ValueError:
            raise UsageError(f"/set {name}: {value!r} is not a number", f"/set {name} 1") from None
        if number is not None and not math.isfinite(number):
            raise UsageError(f"/set {name}: {value} is not a finite number", f"/set {name} 1")
        self.sampling = replace(self.sampling, **{name: number})  # type: ignore[arg-type]  # the name was checked

    def show(self, argument: str) -> None:
        """show the model and the settings"""
        config = self.loaded.assistant.model.config
        rows = [
            ("model", self.loaded.source.name),
            ("family", f"{config.model_type}, {config.parameters():,} parameters"),
            ("runs on", f"{self.loaded.placement.device}, {str(self.loaded.placement.dtype).removeprefix('torch.')}"),
            ("system", self.system or "none"),
            *((f.name, str(getattr(self.sampling, f.name))) for f in fields(self.sampling)),
            ("turns", str(len(self.turns))),
        ]
        self.call.out.card("Settings", rows)

    def stats(self, argument: str) -> None:
        """statistics of the last reply"""
        self.call.out.result("no reply yet" if self.last is None else self.statistics(self.last))

    def bye(self, argument: str) -> None:
        """leave; Ctrl-D does too"""
        self.finished = True

    def commands(self) -> dict[str, Callable[[str], None]]:
        """By the name that is typed."""
        return {
            "/?": self.help,
            "/clear": self.clear,
            "/set": self.set,
            "/show": self.show,
            "/stats": self.stats,
            "/bye": self.bye,
        }

    def handle(self, line: str) -> None:
        """One message or command. Raises UserError; the conversation goes on after it."""
        if not line.startswith("/"):
            self.answer(line)
            return
        name, _, argument = line.partition(" ")
        method = self.commands().get("/?" if name == "/help" else name)
        if method is None:
            raise UsageError(f"{name}: no such command", "/? lists them; begin with a space to say it to the model")
        method(argument.strip())


def read_message(call: Call) -> str:
    """What a person wants to say: a line, or all between two lines of three quotes. Raises EOFError at the end."""
    line = call.out.read_line(">>> ")
    if not line.lstrip().startswith(FENCE):
        return line
    lines = [line.lstrip().removeprefix(FENCE)]
    while not lines[-1].rstrip().endswith(FENCE):
        lines.append(call.out.read_line("... "))
    lines[-1] = lines[-1].rstrip().removesuffix(FENCE)
    return "\n".join(lines).strip("\n")


def _remember(history: Path) -> None:
    """Line editing and a history of what was typed, readable by its owner alone."""
    import atexit
    import readline

    history.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    history.touch(mode=0o600)
    history.chmod(0o600)
    readline.read_history_file(history)
    readline.set_history_length(HISTORY_LINES)
    readline.set_auto_history(True)
    atexit.register(readline.write_history_file, history)


def converse(chat: Chat) -> None:
    """Read and answer until the person leaves. Ctrl-C at an empty prompt warns once, then raises KeyboardInterrupt."""
    warned = False
    while not chat.finished:
        try:
            message = read_message(chat.call)
        except EOFError:
            if chat.call.out.interactive:
                chat.call.out.result("")
            return
        except KeyboardInterrupt:
            if warned:
                raise
            warned = True
            chat.call.out.note("\n(Ctrl-C again or Ctrl-D leaves)")
            continue
        warned = False
        if not message.strip():
            continue
        try:
            chat.handle(message)
        except UserError as error:
            chat.call.out.error(error)


@command
def chat(
    call: Call,
    model: options.Model,
    system: Annotated[str | None, typer.Option("--system", help="System prompt.")] = None,
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
    context: options.Context = None,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
) -> None:
    """Talk with a model in the terminal.

    Ctrl-C stops a reply, Ctrl-D leaves, /? lists the commands. From a pipe, every line is a message.
    """
    loaded = load(call, model, device=device, dtype=dtype, context=context)
    if loaded.assistant.tokenizer.template is None:
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
        from mycli.runtime.hub import state

        _remember(state() / "chat_history")
        call.out.note(f"{loaded.source.name} · {loaded.placement.device} · /? for help")
    converse(Chat(call, loaded, sampling, system, tuple(stop or ()), escapes))
