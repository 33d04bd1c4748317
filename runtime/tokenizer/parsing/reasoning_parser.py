"""Separates what a model thinks, between <think> tags at the start of its reply, from what it says, as it streams.

Knows the tags. Does not know templates: whether a later turn sees the reasoning is the template's decision.
"""

from dataclasses import dataclass
from typing import Literal

OPEN, CLOSE = "<think>", "</think>"


@dataclass(frozen=True)
class Part:
    """A piece of a reply; the tags count as reasoning. All parts joined are the reply."""

    text: str
    reasoning: bool


class ReasoningParser:
    """Feed pieces, get parts. Only a reply that begins with the tag reasons: later on, a tag is text like any other."""

    def __init__(self, prompt_end: str = "") -> None:
        """`prompt_end` is the end of the prompt: some templates write the opening tag there."""
        self._state: Literal["before", "inside", "after"] = "inside" if prompt_end.rstrip().endswith(OPEN) else "before"
        self._held = ""  # what may turn out to be a tag

    def feed(self, text: str) -> list[Part]:
        """The parts that are decided by one more piece, none empty."""
        if self._state == "after":
            return [Part(text, False)] if text else []
        text, self._held = self._held + text, ""
        if self._state == "before":
            start = text.lstrip()
            if not start.startswith(OPEN):
                if OPEN.startswith(start):  # also the empty text
                    self._held = text
                    return []
                self._state = "after"
                return [Part(text, False)]
            self._state = "inside"
        end = text.find(CLOSE)
        if end >= 0:
            self._state = "after"
            parts = [Part(text[: end + len(CLOSE)], True), Part(text[end + len(CLOSE) :], False)]
            return [part for part in parts if part.text]
        held = next((n for n in range(len(CLOSE) - 1, 0, -1) if text.endswith(CLOSE[:n])), 0)
        self._held = text[len(text) - held :]
        decided = text[: len(text) - held]
        return [Part(decided, True)] if decided else []

    def flush(self) -> list[Part]:
        """What was held back, when no more text comes."""
        rest, self._held = self._held, ""
        return [Part(rest, self._state == "inside")] if rest else []
