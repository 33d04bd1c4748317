"""Test that streamed text equals whole text, characters are never split, and stop strings match across tokens."""

from collections.abc import Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mycli.runtime.errors import UsageError
from mycli.runtime.tokenizer.detokenizer import Detokenizer
from mycli.runtime.tokenizer.stream import MAX_STOP_LENGTH, MAX_STOPS, StopMatcher, StreamDecoder


class Bytes:
    """Provides tokens whose ids are byte values; 256 has no text."""

    def __init__(self, strip_spaces: int = 0) -> None:
        self.strip_spaces = strip_spaces

    def piece(self, token_id: int, first: bool) -> bytes | None:
        return bytes([token_id]) if token_id < 256 else None


def run(ids: Sequence[int], strip_spaces: int = 0) -> list[str]:
    stream = StreamDecoder(Bytes(strip_spaces))
    return [stream.feed(token_id) for token_id in ids] + [stream.flush()]


def test_character_split_over_tokens() -> None:  # C17
    assert run("é🎉".encode()) == ["", "é", "", "", "", "🎉", ""]


def test_hidden_token_inside_a_character() -> None:  # C17
    data = "é".encode()
    assert run([data[0], 256, data[1]]) == ["", "", "é", ""]


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_end_inside_a_character(cut: int) -> None:  # C18
    parts = run([*b"a", *"🎉".encode()[:cut]])
    assert "".join(parts) == "a\ufffd" and parts[-1] == "\ufffd"


def test_invalid_bytes_do_not_stall() -> None:  # C19
    assert run([0xFF, 0x61, 0xE2, 0x82, 0x62, 0x80]) == ["\ufffd", "a", "", "", "\ufffdb", "\ufffd", ""]


@pytest.mark.parametrize(("before", "text"), [("", "b c"), ("a", " b c"), ("Ā", "b c")])
def test_the_space_at_the_start_of_a_continuation_stays(before: str, text: str) -> None:
    stream = StreamDecoder(Bytes(strip_spaces=1), [min(ord(letter), 256) for letter in before])
    assert "".join([*map(stream.feed, b" b c"), stream.flush()]) == text


def test_leading_space() -> None:
    assert "".join(run(b"  a b", strip_spaces=1)) == " a b"
    assert "".join(run(b"a b", strip_spaces=1)) == "a b"


@given(st.text())
def test_nothing_is_replaced_in_valid_text(text: str) -> None:
    parts = run(text.encode())
    assert "".join(parts) == text
    assert all(len(part) <= 1 for part in parts)


@given(st.lists(st.integers(0, 256)))
def test_any_bytes(ids: list[int]) -> None:
    assert "".join(run(ids)) == bytes(i for i in ids if i < 256).decode("utf-8", "replace")


def test_decoder_is_ready_again_after_flush() -> None:
    stream = StreamDecoder(Bytes(1))
    for _ in range(2):
        assert [stream.feed(0x20), stream.feed(0xC3), stream.flush()] == ["", "", "\ufffd"]


def test_byte_level_pieces() -> None:
    pieces = Detokenizer(["Ġé", "Ã", "<|tool call|>", None], {9}, {"type": "ByteLevel"})
    assert [pieces.piece(i, False) for i in range(-1, 5)] == [None, b" \xe9", b"\xc3", b"<|tool call|>", None, None]


# --- stop strings


def cut_anywhere(stops: Sequence[str], text: str, cuts: Sequence[int]) -> tuple[str, bool]:
    matcher, shown, stopped = StopMatcher(stops), "", False
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    for start, end in zip(edges, edges[1:], strict=False):
        part, done = matcher.feed(text[start:end])
        assert not (stopped and (part or not done))
        shown, stopped = shown + part, stopped or done
    return shown + matcher.flush(), stopped


def first_completed(stops: Sequence[str], text: str) -> tuple[str, bool]:
    """Implement the definition: read by character, stop at the first end of a stop string, prefer the longest."""
    for end in range(1, len(text) + 1):
        endings = [stop for stop in stops if text[:end].endswith(stop)]
        if endings:
            return text[: end - max(map(len, endings))], True
    return text, False


letters = st.text("ab", max_size=12)


@given(st.lists(st.text("ab", min_size=1, max_size=4), max_size=4), letters, st.lists(st.integers(0, 12), max_size=5))
@example(["aba", "b"], "aba", [])
def test_stops_do_not_depend_on_the_cuts(stops: list[str], text: str, cuts: list[int]) -> None:
    assert cut_anywhere(stops, text, cuts) == first_completed(stops, text)


@given(st.lists(st.text("ab", min_size=1, max_size=4), max_size=4), letters, st.integers(0, 12), st.booleans())
def test_a_stop_string_that_ends_too_early_is_text(stops: list[str], text: str, least: int, included: bool) -> None:
    matcher, shown, stopped = StopMatcher(stops, included), "", False
    for place, character in enumerate(text):
        part, stopped = matcher.feed(character, place >= least)
        shown += part
    ends = [end for end in range(least + 1, len(text) + 1) if text[:end].endswith(tuple(stops))] if stops else []
    expected = text
    if ends:
        longest = max(len(stop) for stop in stops if text[: ends[0]].endswith(stop))
        expected = text[: ends[0] - (0 if included else longest)]
    assert (shown + matcher.flush(), stopped) == (expected, bool(ends))


def test_stop_across_tokens_is_held_back() -> None:  # C20
    matcher = StopMatcher(["\nUser:"])
    assert [matcher.feed(part) for part in ("hi\nU", "se", "r: x")] == [("hi", False), ("", False), ("", True)]
    assert matcher.feed("more") == ("", True) and matcher.flush() == ""


def test_beginning_of_a_stop_at_the_end_is_shown() -> None:  # C20
    matcher = StopMatcher(["END"])
    assert (matcher.feed("the EN"), matcher.flush()) == (("the ", False), "EN")


@pytest.mark.parametrize("length", range(1, 8))
def test_a_beginning_of_any_length_is_held_back(length: int) -> None:
    matcher, stop = StopMatcher(["abcdefgh"]), "abcdefgh"
    assert matcher.feed("x" + stop[:length]) == ("x", False)
    assert matcher.feed(stop[length:]) == ("", True)


def test_held_text_is_short() -> None:
    matcher = StopMatcher(["a" * MAX_STOP_LENGTH])
    shown = sum(len(matcher.feed("a")[0]) for _ in range(MAX_STOP_LENGTH - 1))
    assert shown == 0 and matcher.feed("b") == ("a" * (MAX_STOP_LENGTH - 1) + "b", False)


@pytest.mark.parametrize(
    "stops",
    [
        pytest.param([""], id="C20-empty"),
        pytest.param(["x"] * (MAX_STOPS + 1), id="C20-too-many"),
        pytest.param(["x" * (MAX_STOP_LENGTH + 1)], id="C20-too-long"),
    ],
)
def test_stops_refused(stops: list[str]) -> None:
    with pytest.raises(UsageError, match="stop string"):
        StopMatcher(stops)


def test_a_stop_that_begins_within_the_beginning_of_itself_or_of_another() -> None:
    assert StopMatcher(["aab"]).feed("aaab") == ("a", True)
    matcher = StopMatcher(["ababc", "abx", "bd"])
    assert matcher.feed("abab") == ("", False)
    assert (matcher.feed("x"), matcher.matched) == (("ab", True), "abx")
    matcher = StopMatcher(["abc", "bd"])
    assert [matcher.feed(text) for text in "abd"] == [("", False), ("", False), ("a", True)]


def test_text_after_a_flush_begins_anew() -> None:
    matcher = StopMatcher(["END"])
    assert (matcher.feed("EN"), matcher.flush()) == (("", False), "EN")
    assert matcher.feed("D or END") == ("D or ", True)


def test_as_many_and_as_long_stops_as_allowed() -> None:
    assert MAX_STOPS >= 64, "programs for group chats stop at the name of every character"
    stops = [f"{index:02}" * (MAX_STOP_LENGTH // 2) for index in range(MAX_STOPS)]
    assert StopMatcher(stops).feed("a" + stops[-1]) == ("a", True)
