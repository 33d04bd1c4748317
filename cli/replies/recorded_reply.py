"""Records the reply of `mycli run` while it is generated, and continues an interrupted one."""

import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

from mycli.cli.flags import options
from mycli.cli.flags.records import LoadFlags, ReasoningFlags
from mycli.cli.replies.generation import Generator
from mycli.runtime.errors import ModelError, NotFoundError, UsageError
from mycli.runtime.hub.store import state_dir
from mycli.runtime.sampling.params import SamplingParams
from mycli.runtime.tokenizer.chat_template import TemplateOptions

if TYPE_CHECKING:  # only replies need them, not the help
    from mycli.runtime.engine.replies.journal import RecordedReply, ReplyJournal
    from mycli.runtime.engine.replies.opened_model import OpenedModel
    from mycli.runtime.sampling.grammars.grammar import Grammar

LAST = "last"  # as an ID: the reply that was interrupted last
_KIND = "run"


@dataclass(frozen=True)
class ResumeFlags:
    """Recording and continuing a reply, as typed."""

    resume: Annotated[
        str | None,
        options.option(
            "--resume",
            "ID|last",
            "Print an interrupted reply and continue it, with the model and the options it began with.",
        ),
    ] = None
    after: Annotated[
        int, options.option("--after", "BYTES", "With --resume: omit the first BYTES, which you have.", min=0)
    ] = 0
    no_record: Annotated[
        bool, options.flag("--no-record", "Do not record the reply on disk while it is generated.")
    ] = False

    def check(self, model: str, *, prompted: bool) -> None:
        """Raise UsageError for options that exclude each other; `prompted`: a prompt or a batch was given."""
        if self.resume is None and self.after:
            raise UsageError("--after needs --resume", "add --resume ID")
        if self.resume is not None and (model or prompted):
            raise UsageError(
                "--resume takes no MODEL, PROMPT, --file and --batch", "omit them: the reply has its model and prompt"
            )
        if self.resume is None and not model:
            example = 'mycli run pico "What is the capital of Japan?"'
            raise UsageError("missing argument 'MODEL'", f"for example: {example}; mycli run --help")


def _journal() -> "ReplyJournal":
    from mycli.runtime.engine.replies.journal import ReplyJournal

    return ReplyJournal(state_dir() / "replies")


def record_reply(
    generator: Generator,
    model: str,
    loading: LoadFlags,
    template: TemplateOptions,
    grammar: Mapping[str, Any],
    prompt: Sequence[int],
) -> "tuple[RecordedReply, int] | None":
    """Begin to record the reply to `prompt`; return it with its seed, None where the folder cannot be written.

    `grammar`: the options of the output format, with the text of the schema.
    """
    from mycli.runtime.engine.replies.journal import RecordedReply, new_seed

    seed = new_seed(generator.sampling)
    header = {
        "model": model,
        "fingerprint": generator.loaded.model.fingerprint,
        "loading": asdict(loading),
        "template": asdict(template),
        "prompt": list(prompt),
        "sampling": asdict(generator.sampling),
        "limit": generator.room(prompt),
        "stops": generator.stops,
        "grammar": grammar,
        "reasoning_budget": None if generator.raw else generator.reasoning.budget,
        "top": generator.top,
        "seed": seed,
    }
    writer = _journal().begin(f"{_KIND}-{secrets.token_hex(6)}", header)
    return None if writer is None else (RecordedReply(writer), seed)


@dataclass(frozen=True)
class InterruptedReply:
    """A recorded reply that can be continued. header: the model, prompt and settings that it began with."""

    name: str
    header: Mapping[str, Any]

    @classmethod
    def find(cls, name: str) -> "InterruptedReply":
        """Return the reply `name`. Raises NotFoundError, UsageError for a reply of a server."""
        journal = _journal()
        if name == LAST:
            name = next((name for name in journal.names() if name.startswith(_KIND)), "")
            if not name:
                raise NotFoundError("there is no interrupted reply", "finished replies are not kept")
        elif not name.startswith(_KIND):
            raise UsageError(
                f"--resume {name}: not a reply of mycli run",
                "a server continues its replies: POST /v1/replies/ID/resume",
            )
        return cls(name, journal.header(name))

    @property
    def model(self) -> str:
        return str(self.header["model"])

    @property
    def loading(self) -> LoadFlags:
        return LoadFlags(**self.header["loading"])

    @property
    def template(self) -> TemplateOptions:
        return TemplateOptions(**self.header["template"])

    @property
    def prompt(self) -> Sequence[int]:
        return list(self.header["prompt"])

    def generator(self, loaded: "OpenedModel", grammar: "Grammar | None") -> Generator:
        """Return a generator with the settings of this reply. Raises ModelError if the model has changed."""
        header = self.header
        if header["fingerprint"] != loaded.model.fingerprint:
            raise ModelError(
                f"{self.model}: its files, the device or the version have changed since the reply began",
                "ask again",
            )
        biases = tuple((token, bias) for token, bias in header["sampling"]["logit_bias"])
        return Generator(
            loaded,
            SamplingParams(**{**header["sampling"], "logit_bias": biases}),
            limit=header["limit"],
            stops=tuple(header["stops"]),
            grammar=grammar,
            top=header["top"],
            reasoning=ReasoningFlags(header["reasoning_budget"]),
        )

    def reopen(self) -> "tuple[RecordedReply, int]":
        """Open the record to append to it; return it with its seed. Raises UsageError if it is being written."""
        from mycli.runtime.engine.replies.journal import RunningReplyError

        try:
            return _journal().resume(self.name, 1)[0], self.header["seed"]
        except RunningReplyError:
            raise UsageError(f"--resume {self.name}: this reply is still being generated", "wait for its end") from None


def without_first(pieces: Iterable[str], count: int) -> Iterator[str]:
    """Yield `pieces` without their first `count` bytes of UTF-8. Raises UsageError inside a character."""
    for piece in pieces:
        data = piece.encode()
        if count < len(data):
            try:
                yield data[count:].decode()
            except UnicodeDecodeError:
                raise UsageError("--after ends inside a character", "give the bytes of whole characters") from None
        count = max(count - len(data), 0)
