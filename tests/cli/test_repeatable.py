"""The same command prints the same reply, greedy and seeded, for any draft model and any number of samples."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from mycli.runtime.speculative import draft_length
from mycli.runtime.speculative.draft_length import DraftLengthPolicy, FixedDraftLength
from tests.support.command_line import Mycli

ASKED = ("run", "pico", "Tell me a story.", "-n", "32", "--device", "cpu", "--json")
KINDS = {"greedy": ("-t", "0"), "seeded": ("--seed", "3")}


class Irregular(DraftLengthPolicy):
    """Proposes draft lengths that differ between runs, as measured time would choose them."""

    def __init__(self, start: int) -> None:
        self._step = start

    def length(self, room: int, lag: int, evidence: int = 0) -> int:
        self._step += 1
        return min(room, (0, 3, 1, 5, 0, 0, 2)[self._step * 5 % 7])


def answer(mycli: Mycli, *options: str) -> dict[str, Any]:
    done = mycli(*ASKED, *options)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


@pytest.mark.parametrize("kind", KINDS)
def test_a_draft_changes_no_reply_that_is_repeatable(kind: str, mycli: Mycli, monkeypatch: pytest.MonkeyPatch) -> None:
    """The draft model is right half of the time; lengths are those of a fast, a slow and a busy machine."""
    plain = answer(mycli, *KINDS[kind])
    policies: list[Callable[[], DraftLengthPolicy]] = [
        lambda: FixedDraftLength(6),
        lambda: Irregular(0),
        lambda: Irregular(3),
    ]
    counts = set()
    for policy in policies:
        monkeypatch.setattr(draft_length, "AdaptiveDraftLength", lambda *_, made=policy: made())
        drafted = answer(mycli, *KINDS[kind], "--draft", "pico-draft")
        assert drafted["text"] == plain["text"]
        counts.add(drafted["draft"]["drafted"])
    assert len(counts) > 1, "the lengths made a difference, to all but the reply"


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_of_several_samples_is_the_only_one(kind: str, mycli: Mycli) -> None:
    samples = answer(mycli, *KINDS[kind], "--samples", "3")["samples"]
    texts = [sample["text"] for sample in samples]
    assert texts[0] == answer(mycli, *KINDS[kind])["text"]
    assert len(set(texts)) == (1 if kind == "greedy" else 3) and len(texts) == 3
