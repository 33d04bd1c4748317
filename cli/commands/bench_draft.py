"""`mycli bench draft`: the same prompts with and without a draft, by kind of text, and whether the draft pays."""

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

from mycli.cli.command import Call, command
from mycli.cli.flags import options
from mycli.cli.flags.records import RunFlags
from mycli.cli.load import load_engine
from mycli.cli.output import Column
from mycli.cli.reports.bench_results import Repetitions
from mycli.runtime.engine.config import EngineConfig
from mycli.runtime.errors import ModelError, UsageError

if TYPE_CHECKING:  # torch takes seconds to import
    from mycli.runtime.diagnostics.speculation_benchmark import SpeculationResult, SpeculationSubject

EXAMPLES = ("mycli bench draft pico pico-draft -n 16 -r 1", "mycli bench draft pico ngram -n 16 -r 1 --json")
WORTH, HARMLESS = 1.05, 0.97
# Below 5 ms per step the time outside of the model varies by as much as a draft saves or costs.
SHORT_STEP, NOISE = 0.005, 0.9  # seconds, and the speed-up that still counts as no difference


def _number(heading: str, field: str, style: str) -> Column:
    return Column(heading, lambda row: None if row[field] is None else style.format(row[field]), right=True)


RESULTS = (
    Column("text", "text"),
    _number("plain t/s", "plain_tokens_per_second", "{:.1f}"),
    _number("draft t/s", "draft_tokens_per_second", "{:.1f}"),
    _number("speed-up", "speedup", "{:.2f}x"),
    _number("acceptance", "acceptance", "{:.0%}"),
    Column("tokens/pass", lambda row: f"{row['mean_length']:.2f}" if row["passes"] else None, right=True),
    _number("passes with a draft", "passes", "{:d}"),
    Column("verdict", "verdict"),
)
TOKENS_PER_PASS = (
    Column("tokens per pass", "text"),
    _number("draft length", "drafted", "{:d}"),
    _number("acceptance", "acceptance", "{:.0%}"),
    _number("expected", "expected", "{:.2f}"),
    _number("measured", "found", "{:.2f}"),
)


def verdict(speedup: float, plain: float) -> str:
    """Return whether a draft pays; `plain` is the speed without it in tokens per second."""
    if speedup >= WORTH:
        return "pays"
    harmless = NOISE if plain * SHORT_STEP > 1 else HARMLESS
    return "makes no difference" if speedup >= harmless else "does not pay"


def _result(kind: str, result: "SpeculationResult") -> dict[str, Any]:
    return {
        "text": kind,
        "plain_tokens_per_second": result.plain,
        "draft_tokens_per_second": result.drafted,
        "speedup": result.speedup,
        "acceptance": result.record.acceptance_rate if result.record.compared else None,
        "mean_length": result.record.mean_length,
        "passes": result.record.passes,
        "verdict": verdict(result.speedup, result.plain),
    }


def _subject(
    call: Call, model: str, engine: EngineConfig
) -> "tuple[SpeculationSubject, Mapping[str, list[list[int]]]]":
    from mycli.runtime.diagnostics.prompts import prompts
    from mycli.runtime.diagnostics.speculation_benchmark import SpeculationSubject
    from mycli.runtime.memory.cache_shape import CacheShape
    from mycli.runtime.speculative.lookup import PromptLookup
    from mycli.runtime.speculative.mtp import MtpProposer
    from mycli.runtime.speculative.proposers import DraftModel, Proposer
    from mycli.runtime.speculative.speculator import ProposerSpeculator

    opened = load_engine(call, model, engine)
    loaded, context = opened.model, opened.engine.context
    if not isinstance(opened.engine.speculator, ProposerSpeculator):
        raise UsageError(f"{engine.draft or 'none'} is not a draft", "name a model, ngram or mtp")
    proposer = opened.engine.speculator.proposer

    def new_proposer() -> Proposer:
        if isinstance(proposer, DraftModel):
            return DraftModel(proposer.runner, CacheShape.contiguous(context), loaded.runner.nbytes)
        if isinstance(proposer, MtpProposer):
            return MtpProposer(proposer.head, CacheShape.contiguous(context))
        return PromptLookup()

    subject = SpeculationSubject(loaded.runner, new_proposer, loaded.vocabulary_size, loaded.stop_ids, context)
    return subject, prompts(loaded.tokenizer)


@command
def bench_draft(
    call: Call,
    model: options.Model,
    draft: options.DraftName,
    generate: Annotated[int, options.count("-n --generate", "Reply length in tokens.")] = 128,
    repetitions: Repetitions = 5,
    output: Annotated[str, options.words("-o --output", ("md", "json"), "Output format.")] = "md",
    *,
    loading: RunFlags,
) -> None:
    """Measure how much faster a draft makes a model.

    DRAFT may also be ngram, or mtp for the MTP head of MODEL. Generates greedy replies to real prompts, by kind of
    text, without and with the draft in turn, and prints for which texts the draft pays.
    """
    as_json = options.choice("-o", output, ("md", "json")) == "json" or call.out.json_mode
    subject, texts = _subject(call, model, replace(loading.resolve(), draft=draft))
    from mycli.runtime.diagnostics.speculation_benchmark import measure_speculation, textbook

    results = {}
    with call.out.result_progress(f"{model} with {draft}", len(texts), "kinds of text") as bar:
        for kind, prompts in texts.items():
            bar.describe(kind)
            # A reply of one token has no step that a draft could speed up.
            result = measure_speculation(
                subject, prompts, max(generate, 2), repetitions, before_reply=call.out.require_reader
            )
            if result.plain and result.drafted:
                results[kind] = result
            bar.advance(1)
    if not results:
        raise ModelError(f"{model} ends every reply at the first token", "use a model that replies to prompts")
    for kind in filter(lambda kind: kind not in results, texts):
        call.out.note(f"{kind} is not measured: the model ends each of its replies at the first token")
    rows = [_result(kind, result) for kind, result in results.items()]
    tokens = [{"text": "textbook", **vars(row)} for row in textbook()]
    tokens += [{"text": kind, **vars(row)} for kind, result in results.items() for row in result.lengths]
    notes = [f"{kind}: {note}" for kind, result in results.items() for note in result.notes]
    plain, drafted = (sum(1 / row[f"{kind}_tokens_per_second"] for row in rows) for kind in ("plain", "draft"))
    overall = plain / drafted
    if as_json:
        measured = {"results": rows, "tokens_per_pass": tokens, "speedup": overall, "notes": notes}
        call.out.json({"model": model, "draft": draft, **measured})
        return
    call.out.table(rows, RESULTS)
    call.out.result("")
    call.out.table(tokens, TOKENS_PER_PASS)
    call.out.result(
        "expected: by the formula for independent tokens with that acceptance rate; measured: in this run. "
        "textbook: random drafts, to show that formula and measurement agree"
    )
    for note in notes:
        call.out.detail(note)
    paying = [row["text"] for row in rows if row["speedup"] >= WORTH]
    advice = f"it pays for {', '.join(paying)}" if paying else "omit --draft on this machine"
    call.out.result(f"\n{model} with draft {draft}: {overall:.2f}x over all texts; {advice}")
