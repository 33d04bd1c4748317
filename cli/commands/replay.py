"""`mycli replay`: generate the reply of a receipt again and compare it token by token."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from mycli.cli.command import Call, command
from mycli.cli.flags import options
from mycli.cli.flags.records import ReasoningFlags
from mycli.cli.flags.reply import GrammarFlags
from mycli.cli.load import about, load_engine
from mycli.cli.replies.receipts import format_of, loading_of
from mycli.runtime.errors import GateError, UsageError
from mycli.runtime.hub.resolve import resolve
from mycli.runtime.utils.units import pluralize

if TYPE_CHECKING:  # torch takes a second to import
    from mycli.runtime.diagnostics.receipt import Receipt, TokenDifference
    from mycli.runtime.engine.replies.completion import Completion
    from mycli.runtime.engine.replies.opened_model import OpenedModel

EXAMPLES = (
    'mycli run pico "Tell me a story." -t 0.8 --receipt r.json && mycli replay r.json',
    "mycli replay r.json --json",
)


@command
def replay(
    call: Call,
    receipt: Annotated[Path, options.argument("RECEIPT", "A file that mycli run --receipt wrote.")],
    model: Annotated[
        str | None,
        options.option("--model", "NAME", "The same model under another name.", show_default="the receipt's"),
    ] = None,
    threads: options.Threads = None,
) -> None:
    """Make the reply of a receipt again and compare it token by token.

    Compares the sha256 of every file of the model and of the chat template, then generates with the same prompt tokens,
    sampler and settings. Exits with 6 if a file differs, or at the first token that differs.
    """
    from mycli.runtime.diagnostics.receipt import Receipt, describe_program, different_files, file_hashes, template_hash

    recorded = Receipt.read(receipt)
    name = model or recorded.model
    with about(call, name):
        folder = resolve(name, offline=call.offline).open()
        # Before loading: with other weights the first difference of tokens would say nothing about its cause.
        changed = different_files(recorded.files, file_hashes(folder.source_files()))
        if changed:
            raise GateError(
                f"{name}: {changed[0]} is not the file of the receipt ({pluralize(len(changed), 'file')} differ)",
                "mycli verify checks the model's files; --model names the same model elsewhere",
            )
        with load_engine(call, name, loading_of(recorded).resolve()) as opened:
            if template_hash(opened) != recorded.template:
                raise GateError(f"{name}: the chat template is not that of the receipt", "use the same model files")
            difference = _replay(opened, recorded)
            _report(call, opened, recorded, describe_program(opened), difference)


def _replay(opened: "OpenedModel", recorded: "Receipt") -> "TokenDifference | None":
    from mycli.runtime.diagnostics.receipt import replay as compare_tokens

    reply = _reply(opened, recorded)
    difference = compare_tokens(reply, recorded)
    if difference is None and reply.finish_reason != recorded.finish_reason:
        raise GateError(f"the reply ended by {reply.finish_reason}, not by {recorded.finish_reason}", "")
    return difference


def _reply(opened: "OpenedModel", recorded: "Receipt") -> "Completion":
    from mycli.cli.replies.generation import Generator

    size = opened.model.runner.config.vocab_size
    if not all(0 <= token < size for token in (*recorded.prompt, *recorded.tokens)):
        raise UsageError(f"the receipt has tokens outside the vocabulary of {size}", "")
    reply_format = format_of(recorded)
    flags = GrammarFlags(reply_format.schema, reply_format.regex, reply_format.json_mode, reply_format.extra_properties)
    generator = Generator(
        opened,
        recorded.sampling,
        limit=options.NO_LIMIT if recorded.limit is None else recorded.limit,
        stops=recorded.stops,
        raw=reply_format.raw,
        grammar=flags.resolve(reply_format.schema, opened.model),
        reasoning=ReasoningFlags(reply_format.reasoning_budget),
    )
    return generator.reply(recorded.prompt)


def _report(
    call: Call,
    opened: "OpenedModel",
    recorded: "Receipt",
    program: dict[str, str],
    difference: "TokenDifference | None",
) -> None:
    others = {key for key in {*recorded.program, *program} if recorded.program.get(key) != program.get(key)}
    changes = [f"{key} {recorded.program.get(key, 'none')} → {program.get(key, 'none')}" for key in sorted(others)]
    answer: dict[str, Any] = {
        "model": opened.source.name,
        "same": difference is None,
        "tokens": len(recorded.tokens),
        "first_difference": None if difference is None else asdict(difference),
        "program_changes": changes,
    }
    same = len(recorded.tokens) if difference is None else difference.index
    rows = [
        ("model", f"{opened.source.name}: {pluralize(len(recorded.files), 'file')} and the template are the same"),
        ("program", ", ".join(changes) or "the same"),
        ("tokens", f"{same} of {len(recorded.tokens)} are the same"),
    ]
    if not call.out.answered(answer):
        call.out.card("replay", rows)
    if difference is not None:
        pair = [_spell(opened, token) for token in (difference.expected, difference.actual)]
        where = f"token {difference.index + 1} of {len(recorded.tokens)}"
        cause = "; ".join(changes) or "with the same program on the same kind of machine, which is a bug"
        raise GateError(f"{where} differs: {pair[0]} in the receipt, {pair[1]} now", cause)


def _spell(opened: "OpenedModel", token: int | None) -> str:
    return "the end" if token is None else repr(opened.tokenizer.token_bytes(token).decode("utf-8", "replace"))
