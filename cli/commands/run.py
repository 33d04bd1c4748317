"""`mycli run`: one prompt in, one reply out; plain text on stdout, so that it can stand in a pipe."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mycli.cli import options
from mycli.cli.batch_file import run_batch
from mycli.cli.chat.session import speculation
from mycli.cli.command import Call, command
from mycli.cli.generation import Answering, Manner
from mycli.cli.input import read_file, read_prompt
from mycli.cli.load import Loaded, choose_sampling, load
from mycli.runtime.errors import UsageError

if TYPE_CHECKING:
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


@command
def run(
    call: Call,
    model: options.Model,
    prompt: Annotated[
        str | None, typer.Argument(help="The prompt; - reads standard input.", show_default=False)
    ] = None,
    file: Annotated[
        Path | None, typer.Option("-f", "--file", help="Read the prompt, or its beginning, from a file.")
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(
            "-n",
            "--max-tokens",
            parser=options.parse_count,
            metavar="N",
            help="Most tokens to write.",
            show_default="512",
        ),
    ] = None,
    system: Annotated[str | None, typer.Option("--system", help="System prompt.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the prompt as it is, without a chat template.")] = False,
    allow_special: Annotated[
        bool, typer.Option("--allow-special", help="Read control tokens spelled in the prompt as such.")
    ] = False,
    escapes: Annotated[
        bool, typer.Option("--escapes", help="Show control characters to a terminal as they are.")
    ] = False,
    encoding_errors: Annotated[
        str,
        typer.Option("--encoding-errors", metavar="strict|replace", help="What to do with input that is not UTF-8."),
    ] = "strict",
    temperature: options.Temperature = None,
    top_k: options.TopK = None,
    top_p: options.TopP = None,
    min_p: options.MinP = None,
    repetition_penalty: options.RepetitionPenalty = None,
    seed: options.Seed = None,
    logit_bias: Annotated[
        list[str] | None,
        typer.Option("--logit-bias", metavar="ID=BIAS", help="Added to a token's logit; may be repeated; -100 bans."),
    ] = None,
    stop: options.Stop = None,
    schema: Annotated[
        Path | None, typer.Option("--schema", help="Write JSON of this JSON schema only.", metavar="FILE")
    ] = None,
    regex: Annotated[
        str | None, typer.Option("--regex", help="Write only what matches this expression as a whole.", metavar="RE")
    ] = None,
    json_mode: Annotated[bool, typer.Option("--json-mode", help="Write a JSON object only.")] = False,
    logprobs: Annotated[
        int | None,
        typer.Option("--logprobs", help="With --json: each token's logprob and the N likeliest.", metavar="N"),
    ] = None,
    samples: Annotated[int, typer.Option("--samples", help="Replies to draw after one prefill.", metavar="N")] = 1,
    batch: Annotated[
        str | None,
        typer.Option("--batch", help="Answer each line of a JSON-lines file; - reads standard input.", metavar="FILE"),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="With --batch: write here; what it answers already is skipped.", metavar="FILE"),
    ] = None,
    draft: options.Draft = "none",
    context: options.Context = None,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    kv: options.Kv = "auto",
    shadow: options.Shadow = False,
    allow_nonfinite: options.AllowNonfinite = False,
) -> None:
    """Answer one prompt and exit; made for pipes.

    A model with a chat template is asked; one without, or with --raw, continues the text. --batch reads lines such as
    {"id": 1, "prompt": "..."} or {"id": 1, "messages": [{"role": "user", "content": "..."}]} and writes one JSON line
    for each, in order; a bad line is answered by an object with its error, and a line of --out that is an error is
    tried again by the next run.
    """
    began = time.perf_counter()
    if logprobs is not None and not (call.out.json_mode or batch):
        raise UsageError("--logprobs shows nothing without --json", "add --json")
    if not 1 <= samples <= MAX_SAMPLES:
        raise UsageError(f"--samples {samples} is out of range", f"choose between 1 and {MAX_SAMPLES}")
    if out is not None and batch is None:
        raise UsageError("--out is for --batch", "redirect the output instead: > FILE")
    if batch is not None and (prompt is not None or file is not None):
        raise UsageError("--batch brings its own prompts", "leave the prompt away")
    if sum((schema is not None, regex is not None, json_mode)) > 1:
        raise UsageError("--schema, --regex and --json-mode exclude each other", "choose one")
    text = "" if batch else read_prompt(prompt, file, "replace" if encoding_errors == "replace" else "strict")
    schema_text = None if schema is None else read_file(schema)
    loaded = load(
        call,
        model,
        device=device,
        dtype=dtype,
        kv=kv,
        shadow=shadow,
        context=context,
        sequences=samples,
        draft=draft,
        allow_nonfinite=allow_nonfinite,
    )
    sampling = choose_sampling(
        loaded.assistant.defaults,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
        logit_bias=options.parse_biases(logit_bias) if logit_bias else None,
    )
    manner = Manner(
        sampling,
        limit,
        tuple(stop or ()),
        system,
        raw,
        allow_special,
        _grammar(loaded, schema_text, str(schema), regex, json_mode),
        samples,
        logprobs,
    )
    answering = Answering(loaded, manner)
    if batch is not None:
        run_batch(call, batch, out, lambda one: answering.describe(answering.encode(one)))
        return
    ids = answering.encode(text)
    loading = time.perf_counter() - began
    if call.out.json_mode:
        answer = answering.describe(ids)
        call.out.json({"model": loaded.source.name, **answer, "load_seconds": round(loading, 4)})
    elif samples > 1:
        _show_samples(call, answering, ids)
    else:
        _stream(call, answering, ids, escapes, loading)


def _grammar(loaded: Loaded, schema: str | None, source: str, regex: str | None, json_mode: bool) -> "Grammar | None":
    """What the reply must be, compiled; None for anything."""
    if schema is None and regex is None and not json_mode:
        return None
    from mycli.runtime.sampling.grammar import JSON_MODE, Grammar

    tokenizer, stops = loaded.assistant.tokenizer, loaded.assistant.stop_ids
    if regex is not None:
        return Grammar.from_regex(regex, tokenizer, stops)
    if schema is not None:
        return Grammar.from_schema(schema, source, tokenizer, stops)
    return Grammar.from_schema(JSON_MODE, "--json-mode", tokenizer, stops)


def _show_samples(call: Call, answering: Answering, ids: list[int]) -> None:
    drawn = answering.samples(ids)
    for number, sample in enumerate(drawn, start=1):
        call.out.note(f"sample {number} of {len(drawn)} ({sample.finish_reason})")
        call.out.result(sample.text)


def _stream(call: Call, answering: Answering, ids: list[int], escapes: bool, loading: float) -> None:
    reply = answering.reply(ids)
    for piece in reply:
        call.out.stream(piece, raw=escapes)
    call.out.result("")
    if reply.finish_reason != "stop":
        cut = f"the reply was cut off: {reply.finish_reason} (-n and --ctx set the limits)"
        if answering.constrained:
            call.out.warn(f"{cut}; it is only the beginning of what was asked for")
        else:
            call.out.detail(cut)
    timing = reply.timing
    first = f"TTFT {timing.first_token_seconds * 1e3:.0f} ms"
    speed = f"{len(reply.tokens)} tok · {timing.tokens_per_second:.1f} tok/s"
    parts = (speed, first, f"prompt {timing.prompt}", *speculation(timing), f"loaded in {loading:.1f} s")
    call.out.detail(" · ".join(parts))
