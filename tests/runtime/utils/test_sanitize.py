"""Test C21, C22: text that can control a terminal is removed, ordinary text of any language is kept."""

import json
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mycli.runtime.utils.sanitize import one_line, sanitize, sanitize_json

ATTACKS = {
    "title": ("\x1b]0;owned\x07", "^[]0;owned^G"),
    "clipboard-osc52": ("\x1b]52;c;cm0=\x1b\\", "^[]52;c;cm0=^[\\"),
    "hyperlink-osc8": ("\x1b]8;;http://x\x1b\\a", "^[]8;;http://x^[\\a"),
    "c1-csi": ("\x9b2J", "\\u009b2J"),
    "carriage-return": ("safe\rrm -rf", "safe^Mrm -rf"),
    "backspace": ("a\x08b", "a^Hb"),
    "delete": ("a\x7f", "a^?"),
    "bidi-override": ("a\u202eb", "a\\u202eb"),
    "tag-characters": ("a\U000e0041", "a\\U000e0041"),
    "line-separator": ("a\u2028b", "a\\u2028b"),
    "lone-surrogate": ("a\ud800", "a\\ud800"),
}


@pytest.mark.parametrize("case", ATTACKS, ids=lambda case: f"C21-{case}")
def test_attacks_become_visible(case: str) -> None:
    attack, visible = ATTACKS[case]
    assert sanitize(attack) == visible


@pytest.mark.parametrize("text", ["plain\ttab\n", "Grüße 你好 שלום مرحبا", "👩‍👩‍👧 é e\u0301", "𝔘𝔫𝔦"])
def test_ordinary_text_passes(text: str) -> None:
    assert sanitize(text) == text


@given(st.text())
def test_no_control_character_is_left(text: str) -> None:
    clean = sanitize(text)
    assert not [c for c in clean if unicodedata.category(c) in ("Cc", "Cs") and c not in "\n\t"]
    assert sanitize(clean) == clean
    assert len(one_line(text, 50)) <= 50 and "\n" not in one_line(text)


@given(st.text() | st.sampled_from([attack for attack, _ in ATTACKS.values()]))
def test_sanitized_json_has_the_same_value(text: str) -> None:
    """As UTF-16 does, JSON writes a character beyond U+FFFF in two escape sequences."""
    clean = sanitize_json(json.dumps(text, ensure_ascii=False))
    assert json.loads(clean) == text and sanitize(clean) == clean


def test_a_name_in_a_message_is_one_line_of_at_most_the_limit() -> None:
    assert one_line("a\n\tb") == "a\\n\\tb"
    assert one_line("x" * 10, 10) == "x" * 10 and one_line("x" * 11, 10) == "x" * 9 + "…"
