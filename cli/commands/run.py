"""`mycli run`: answer one prompt, or the lines of a file, on standard output."""

import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from mycli.cli.command import Call, Terminated, command, subject_of
from mycli.cli.flags import options
from mycli.cli.flags.records import (
    FULL_LENGTH,
    LoadFlags,
    PrefixCacheFlags,
    ReasoningFlags,
    SamplingFlags,
    TemplateFlags,
)
from mycli.cli.flags.reply import BeamFlags, GrammarFlags, PromptFlags
from mycli.cli.load import load_engine
from mycli.cli.replies.generation import TOGETHER, Generator
from mycli.cli.replies.recorded_reply import InterruptedReply, ResumeFlags, record_reply, without_first
from mycli.cli.text.format import draft_statistics, speed_statistics
from mycli.cli.text.progress import CpuContention
from mycli.runtime.errors import ExitCode, GateError, UsageError
from mycli.runtime.sampling.params import SamplingParams
from mycli.runtime.utils.units import pluralize

if TYPE_CHECKING:
    from mycli.runtime.engine.replies.completion import Completion
    from mycli.runtime.engine.replies.journal import RecordedReply

EXAMPLES = (
    'mycli run pico "What is the capital of Japan?"',
    'mycli run pico "Tell me a story." --temperature 0.8 --seed 1 -n 64',
    'mycli run pico --raw "Once upon a time" -n 20',
    'echo "What is 7 times 8?" | mycli run pico -',
    'mycli run pico "Hello!" --json',
    'mycli run pico "How old is Leo?" --regex "Leo is [0-9]{1,2} years old"',
    'mycli run pico "Tell me a story." -t 0.8 --samples 3 -n 32',
    'mycli run pico "Tell me a story." -t 0.8 -n 24 --receipt r.json',
    'mycli run pico "Tell me a story." --beams 4 -n 32',
    'echo \'{"id": 1, "prompt": "What is 7 times 8?"}\' | mycli run pico --batch - --out answers.jsonl',
)
MAX_SAMPLES = 256


@command
def run(
    call: Call,
    model: options.OptionalModel = "",
    source: PromptFlags = PromptFlags(),  # noqa: B008  # frozen; every field has its own default
    recording: ResumeFlags = ResumeFlags(),  # noqa: B008  # likewise
    limit: Annotated[
        int | None,
        options.limit(
            "-n --max-tokens", "Maximum number of new tokens; -1: what the context has room for.", show_default="512"
        ),
    ] = None,
    system: options.System = None,
    raw: Annotated[bool, options.flag("--raw", "Continue the prompt, without the chat template.")] = False,
    allow_special: Annotated[bool, options.flag("--allow-special", "Accept control tokens in the prompt.")] = False,
    escapes: options.Escapes = False,
    logprobs: Annotated[
        int | None,
        options.option("--logprobs", "N", "With --json: the logprob of each token and of the N most likely."),
    ] = None,
    samples: Annotated[int, options.option("--samples", "N", "Number of replies; the prompt is computed once.")] = 1,
    receipt: Annotated[
        Path | None,
        options.option("--receipt", "FILE", "Write what decided the tokens, for mycli replay; contains the prompt."),
    ] = None,
    *,
    sampling: SamplingFlags,
    beam_flags: BeamFlags,
    grammar: GrammarFlags,
    reasoning: ReasoningFlags,
    templates: TemplateFlags,
    prefix_cache: PrefixCacheFlags,
    loading: LoadFlags,
) -> ExitCode | None:
    """Answer one prompt and exit.

    A model without a chat template, or with --raw, continues the prompt as text. Piped input is added after the prompt.

    --batch reads lines such as
    {"id": 1, "prompt": "..."} or {"id": 1, "messages": [{"role": "user", "content": "..."}]}
    and writes one JSON line for each, in order. A bad line is answered by an object with `error`; the next run with the
    same --out tries such lines again.
    """
    began = time.perf_counter()
    recording.check(model, prompted=(source.prompt or source.file or source.batch) is not None)
    if recording.resume is not None:
        return _resume(call, recording, prefix_cache, escapes)
    _check_options(call, source, grammar, reasoning, samples, logprobs)
    sampling.check(call.out.warn)
    beams = beam_flags.resolve(samples, sampling, grammar, loading.draft, logprobs)
    schema, text = grammar.text(), source.resolve(call.out.note)
    formats = asdict(replace(grammar, schema=schema))
    if receipt is not None:
        from mycli.cli.replies.receipts import check_receipt, with_seed, write_receipt

        check_receipt(
            receipt,
            loading,
            call.out.note,
            single=source.batch is None and samples == 1 and beams is None,
            template=templates.used,
            deadline=reasoning.deadline is not None,
        )
    sequences = samples if beams is None else beams.width
    running = sequences if source.batch is None else sequences * TOGETHER
    config = loading.resolve(min(running, FULL_LENGTH), None if running == 1 else running)
    config = replace(config, template=templates.resolve())
    loaded = load_engine(call, model, prefix_cache.resolve(config))
    sampled = sampling.resolve(loaded.model.defaults) if beams is None else SamplingParams()
    if receipt is not None:
        sampled = with_seed(sampled)
    generator = Generator(
        loaded,
        sampled,
        limit=limit,
        stops=tuple(sampling.stop or ()),
        system=system,
        raw=raw,
        allow_special=allow_special,
        grammar=grammar.resolve(schema, loaded.model),
        count=samples,
        top=logprobs,
        reasoning=reasoning,
        beams=beams,
    )
    if source.batch is not None:
        from mycli.cli.replies.batch_file import run_batch

        return run_batch(call, source.batch, source.out, generator.describe_all)
    ids = generator.encode(text)
    seconds = time.perf_counter() - began
    if samples > 1:
        _show_samples(call, generator, ids, seconds)
        return ExitCode.OK
    recorded = None
    if not recording.no_record and beams is None:  # the tokens of a search are known at its end only
        recorded = record_reply(generator, model, loading, config.template, formats, ids)
    reply = _reply(call, generator, ids, recorded, escapes, seconds)
    if receipt is not None:
        write_receipt(receipt, generator, reply, loading, formats)
    _check_complete(generator, [reply])
    return ExitCode.OK


def _check_options(
    call: Call,
    source: PromptFlags,
    grammar: GrammarFlags,
    reasoning: ReasoningFlags,
    samples: int,
    logprobs: int | None,
) -> None:
    if logprobs is not None and not (call.out.json_mode or source.batch):
        raise UsageError("--logprobs needs --json or --batch", "add --json")
    if not 1 <= samples <= MAX_SAMPLES:
        raise UsageError(
            f"--samples must be 1 to {MAX_SAMPLES}, not {samples}", f"for example: --samples {MAX_SAMPLES}"
        )
    if reasoning.budget is not None and grammar.used:
        raise UsageError("--reasoning-budget: a reply in a format has no reasoning", "omit --reasoning-budget")


def _resume(call: Call, recording: ResumeFlags, prefix_cache: PrefixCacheFlags, escapes: bool) -> ExitCode:
    began = time.perf_counter()
    assert recording.resume is not None
    interrupted = InterruptedReply.find(recording.resume)
    call.out.subject = subject_of(interrupted.model)
    config = replace(interrupted.loading.resolve(), template=interrupted.template)
    loaded = load_engine(call, interrupted.model, prefix_cache.resolve(config))
    grammar = GrammarFlags(**interrupted.header["grammar"])
    generator = interrupted.generator(loaded, grammar.resolve(grammar.schema, loaded.model))
    recorded = interrupted.reopen()
    seconds = time.perf_counter() - began
    reply = _reply(call, generator, interrupted.prompt, recorded, escapes, seconds, recording.after)
    _check_complete(generator, [reply])
    return ExitCode.OK


def _reply(
    call: Call,
    generator: Generator,
    prompt: Sequence[int],
    recorded: "tuple[RecordedReply, int] | None",
    escapes: bool,
    seconds: float,
    after: int = 0,
) -> "Completion":
    name = None if recorded is None else recorded[0].writer.path.stem
    try:
        reply = generator.reply(prompt, recorded)
        if call.out.json_mode:
            for _ in reply:
                pass
            answer = {"model": generator.loaded.source.name, "id": name, **generator.describe([reply])}
            call.out.json({**answer, "load_seconds": round(seconds, 4)})
        else:
            _stream(call, generator, reply, escapes, seconds, after)
        return reply
    except (KeyboardInterrupt, Terminated):
        if recorded is not None and recorded[0].writer.lines > 1:  # more than the request
            call.out.note(f"(interrupted; mycli run --resume {name} continues the reply)")
            recorded = None
        raise
    finally:
        # What was shown to its end, or failed, is not continued; a process that is killed does not get here.
        if recorded is not None:
            recorded[0].writer.remove()


def _check_complete(generator: Generator, replies: "Sequence[Completion]") -> None:
    # With a grammar, a reply that neither ended by itself nor was brought to an end at its limit does not match it.
    cut = [reply.finish_reason for reply in replies if reply.finish_reason != "stop" and not reply.shortened]
    if cut and generator.grammar is not None:
        which = "the reply" if len(replies) == 1 else f"{len(cut)} of {len(replies)} replies"
        raise GateError(
            f"{which} ended early ({cut[0]}): only the beginning of the required format is there",
            "allow more tokens with -n",
        )


def _show_samples(call: Call, generator: Generator, ids: list[int], seconds: float) -> None:
    replies = generator.samples(ids)
    if call.out.json_mode:
        answer = {"model": generator.loaded.source.name, **generator.describe(replies)}
        call.out.json({**answer, "load_seconds": round(seconds, 4)})
    else:
        for number, sample in enumerate(replies, start=1):
            call.out.note(f"sample {number} of {len(replies)} ({sample.finish_reason})")
            call.out.result(sample.text)
    _check_complete(generator, replies)


def _stream(call: Call, generator: Generator, reply: "Completion", escapes: bool, loading: float, after: int) -> None:
    contention, prompt = CpuContention(), len(reply.request.prompt)
    with call.out.reply():
        pieces = iter(reply) if not after else without_first(reply, after)
        for piece in call.out.while_reading(pieces, prompt, lambda: generator.loaded.engine.tokens_read):
            call.out.stream(piece, raw=escapes)
    if reply.finish_reason == "length" and generator.limit is None:
        call.out.note(f"(stopped after {pluralize(len(reply.tokens), 'token')}; -n sets another limit)")
    elif reply.finish_reason == "context":
        call.out.note(f"(stopped: the context of {generator.loaded.engine.context} tokens is full)")
    if disturbance := contention.note():
        call.out.note(f"({disturbance}; --threads N uses fewer cores)")
    timing = reply.timing
    speed = speed_statistics(len(reply.tokens), timing, digits=1)
    parts = (*speed, f"prompt {timing.prompt}", *draft_statistics(timing), f"loaded in {loading:.1f} s")
    call.out.detail(" · ".join(parts))
