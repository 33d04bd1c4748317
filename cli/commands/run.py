"""`mycli run`: one prompt in, one reply out; plain text on stdout, so that it can stand in a pipe."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mycli.cli.batch_file import check_batch, run_batch
from mycli.cli.command import Call, command
from mycli.cli.flags import options
from mycli.cli.flags.records import FULL_LENGTH, KeepFlags, LoadFlags, SamplingFlags
from mycli.cli.generation import TOGETHER, Generator
from mycli.cli.load import load_engine
from mycli.cli.text.format import speculation
from mycli.cli.text.input import read_file, read_prompt
from mycli.cli.text.progress import Neighbours
from mycli.runtime.errors import ExitCode, GateError, UsageError
from mycli.runtime.utils.units import pluralize

if TYPE_CHECKING:
    from mycli.runtime.engine.loader import LoadedModel
    from mycli.runtime.sampling.grammar import Grammar

EXAMPLES = (
    'mycli run pico "What is the capital of Japan?"',
    'mycli run pico "Tell me a story." --temperature 0.8 --seed 1 -n 64',
    'mycli run pico --raw "Once upon a time" -n 20',
    'echo "What is 7 times 8?" | mycli run pico -',
    'mycli run pico "Hello!" --json',
    'mycli run pico "How old is Leo?" --regex "Leo is [0-9]{1,2} years old"',
    'mycli run pico "Tell me a story." -t 0.8 --samples 3 -n 32',
    'echo \'{"id": 1, "prompt": "What is 7 times 8?"}\' | mycli run pico --batch - --out answers.jsonl',
)
MAX_SAMPLES = 256


@dataclass(frozen=True)
class PromptFlags:
    """What is asked, and where it comes from."""

    prompt: Annotated[
        str | None, typer.Argument(metavar="PROMPT", help="What to ask; - reads standard input.", show_default=False)
    ] = None
    file: Annotated[
        Path | None,
        typer.Option("-f", "--file", metavar="FILE", help="Read the prompt, or its beginning, from a file."),
    ] = None
    encoding_errors: Annotated[
        str,
        typer.Option("--encoding-errors", metavar="strict|replace", help="What to do with input that is not UTF-8."),
    ] = "strict"
    batch: Annotated[
        str | None,
        typer.Option("--batch", help="Answer each line of a JSON-lines file; - reads standard input.", metavar="FILE"),
    ] = None
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", help="With --batch: write here; what is already answered there is skipped.", metavar="FILE"
        ),
    ] = None

    def resolve(self, note: Callable[[str], None]) -> str:
        """The prompt; nothing for a batch. Raises UsageError for options that exclude each other."""
        if self.out is not None and self.batch is None:
            raise UsageError("--out is for --batch", "redirect the output instead: > FILE")
        if self.batch is None:
            errors = options.choice("--encoding-errors", self.encoding_errors, ("strict", "replace"))
            return read_prompt(self.prompt, self.file, errors, note)
        if self.prompt is not None or self.file is not None:
            raise UsageError("--batch reads its prompts from the file", "omit the prompt")
        check_batch(self.batch)
        return ""


@dataclass(frozen=True)
class GrammarFlags:
    """What a reply must be."""

    schema: Annotated[
        Path | None, typer.Option("--schema", help="Write JSON of this JSON schema only.", metavar="FILE")
    ] = None
    regex: Annotated[
        str | None, typer.Option("--regex", help="Write only what matches this expression as a whole.", metavar="RE")
    ] = None
    json_mode: Annotated[bool, typer.Option("--json-mode", help="Write a JSON object only.")] = False

    def text(self) -> str | None:
        """The schema. Raises UsageError for one that cannot be read, for options that exclude each other, and where
        what compiles them is not installed: before a model is loaded."""
        asked = sum((self.schema is not None, self.regex is not None, self.json_mode))
        if asked > 1:
            raise UsageError("--schema, --regex and --json-mode exclude each other", "choose one")
        text = None if self.schema is None else read_file(self.schema)
        if asked:
            from mycli.runtime.sampling.grammar import library

            library()
        return text

    def resolve(self, schema: str | None, model: "LoadedModel") -> "Grammar | None":
        """Compiled for `model`; None for anything. `schema` is what `text` gave."""
        if schema is None and self.regex is None and not self.json_mode:
            return None
        from mycli.runtime.sampling.grammar import JSON_MODE, Grammar

        if self.regex is not None:
            return Grammar.from_regex(self.regex, model.tokenizer, model.stop_ids)
        source = "--json-mode" if schema is None else str(self.schema)
        return Grammar.from_schema(JSON_MODE if schema is None else schema, source, model.tokenizer, model.stop_ids)


@command
def run(
    call: Call,
    model: options.Model,
    asked: PromptFlags,
    limit: Annotated[
        int | None, options.count_option("-n", "--max-tokens", help="Most tokens to write.", show_default="512")
    ] = None,
    system: options.System = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the prompt as it is, without a chat template.")] = False,
    allow_special: Annotated[
        bool, typer.Option("--allow-special", help="Read control tokens spelled in the prompt as such.")
    ] = False,
    escapes: options.Escapes = False,
    logprobs: Annotated[
        int | None,
        typer.Option("--logprobs", help="With --json: each token's logprob and the N likeliest.", metavar="N"),
    ] = None,
    samples: Annotated[int, typer.Option("--samples", help="Replies to draw after one prefill.", metavar="N")] = 1,
    *,
    drawn: SamplingFlags,
    form: GrammarFlags,
    kept: KeepFlags,
    loading: LoadFlags,
) -> ExitCode | None:
    """Answer one prompt and exit; made for pipes.

    A model with a chat template is asked; one without, or with --raw, continues the text. What is piped in comes after
    the prompt. --batch reads lines such as
    {"id": 1, "prompt": "..."} or {"id": 1, "messages": [{"role": "user", "content": "..."}]} and writes one JSON line
    for each, in order; a bad line is answered by an object with its error, and a line of --out that is an error is
    tried again by the next run.
    """
    began = time.perf_counter()
    if logprobs is not None and not (call.out.json_mode or asked.batch):
        raise UsageError("--logprobs shows nothing without --json", "add --json")
    if not 1 <= samples <= MAX_SAMPLES:
        raise UsageError(f"--samples {samples} is out of range", f"choose between 1 and {MAX_SAMPLES}")
    drawn.check()
    schema, text = form.text(), asked.resolve(call.out.note)
    together = samples if asked.batch is None else samples * TOGETHER
    shared = None if together == 1 else together
    loaded = load_engine(call, model, kept.added(loading.resolve(min(together, FULL_LENGTH), shared)))
    generator = Generator(
        loaded,
        drawn.resolve(loaded.model.defaults),
        limit=limit,
        stops=tuple(drawn.stop or ()),
        system=system,
        raw=raw,
        allow_special=allow_special,
        grammar=form.resolve(schema, loaded.model),
        count=samples,
        top=logprobs,
    )
    if asked.batch is not None:
        return run_batch(call, asked.batch, asked.out, generator.describe_all)
    ids = generator.encode(text)
    seconds = time.perf_counter() - began
    if call.out.json_mode:
        answer = generator.describe(ids)
        call.out.json({"model": loaded.source.name, **answer, "load_seconds": round(seconds, 4)})
        _check_whole(generator, [one["finish_reason"] for one in answer.get("samples", [answer])])
    elif samples > 1:
        _show_samples(call, generator, ids)
    else:
        _stream(call, generator, ids, escapes, seconds)
    return ExitCode.OK


def _check_whole(generator: Generator, reasons: Sequence[str | None]) -> None:
    """Raises GateError where a reply was to have a form, and ended before it had it."""
    cut = [reason for reason in reasons if reason != "stop"]
    if cut and generator.grammar is not None:
        which = "the reply" if len(reasons) == 1 else f"{len(cut)} of {len(reasons)} replies"
        raise GateError(
            f"{which} reached the limit ({cut[0]}): it holds only the beginning of what was asked for",
            "allow more tokens with -n, or ask for a shorter form",
        )


def _show_samples(call: Call, generator: Generator, ids: list[int]) -> None:
    drawn = generator.samples(ids)
    for number, sample in enumerate(drawn, start=1):
        call.out.note(f"sample {number} of {len(drawn)} ({sample.finish_reason})")
        call.out.result(sample.text)
    _check_whole(generator, [sample.finish_reason for sample in drawn])


def _stream(call: Call, generator: Generator, ids: list[int], escapes: bool, loading: float) -> None:
    reply, neighbours = generator.reply(ids), Neighbours()
    with call.out.reply():
        for piece in call.out.while_reading(iter(reply), len(ids), lambda: generator.loaded.engine.tokens_read):
            call.out.stream(piece, raw=escapes)
    if reply.finish_reason == "length" and generator.limit is None:
        call.out.note(f"(cut off after {pluralize(len(reply.tokens), 'token')}: -n sets another limit)")
    elif reply.finish_reason == "context":
        call.out.note(f"(cut off: the context of {generator.loaded.engine.context} tokens is full)")
    if disturbed := neighbours.note():
        call.out.note(f"({disturbed}; --threads N takes fewer)")
    timing = reply.timing
    first = f"TTFT {timing.first_token_seconds * 1e3:.0f} ms"
    speed = f"{len(reply.tokens)} tok · {timing.tokens_per_second:.1f} tok/s"
    parts = (speed, first, f"prompt {timing.prompt}", *speculation(timing), f"loaded in {loading:.1f} s")
    call.out.detail(" · ".join(parts))
    _check_whole(generator, [reply.finish_reason])
