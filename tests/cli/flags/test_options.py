"""Counts and amounts of memory as people write them."""

import pytest
import typer

from mycli.cli.flags.options import parse_count, parse_counts, parse_memory
from mycli.runtime.errors import UsageError


@pytest.mark.parametrize(("text", "count"), [("0", 0), ("512", 512), ("32k", 32768), ("2K", 2048), ("1M", 1 << 20)])
def test_counts(text: str, count: int) -> None:
    assert parse_count(text) == count


@pytest.mark.parametrize("text", ["", "-1", "1.5k", "k", "1kk", "٣", "1e3", "9" * 20, "0x10"])
def test_what_is_no_count(text: str) -> None:
    with pytest.raises(typer.BadParameter):
        parse_count(text)


def test_lists_of_counts() -> None:
    assert parse_counts("0,512,8k") == (0, 512, 8192)
    with pytest.raises(UsageError):
        parse_counts("512,,1")


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("24GiB", 24 << 30),
        ("24GB", 24 * 10**9),
        ("1.5 gib", 3 << 29),
        ("24G", 24 << 30),
        ("8m", 8 << 20),
        ("1024B", 1024),
    ],
)
def test_memory(text: str, size: int) -> None:
    assert parse_memory(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "24XB", "nan", "1e9GiB", "24", "0GiB", "0.0000000001B"])
def test_what_is_no_memory(text: str) -> None:
    with pytest.raises(typer.BadParameter):
        parse_memory(text)
