"""Test how many characters of items are stored."""

import pytest

from mycli.runtime.server.requests.item_store import ItemStore


def items(count: int, characters: int) -> list[dict[str, str]]:
    """Return items of `characters` characters, as the store counts them."""
    empty = {"id": "0", "text": ""}
    return [{"id": str(number), "text": "x" * (characters - len(str(empty)))} for number in range(count)]


@pytest.mark.parametrize(("most", "stored"), [(300, "012"), (299, "12"), (100, "2"), (99, "")])
def test_the_limit_counts_every_character(most: int, stored: str) -> None:
    store, few = ItemStore(most), items(3, 100)
    store.remove("unknown")
    store.keep(few)
    assert [item["id"] for item in few if store.find(item["id"]) == item] == list(stored)


def test_the_default_limit_is_16_mebicharacters() -> None:
    store, halves = ItemStore(), items(2, 1 << 23)
    store.keep(halves)
    assert [store.find(item["id"]) is not None for item in halves] == [True, True]
    store.keep([{"id": "2"}])
    assert store.find("0") is None and store.find("1") is not None
