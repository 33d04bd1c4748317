"""The findings of a check: codes with values, which `cli/template_messages.py` words, and their severities."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from mycli.runtime.tokenizer.prompt_difference import AROUND

Severity = Literal["error", "warning", "note"]

# error: the model gets other text than the client sent, or its reply cannot be read. warning: a request that clients
# send is refused, or the cache is lost every turn. note: a limit that clients usually cope with.
SEVERITIES: Mapping[str, Severity] = {
    # the source
    "syntax": "error",
    "private-attribute": "error",
    "other-file": "error",
    "random": "error",
    "time-of-day": "warning",
    "date": "note",
    "slow": "warning",
    "own-variable": "note",
    # rendering at all
    "fails": "error",
    "refuses": "warning",
    "content-altered": "error",
    "content-trimmed": "note",
    # turns
    "history-changes": "warning",
    "reply-opening-changes": "warning",
    "reply-altered": "warning",
    "no-generation-prompt": "warning",
    "turns-must-alternate": "note",
    # the system prompt
    "system-refused": "warning",
    "system-dropped": "error",
    "system-not-first": "warning",
    "later-system-refused": "note",
    "later-system-dropped": "warning",
    # tools
    "no-tools": "note",
    "tools-not-rendered": "error",
    "parameters-not-rendered": "error",
    "call-not-rendered": "error",
    "call-not-parsed": "error",
    "calls-refused": "warning",
    "several-calls-refused": "note",
    "call-ids-refused": "warning",
    "result-not-rendered": "error",
    "unknown-call-format": "error",
    # reasoning
    "reasoning-dropped": "note",
    "reasoning-dropped-later": "note",
    "reasoning-dropped-in-loop": "warning",
    # tokens
    "bos-missing": "warning",
    "bos-twice": "error",
    "turn-not-ended": "error",
    "call-not-ended": "error",
    "marker-not-a-token": "warning",
    "turns-can-be-forged": "warning",
    "spelled-token-refused": "warning",
}


@dataclass(frozen=True)
class Finding:
    """A fault or a limit of a template."""

    code: str
    data: Mapping[str, object] = field(default_factory=dict)

    @property
    def severity(self) -> Severity:
        return SEVERITIES[self.code]


def excerpts(expected: str, actual: str) -> dict[str, str]:
    """Return the text before the first difference, and both texts after it."""
    shared = common_length(expected, actual)
    after = slice(shared, shared + AROUND)
    return {
        "before": actual[max(shared - AROUND, 0) : shared],
        "expected": expected[after],
        "actual": actual[after],
    }


def common_length(first: str, second: str) -> int:
    pairs: Iterator[tuple[str, str]] = zip(first, second, strict=False)
    return next((index for index, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))
