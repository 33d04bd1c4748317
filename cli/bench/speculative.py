"""What `mycli bench --draft` shows: the same prompts with and without a draft, by kind of text, and if it is worth it.

Knows tables and words. What is measured, and how, is in `runtime.diagnostics.speculation_benchmark`.
"""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from mycli.cli.command import Call
from mycli.cli.load import load_engine
from mycli.runtime.engine.config import EngineConfig
from mycli.runtime.errors import UsageError

if TYPE_CHECKING:  # torch takes seconds to import
    from mycli.runtime.diagnostics.speculation_benchmark import SpeculationResult, SpeculationSubject

Columns = tuple[tuple[str, str, str], ...]  # heading, field, format
DRAFT_LENGTHS = (4, 8)  # in the table beside the textbook's
WORTH, HARMLESS = 1.05, 0.97
SHORT_STEP, NOISE = 0.005, 0.9  # seconds: below, what the system does beside it takes as much as the difference
RESULTS: Columns = (
    ("text", "text", "{}"),
    ("plain t/s", "plain_tokens_per_second", "{:.1f}"),
    ("draft t/s", "draft_tokens_per_second", "{:.1f}"),
    ("speed-up", "speedup", "{:.2f}x"),
    ("acceptance", "acceptance", "{:.0%}"),
    ("tokens/pass", "mean_length", "{:.2f}"),
    ("passes with a draft", "passes", "{:d}"),
    ("verdict", "verdict", "{}"),
)
TOKENS_PER_PASS: Columns = (
    ("tokens per pass", "text", "{}"),
    ("drafted", "drafted", "{:d}"),
    ("acceptance", "acceptance", "{:.0%}"),
    ("expected", "expected", "{:.2f}"),
    ("found", "found", "{:.2f}"),
)


def verdict(speedup: float, plain: float) -> str:
    """In words: what a person should do about it. `plain`: tokens per second without a draft."""
    if speedup >= WORTH:
        return "pays"
    harmless = NOISE if plain * SHORT_STEP > 1 else HARMLESS
    return "makes no difference" if speedup >= harmless else "does not pay"


def _result(kind: str, found: "SpeculationResult") -> dict[str, Any]:
    return {
        "text": kind,
        "plain_tokens_per_second": found.plain,
        "draft_tokens_per_second": found.drafted,
        "speedup": found.speedup,
        "acceptance": found.record.acceptance_rate if found.record.compared else None,
        "mean_length": found.record.mean_length,
        "passes": found.record.passes,
        "verdict": verdict(found.speedup, found.plain),
    }


def _table(call: Call, columns: Columns, rows: Iterable[dict[str, Any]]) -> None:
    """Numbers to the right; nothing where there is no number."""
    cells = [["" if row[key] is None else style.format(row[key]) for _, key, style in columns] for row in rows]
    numbers = tuple(index for index, (*_, style) in enumerate(columns) if style != "{}")
    call.out.table([heading for heading, *_ in columns], cells, right=numbers)


def _subject(
    call: Call, model: str, engine: EngineConfig
) -> "tuple[SpeculationSubject, Mapping[str, list[list[int]]]]":
    from mycli.runtime.diagnostics.prompts import prompts
    from mycli.runtime.diagnostics.speculation_benchmark import SpeculationSubject
    from mycli.runtime.engine.model_runner import CacheShape
    from mycli.runtime.speculative.mtp import MtpProposer
    from mycli.runtime.speculative.proposers import DraftModel, PromptLookup, Proposer
    from mycli.runtime.speculative.speculator import ProposerSpeculator

    opened = load_engine(call, model, engine)
    loaded, context = opened.model, opened.engine.context
    if not isinstance(opened.engine.speculator, ProposerSpeculator):
        raise UsageError("--draft none: nothing to compare with", "name a model, ngram or mtp")
    proposer = opened.engine.speculator.proposer

    def new_proposer() -> Proposer:
        if isinstance(proposer, DraftModel):
            return DraftModel(proposer.runner, CacheShape.contiguous(context), loaded.runner.nbytes)
        if isinstance(proposer, MtpProposer):
            return MtpProposer(proposer.head, CacheShape.contiguous(context))
        return PromptLookup()

    subject = SpeculationSubject(loaded.runner, new_proposer, loaded.vocabulary_size, loaded.stop_ids, context)
    return subject, prompts(loaded.tokenizer)


def bench_draft(call: Call, model: str, engine: EngineConfig, *, limit: int, repetitions: int, style: str) -> None:
    """Measure and say whether it pays. `style` is md or json; replies of `limit` tokens, greedy."""
    if style not in ("md", "json"):
        raise UsageError(f"-o {style} with --draft", "choose md or json")
    subject, texts = _subject(call, model, engine)
    from mycli.runtime.diagnostics.speculation_benchmark import measure_speculation, textbook

    found = {}
    with call.out.progress(f"{model} with {engine.draft}", len(texts), "kinds of text") as bar:
        for kind, prompts in texts.items():
            bar.describe(kind)
            found[kind] = measure_speculation(subject, prompts, limit, repetitions, DRAFT_LENGTHS)
            bar.advance(1)
    rows = [_result(kind, one) for kind, one in found.items()]
    tokens = [{"text": "textbook", **vars(one)} for one in textbook()]
    tokens += [{"text": kind, **vars(one)} for kind, result in found.items() for one in result.lengths]
    notes = [f"{kind}: {note}" for kind, one in found.items() for note in one.notes]
    whole = sum(1 / one.plain for one in found.values()) / sum(1 / one.drafted for one in found.values())
    if style == "json":
        measured = {"results": rows, "tokens_per_pass": tokens, "speedup": whole, "notes": notes}
        call.out.json({"model": model, "draft": engine.draft, **measured})
        return
    _table(call, RESULTS, [row if row["passes"] else {**row, "mean_length": None} for row in rows])
    call.out.result("")
    _table(call, TOKENS_PER_PASS, tokens)
    call.out.result(
        "expected: what the formula gives for independent tokens of that acceptance; found: what passes made. "
        "textbook: drafts that are accepted by chance alone, to show that the two agree"
    )
    for note in notes:
        call.out.detail(note)
    paying = [row["text"] for row in rows if row["speedup"] >= WORTH]
    advice = f"it pays for {', '.join(paying)}" if paying else "omit it here"
    call.out.result(f"\n{model} with the draft {engine.draft}: {whole:.2f}x over all texts; {advice}")
