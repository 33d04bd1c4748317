"""Test sentinels around spelled control tokens: unforgeable, located again, and safe if one of a pair is lost."""

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mycli.runtime.tokenizer import special_tokens
from mycli.runtime.tokenizer.special_tokens import AddedToken, ControlTokens, Segment, Sentinels, is_space, strings

END = AddedToken(1, "<end>", special=True, normalized=False)
LONG = AddedToken(2, "<end>!", special=True, normalized=False)
CALL = AddedToken(3, "<call>", special=False, normalized=False)
BLANK = AddedToken(4, "\n\n", special=False, normalized=False)
CONTROL = ControlTokens([END, LONG, CALL, BLANK], str)
SENTINELS = Sentinels("[", "]")


def test_marks_are_absent_from_the_texts() -> None:  # C13
    usual = Sentinels.absent_from([])
    other = Sentinels.absent_from([usual.start, "x" + usual.end])
    assert len({usual.start, usual.end, other.start, other.end}) == 4


def test_few_characters_are_tried_for_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []
    monkeypatch.setattr(special_tokens, "chr", lambda code: tried.append(code) or chr(code), raising=False)
    Sentinels.absent_from(["<end>", chr(0x10FFFD)])
    assert len(tried) == 3


LETTERS = st.text("ab.|", max_size=8)


@given(st.sets(LETTERS.filter(bool)), st.text("ab.|", max_size=60))
@example({"a" * length for length in range(1, 100)}, "a" * 250)
def test_a_pattern_matches_what_the_longest_token_first_matches(contents: set[str], text: str) -> None:
    flat = "|".join(map(re.escape, sorted(contents, key=len, reverse=True))) or "(?!)"
    pattern = special_tokens._alternatives(list(contents))
    assert [match.span() for match in re.finditer(pattern, text)] == [match.span() for match in re.finditer(flat, text)]


def test_a_common_beginning_is_compared_once_for_thousands_of_tokens() -> None:
    pattern = special_tokens._alternatives([f"<unused{index}>" for index in range(6242)])
    assert pattern.count("<unused") == 1 and len(pattern) < 60_000
    assert re.fullmatch(pattern, "<unused6241>") and not re.match(pattern, "<unused6242>")


@pytest.mark.parametrize(("token", "expected"), [(" \n\t", True), ("▁▁", True), ("▁a", False), ("<b>", False)])
def test_white_space_is_no_control_token(token: str, expected: bool) -> None:
    assert is_space(token) == expected
    assert (not ControlTokens([AddedToken(1, token, special=False, normalized=False)], str).ids) == expected


def test_what_counts_as_spelled() -> None:
    assert CONTROL.ids == {1, 2, 3}
    assert CONTROL.spelled_in({"a": ["b", {"c<call>": 1}]})
    assert not CONTROL.spelled_in(["\n\n", None, 3, True, "<END>"])
    assert not CONTROL.spelled_in("<call>", special_only=True) and CONTROL.spelled_in("<end>", special_only=True)


def test_wrap_takes_the_longest() -> None:
    assert CONTROL.wrap({"k<call>": ["a<end>!<end>", 1]}, SENTINELS) == {"k[<call>]": ["a[<end>!][<end>]", 1]}
    assert CONTROL.wrap("a<end>!", SENTINELS, keep=False) == "a[]"


def test_normalized_spelling_wraps_the_whole_text() -> None:
    control = ControlTokens([AddedToken(1, "<end>", special=True, normalized=True)], str.lower)
    assert control.wrap("x<END>", SENTINELS) == "[x<END>]" and control.wrap("x", SENTINELS) == "x"
    assert control.wrap("x<END>", SENTINELS, keep=False) == "[]"


@pytest.mark.parametrize(
    ("rendered", "expected"),
    [
        ("", []),
        ("a<end>b", [Segment("a<end>b", False, False)]),
        ("a[<end>]b", [Segment("a<end>b", True, False)]),
        ("<call>a[<end>]b<end>c", [("<call>", 0, 0), ("a<end>b", 1, 1), ("<end>c", 0, 0)]),
        ("<call>[<end>]<end>[<call>]", [("<call>", 0, 0), ("<end>", 1, 1), ("<end>", 0, 0), ("<call>", 1, 1)]),
        ("<call> a[<end>] <end>", [("<call>", 0, 0), (" a<end> ", 1, 1), ("<end>", 0, 0)]),
        ("<call>a[<end>", [("<call>", 0, 0), ("a<end>", 1, 1)]),  # the second mark was lost
        ("<end>] b<call>", [("<end> b", 1, 0), ("<call>", 0, 0)]),  # the first was
        ("a]b<end>", [("ab", 1, 0), ("<end>", 0, 0)]),
    ],
)
def test_segments(rendered: str, expected: list[Segment | tuple[str, int, int]]) -> None:
    segments = [
        item if isinstance(item, Segment) else Segment(item[0], bool(item[1]), bool(item[2])) for item in expected
    ]
    assert list(CONTROL.segments(rendered, SENTINELS)) == segments


def test_written_lists_the_templates_own() -> None:
    assert CONTROL.template_tokens("<call>a[<end>]b<end>!", SENTINELS) == ["<call>", "<end>!"]


def test_strings() -> None:
    assert list(strings({"a": ["b", 1, None, ("c",)]})) == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("lstrip", "rstrip", "between"),
    [(False, False, " [a] "), (True, False, " [a]"), (False, True, "[a] "), (True, True, "[a]")],
)
def test_a_token_takes_the_white_space_beside_it(lstrip: bool, rstrip: bool, between: str) -> None:
    """The library strips it where a text is encoded in one call; a separate segment must lose the same characters."""
    mark = AddedToken(1, "<m>", special=True, normalized=False, lstrip=lstrip, rstrip=rstrip)
    other = AddedToken(2, "[a]", special=True, normalized=False)
    control = ControlTokens([mark, other], str)
    marks = Sentinels("(", ")")
    segments = list(control.segments(" ([a]) <m> ([a]) <m> ([a]) ", marks))
    plain = [segment.text for segment in segments if segment.plain]
    assert plain == [" [a] ".rstrip() if lstrip else " [a] ", between, " [a] ".lstrip() if rstrip else " [a] "]
