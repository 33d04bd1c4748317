"""Test that reasoning is separated from content for any chunking of the reply, without losing text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mycli.runtime.tokenizer.parsing.reasoning_parser import Part, ReasoningParser


def split(text: str, cuts: list[int], prompt_end: str = "") -> list[Part]:
    splitter = ReasoningParser(prompt_end)
    places = sorted({min(cut, len(text)) for cut in cuts} | {0, len(text)})
    parts = [part for a, b in zip(places, places[1:], strict=False) for part in splitter.feed(text[a:b])]
    return parts + splitter.flush()


def joined(parts: list[Part], reasoning: bool) -> str:
    return "".join(part.text for part in parts if part.reasoning is reasoning)


fragments = st.lists(st.sampled_from(["<think>", "</think>", "<", "thi", "/think>", "a", "\n", " ", "é"]), max_size=9)


@given(fragments.map("".join), st.lists(st.integers(0, 40), max_size=12), st.sampled_from(["", "<think>\n"]))
def test_cuts_change_nothing(text: str, cuts: list[int], prompt_end: str) -> None:
    parts, whole = split(text, cuts, prompt_end), split(text, [], prompt_end)
    assert "".join(part.text for part in parts) == text
    assert (joined(parts, True), joined(parts, False)) == (joined(whole, True), joined(whole, False))


@pytest.mark.parametrize(
    ("text", "prompt_end", "reasoning", "content"),
    [
        ("<think>a</think>b", "", "<think>a</think>", "b"),
        ("\n<think>a</think>b", "", "\n<think>a</think>", "b"),
        ("a</think>b", "assistant\n<think>\n", "a</think>", "b"),
        ("b <think>a</think>", "", "", "b <think>a</think>"),
        ("<think>a</think>b</think>c", "", "<think>a</think>", "b</think>c"),
        ("<think>never ends </thi", "", "<think>never ends </thi", ""),
        ("<thin", "", "", "<thin"),
        ("", "", "", ""),
    ],
)
def test_only_the_beginning_reasons(text: str, prompt_end: str, reasoning: str, content: str) -> None:
    parts = split(text, list(range(len(text))), prompt_end)
    assert (joined(parts, True), joined(parts, False)) == (reasoning, content)
