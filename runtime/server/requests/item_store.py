"""Keeps recent items and conversations of OpenAI's responses in memory, so that a client may refer to them by id.

Clients of OpenAI refer to items of earlier replies, or to the whole conversation up to one, instead of sending them.
Nothing is kept of requests with `store: false`.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from threading import Lock
from typing import Any

MAX_CHARACTERS = 1 << 24  # of all items together; the oldest are forgotten


class ItemStore:
    """Items by id; methods may be called from any thread. Ids are random, so only who received one can use it."""

    def __init__(self, most: int = MAX_CHARACTERS) -> None:
        self._items: OrderedDict[str, tuple[Mapping[str, Any], int]] = OrderedDict()
        self._most, self._size, self._lock = most, 0, Lock()

    def keep(self, items: Sequence[Mapping[str, Any]]) -> None:
        """Keep items, each with its `id`, and forget the oldest ones beyond the limit."""
        with self._lock:
            for item in items:
                # A resumed reply has the items of the first one again.
                _, before = self._items.pop(item["id"], (None, 0))
                self._items[item["id"]] = item, (size := len(str(item)))
                self._size += size - before
            while self._size > self._most:
                _, (_, size) = self._items.popitem(last=False)
                self._size -= size

    def remove(self, name: str) -> None:
        """Forget the item with this id, if it is known."""
        with self._lock:
            _, size = self._items.pop(name, (None, 0))
            self._size -= size

    def find(self, name: str) -> Mapping[str, Any] | None:
        """Return the item with this id; None if it is unknown or forgotten."""
        with self._lock:
            entry = self._items.get(name)
        return None if entry is None else entry[0]
