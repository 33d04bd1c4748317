"""The record in `mycli.json` of how quantization changed tool calls. Imports no torch."""

from collections.abc import Mapping
from dataclasses import dataclass

from mycli.runtime.utils.json_fields import Fields


@dataclass(frozen=True)
class TokenAgreement:
    """How far two models agree on some tokens; `kl` is a mean in nats."""

    tokens: int
    kl: float
    same_top1: float


@dataclass(frozen=True)
class CallCounts:
    """The number of built-in prompts that a model replied to with valid calls, and with exactly the expected call."""

    valid: int
    expected: int


@dataclass(frozen=True)
class CallQuality:
    """`structure`: agreement on all tokens of built-in calls but their values, and by kind; counts of own replies.

    before, after: None if the replies were not generated, for the reason `skipped`.
    """

    prompts: int
    structure: TokenAgreement
    kinds: Mapping[str, TokenAgreement]
    before: CallCounts | None
    after: CallCounts | None
    skipped: str | None = None

    @property
    def loss(self) -> float | None:
        """The share of prompts that only the original replies to with valid calls; negative for a gain."""
        if self.before is None or self.after is None or not self.before.valid:
            return None
        return (self.before.valid - self.after.valid) / self.prompts


def read_call_quality(record: Fields | None) -> CallQuality | None:
    """Return what mycli.json says of calls, None if it does not. Raises ModelError for invalid values."""
    if record is None or not record.has("card") or not record.object("card").has("calls"):
        return None
    calls = record.object("card").object("calls")
    kinds = calls.object("kinds")
    return CallQuality(
        prompts=calls.integer("prompts", low=1),
        structure=_agreement(calls.object("structure")),
        kinds={name: _agreement(kinds.object(name)) for name in kinds.values},
        before=_counts(calls, "before"),
        after=_counts(calls, "after"),
        skipped=calls.text("skipped") if calls.has("skipped") else None,
    )


def _agreement(fields: Fields) -> TokenAgreement:
    kl, same = fields.number("kl", low=-1e-3), fields.number("same_top1", low=0.0)
    return TokenAgreement(fields.integer("tokens", low=0), kl, same)


def _counts(fields: Fields, name: str) -> CallCounts | None:
    if not fields.has(name):
        return None
    counts = fields.object(name)
    return CallCounts(counts.integer("valid", low=0), counts.integer("expected", low=0))
