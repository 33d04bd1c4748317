"""API keys with names, shares of the machine and limits: reads the file of keys and counts the requests of each.

One line a key: NAME KEY [weight=N] [concurrent=N] [rpm=N] [batch]. Empty lines and lines that begin with # are skipped.
"""

import hmac
import re
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from mycli.runtime.errors import UsageError
from mycli.runtime.server.http.api_error import ApiError

_NAME = re.compile(r"[A-Za-z0-9_.@-]{1,64}")
_SECRET = re.compile(r"[!-~]{8,4096}")  # printable ASCII
_MAX_KEYS = 10_000
_MINUTE = 60.0


@dataclass(frozen=True)
class KeyShare:
    """The share of the machine for a request. name: of the key; weight: its share under load relative to other keys;
    batch: it runs only when no interactive request is waiting.
    """

    name: str = ""
    weight: float = 1.0
    batch: bool = False

    def encode(self) -> str:
        """Return the share as the value of a header."""
        return f"{self.name};{self.weight:g};{int(self.batch)}"

    @classmethod
    def decode(cls, text: str) -> "KeyShare":
        """Read the value of a header. Only the router sends it, so it is not validated."""
        name, _, rest = text.partition(";")
        weight, _, batch = rest.partition(";")
        return cls(name, float(weight), batch == "1") if rest else cls()


@dataclass(frozen=True)
class ApiKey:
    """A key. concurrent: requests at the same time; rpm: requests a minute; None for any number."""

    secret: bytes
    share: KeyShare = KeyShare()
    concurrent: int | None = None
    rpm: int | None = None


def parse_keys(text: str, source: str) -> tuple[ApiKey, ...]:
    """Parse the lines of a file of keys. Raises UsageError naming the line; no message contains a key."""
    keys: list[ApiKey] = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        try:
            keys.append(_parse_key(words))
        except ValueError as error:
            hint = "a line is: NAME KEY [weight=N] [concurrent=N] [rpm=N] [batch]"
            raise UsageError(f"{source}: line {number}: {error}", hint) from None
    for kind, values in (("name", [key.share.name for key in keys]), ("key", [key.secret for key in keys])):
        if len(set(values)) < len(values):
            raise UsageError(f"{source}: two lines have the same {kind}", f"give each line a {kind} of its own")
    if not 0 < len(keys) <= _MAX_KEYS:
        raise UsageError(f"{source}: has {len(keys)} keys", f"write 1 to {_MAX_KEYS} lines: NAME KEY")
    return tuple(keys)


def _parse_key(words: Sequence[str]) -> ApiKey:
    if len(words) < 2:
        raise ValueError("needs a name and a key")
    if not _NAME.fullmatch(words[0]):
        raise ValueError("the name must be 1 to 64 letters, digits, or one of . _ @ -")
    if not _SECRET.fullmatch(words[1]):
        raise ValueError("the key must be 8 or more characters of ASCII")
    key = ApiKey(words[1].encode(), KeyShare(words[0]))
    for word in words[2:]:
        name, _, value = word.partition("=")
        if word == "batch":
            key = replace(key, share=replace(key.share, batch=True))
        elif name == "weight" and re.fullmatch(r"[0-9]{1,4}(\.[0-9]{1,3})?", value) and float(value) > 0:
            key = replace(key, share=replace(key.share, weight=float(value)))
        elif name in ("concurrent", "rpm") and re.fullmatch(r"[1-9][0-9]{0,6}", value):
            key = replace(key, concurrent=int(value)) if name == "concurrent" else replace(key, rpm=int(value))
        else:
            raise ValueError(f"{word!r:.40} is not weight=N, concurrent=N, rpm=N or batch")
    return key


class KeyTable:
    """The keys of a server and the requests of each. Used on the event loop only."""

    def __init__(self, keys: Sequence[ApiKey], clock: Callable[[], float] = time.monotonic) -> None:
        self._keys, self._clock = keys, clock
        self._active = dict.fromkeys((key.share.name for key in keys), 0)
        self._times: dict[str, deque[float]] = {key.share.name: deque() for key in keys}

    def __bool__(self) -> bool:
        return bool(self._keys)

    def find(self, sent: bytes) -> ApiKey | None:
        """Return the key that a client sent; None for no key of this server."""
        # All keys are compared, so that the time does not reveal the position of a matching key.
        matching = [key for key in self._keys if hmac.compare_digest(sent, key.secret)]
        return matching[0] if matching else None

    @contextmanager
    def counted(self, key: ApiKey) -> Iterator[None]:
        """Count a request of `key` inside the context. Raises ApiError beyond its limits."""
        name, now = key.share.name, self._clock()
        times = self._times[name]
        while times and now - times[0] >= _MINUTE:
            times.popleft()
        if key.concurrent is not None and self._active[name] >= key.concurrent:
            message = f"key {name} has {self._active[name]} running requests; its limit is {key.concurrent}"
            raise ApiError(429, message, "key_limit", headers={"retry-after": "1"})
        if key.rpm is not None and len(times) >= key.rpm:
            seconds = int(times[0] + _MINUTE - now) + 1
            message = f"key {name} may send {key.rpm} requests a minute"
            raise ApiError(429, message, "key_limit", headers={"retry-after": str(seconds)})
        if key.rpm is not None:
            times.append(now)
        self._active[name] += 1
        try:
            yield
        finally:
            self._active[name] -= 1
