"""`mycli bench --draft`: the same prompts with and without a draft, by kind of text, and whether it is worth it.

Knows tables and words. What is measured, and how, is in `runtime.speculative.benchmark`.
"""

from typing import TYPE_CHECKING, Any

from mycli.cli.command import Call
from mycli.cli.load import load
from mycli.runtime.errors import UsageError

if TYPE_CHECKING:  # torch takes seconds to import
    from mycli.runtime.engine.config import EngineConfig
    from mycli.runtime.speculative.benchmark import Comparison, Subject

Row = dict[str, Any]
Texts = dict[str, list[list[int]]]
LENGTHS = (4, 8)  # of drafts, in the table beside the textbook's
WORTH, HARMLESS = 1.05, 0.97
COLUMNS = ("text", "plain t/s", "draft t/s", "speed-up", "acceptance", "tokens/pass", "passes with a draft", "verdict")


def verdict(speedup: float) -> str:
    """In words: what a person should do about it."""
    if speedup >= WORTH:
        return "pays"
    return "makes no difference" if speedup >= HARMLESS else "does not pay"


def _row(kind: str, found: "Comparison") -> Row:
    return {
        "text": kind,
        "plain_tokens_per_second": found.plain,
        "draft_tokens_per_second": found.drafted,
        "speedup": found.speedup,
        "acceptance": found.record.acceptance if found.record.judged else None,
        "mean_length": found.record.mean_length,
        "passes": found.record.passes,
        "verdict": verdict(found.speedup),
    }


def _lengths(kind: str, found: "Comparison") -> list[Row]:
    """What a pass made with drafts of one length, beside what its acceptance lets expect."""
    from mycli.runtime.speculative.draft_length import expected_tokens

    rows = []
    for length, record in found.lengths.items():
        if record.passes:  # a lookup may have found nothing
            mean = record.drafted / record.passes  # shorter near the end of a reply
            below = expected_tokens(record.acceptance, int(mean))
            above = expected_tokens(record.acceptance, int(mean) + 1)
            expected = below + (above - below) * (mean - int(mean))
            rows.append(_tokens(kind, length, record.acceptance, expected, record.mean_length))
    return rows


def _tokens(text: str, length: int, acceptance: float, expected: float, found: float) -> Row:
    return {"text": text, "drafted": length, "acceptance": acceptance, "expected": expected, "found": found}


def _subject(call: Call, model: str, engine: "EngineConfig") -> "tuple[Subject, dict[str, list[list[int]]]]":
    from mycli.runtime.diagnostics.prompts import prompts
    from mycli.runtime.speculative.benchmark import Subject
    from mycli.runtime.speculative.decode import SpeculativeSession
    from mycli.runtime.speculative.proposers import DraftModel, Lookup

    opened = load(call, model, engine)
    loaded, session = opened.model, opened.session
    if not isinstance(session, SpeculativeSession):
        raise UsageError("--draft none: nothing to compare with", "name a model, or ngram")
    drafter = session.drafter

    def new_drafter() -> DraftModel | Lookup:
        if isinstance(drafter, DraftModel):
            return DraftModel(drafter.runner, session.context, loaded.runner.nbytes)
        return Lookup()

    subject = Subject(loaded.runner, new_drafter, loaded.vocabulary_size, loaded.stop_ids, session.context)
    return subject, dict(prompts(loaded.tokenizer))


def bench_draft(call: Call, model: str, engine: "EngineConfig", *, limit: int, repetitions: int, style: str) -> None:
    """Measure and say whether it pays. `style` is md or json; replies of `limit` tokens, greedy."""
    if style not in ("md", "json"):
        raise UsageError(f"-o {style} with --draft", "choose md or json")
    subject, texts = _subject(call, model, engine)
    from mycli.runtime.speculative.benchmark import compare, textbook

    rows, tokens, plain, drafted, notes = [], [], 0.0, 0.0, []
    with call.out.progress(f"{model} with {engine.draft}", len(texts), "kinds of text") as bar:
        for kind, prompts in texts.items():
            bar.describe(kind)
            found = compare(subject, prompts, limit, repetitions, LENGTHS)
            rows.append(_row(kind, found))
            tokens += _lengths(kind, found)
            plain, drafted = plain + 1 / found.plain, drafted + 1 / found.drafted
            notes += [f"{kind}: {note}" for note in found.notes]
            bar.advance(1)
    whole = plain / drafted
    tokens = [
        _tokens("textbook", length, share, expected, made) for share, length, expected, made in textbook()
    ] + tokens
    if style == "json":
        call.out.json(
            {
                "model": model,
                "draft": engine.draft,
                "results": rows,
                "tokens_per_pass": tokens,
                "speedup": whole,
                "notes": notes,
            }
        )
        return
    call.out.table(COLUMNS, [_cells(row) for row in rows], right=(1, 2, 3, 4, 5, 6))
    call.out.result("")
    call.out.table(
        ("tokens per pass", "drafted", "acceptance", "expected", "found"),
        [
            [
                row["text"],
                str(row["drafted"]),
                f"{row['acceptance']:.0%}",
                f"{row['expected']:.2f}",
                f"{row['found']:.2f}",
            ]
            for row in tokens
        ],
        right=(1, 2, 3, 4),
    )
    for note in notes:
        call.out.detail(note)
    paying = [row["text"] for row in rows if row["speedup"] >= WORTH]
    advice = f"it pays for {', '.join(paying)}" if paying else "leave it away here"
    call.out.result(f"\n{model} with the draft {engine.draft}: {whole:.2f}x over all texts; {advice}")


def _cells(row: Row) -> list[str]:
    return [
        row["text"],
        f"{row['plain_tokens_per_second']:.1f}",
        f"{row['draft_tokens_per_second']:.1f}",
        f"{row['speedup']:.2f}x",
        "" if row["acceptance"] is None else f"{row['acceptance']:.0%}",
        f"{row['mean_length']:.2f}" if row["passes"] else "",
        str(row["passes"]),
        row["verdict"],
    ]
