"""Test that sizes have units, different sizes are displayed differently, and nouns have plurals."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mycli.runtime.utils.units import GIB, distinct_sizes, human_bytes, percent, pluralize


def test_memory_has_its_unit() -> None:
    assert [human_bytes(GIB), human_bytes(5.5 * GIB), human_bytes(11_547_040)] == ["1.00 GiB", "5.50 GiB", "11 MiB"]
    assert [human_bytes(1023 << 20), human_bytes(1536), human_bytes(7), human_bytes(0)] == [
        "1023 MiB",
        "1.5 KiB",
        "7 bytes",
        "0 bytes",
    ]
    assert human_bytes(1) == "1 byte"


def test_what_is_counted_is_one_or_several() -> None:
    assert [pluralize(count, "token") for count in (0, 1, 2)] == ["0 tokens", "1 token", "2 tokens"]
    assert [pluralize(count, "reply") for count in (1, 32)] == ["1 reply", "32 replies"]


def test_a_share_is_100_percent_only_if_it_is_all() -> None:
    assert [percent(share, 1) for share in (1.0, 0.99999, 0.9994, 0.5)] == ["100.0%", "99.9%", "99.9%", "50.0%"]
    assert [percent(share) for share in (1.0, 0.996, 0.994)] == ["100%", "99%", "99%"]
    assert [percent(share, 2) for share in (0.99996, 1.5)] == ["99.99%", "150.00%"]


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (17_306, 17_305, ("17306 bytes", "17305 bytes")),
        (3 * GIB + 1, 3 * GIB, ("3221225473 bytes", "3221225472 bytes")),
        (3 * GIB, 2 * GIB, ("3.00 GiB", "2.00 GiB")),
        (1001, 1000, ("1001 bytes", "1000 bytes")),
        (GIB, GIB, ("1.00 GiB", "1.00 GiB")),
    ],
)
def test_a_difference_is_seen(first: int, second: int, expected: tuple[str, str]) -> None:
    assert distinct_sizes(first, second) == expected


@given(st.integers(0, 1 << 45), st.integers(0, 1 << 45) | st.integers(0, 9))
def test_amounts_look_alike_only_where_they_are(first: int, more: int) -> None:
    larger, smaller = distinct_sizes(first + more, first)
    assert (larger == smaller) is (more == 0)
