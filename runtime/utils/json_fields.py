"""Strict JSON for untrusted files: presence, type and range of a field are checked where it is read."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from mycli.runtime.errors import ModelError
from mycli.runtime.utils.units import human_bytes

MAX_JSON_BYTES = 1 << 20  # of a config; tokenizers and shard indexes have larger limits
_T = TypeVar("_T")


class Fields:
    """A JSON object whose accessors raise ModelError with `source` and the key; null counts as missing."""

    def __init__(self, values: Mapping[str, Any], source: str) -> None:
        self.values = values
        self.source = source

    def fail(self, key: str, problem: str, hint: str = "") -> ModelError:
        """Return the error for `key`; its message is "{source}: {key} {problem}"."""
        return ModelError(f"{self.source}: {key} {problem}", hint or "the file may be damaged or made for another tool")

    def has(self, key: str) -> bool:
        return self.values.get(key) is not None

    def integer(self, key: str, default: int | None = None, low: int = 1, high: int = 1 << 31) -> int:
        """Return an integer in [low, high]; bools are refused. Missing: `default`, or an error without one."""
        value = self.values.get(key)
        if value is None:
            if default is None:
                raise self.fail(key, "is missing")
            return default
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.fail(key, f"must be an integer, not {value!r:.40}")
        if not low <= value <= high:
            raise self.fail(key, f"must be between {low} and {high}, not {str(value)[:40]}")
        return value

    def number(self, key: str, default: float | None = None, low: float = 0.0, high: float = 1e12) -> float:
        value = self.values.get(key)
        if value is None:
            if default is None:
                raise self.fail(key, "is missing")
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.fail(key, f"must be a number, not {value!r:.40}")
        if not (low <= value <= high and math.isfinite(value)):
            raise self.fail(key, f"must be between {low:g} and {high:g}, not {str(value)[:40]}")
        return float(value)

    def boolean(self, key: str, default: bool) -> bool:
        value = self.values.get(key, default)
        if value is None and not default:
            return False  # readers disagree about null where the default is true
        if not isinstance(value, bool):
            raise self.fail(key, f"must be true or false, not {value!r:.40}")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        """Return a string of at most 1,000 characters."""
        value = self.values.get(key)
        if value is None:
            if default is None:
                raise self.fail(key, "is missing")
            return default
        if not isinstance(value, str) or len(value) > 1000:
            raise self.fail(key, f"must be a short string, not {str(value)!r:.40}")
        return value

    def object(self, key: str) -> "Fields":
        value = self.values.get(key)
        if value is None:
            value = {}
        if not isinstance(value, dict):
            raise self.fail(key, f"must be an object, not {value!r:.40}")
        return Fields(value, f"{self.source}: {key}")

    def array(self, key: str, kind: type[_T], limit: int = 100_000) -> list[_T]:
        """Return a list of at most `limit` values of `kind`; an empty one if missing."""
        value = self.values.get(key)
        if value is None:
            return []
        if not isinstance(value, list) or len(value) > limit:
            raise self.fail(key, f"must be a list of at most {limit} values")
        for item in value:
            if not isinstance(item, kind) or (kind is int and isinstance(item, bool)):
                raise self.fail(key, f"must hold values of type {kind.__name__}, not {item!r:.40}")
        return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        duplicate = next(k for k, _ in pairs if k in seen or seen.add(k))  # type: ignore[func-returns-value]  # a filter
        raise ValueError(f"duplicate key {duplicate!r:.80}")
    return result


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _only_infinity(name: str) -> Any:
    # Python's json.dump writes it: Nemotron-H is published with "time_step_limit": [0.0, Infinity]. `Fields.number`
    # refuses it wherever a number has to be finite.
    return math.inf if name == "Infinity" else _no_constant(name)


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:40]} is too large a number")
    return value


def strict_json(data: bytes, *, infinity: bool = False) -> Any:
    """Parse UTF-8 JSON without byte-order mark, duplicate keys, NaN or infinity. Raises ValueError."""
    text = data.decode("utf-8")
    if text.startswith("\ufeff"):
        raise ValueError("starts with a byte-order mark")
    constant = _only_infinity if infinity else _no_constant
    try:
        return json.loads(text, object_pairs_hook=_unique, parse_constant=constant, parse_float=_finite)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def parse_object(data: bytes, source: str, limit: int = MAX_JSON_BYTES) -> Fields:
    """Parse an object in JSON that may hold Infinity. Raises ModelError with `source`, line and column."""
    if len(data) > limit:
        raise ModelError(f"{source}: more than the {human_bytes(limit)} allowed", code="pull-again")
    if not data.strip():
        raise ModelError(f"{source}: the file is empty", code="pull-again")
    try:
        value = strict_json(data, infinity=True)
    except json.JSONDecodeError as error:
        raise ModelError(f"{source}:{error.lineno}:{error.colno}: not JSON: {error.msg}", code="pull-again") from None
    except ValueError as error:
        raise ModelError(f"{source}: not acceptable JSON: {error}", code="pull-again") from None
    if not isinstance(value, dict):
        raise ModelError(f"{source}: must hold an object, not a {type(value).__name__}", code="pull-again")
    return Fields(value, source)


def read_bytes(path: Path, limit: int) -> bytes:
    """Return the first `limit` + 1 bytes of a file, so that a larger one can be refused. Raises ModelError."""
    try:
        if not path.is_file():
            if path.exists():
                raise ModelError(f"{path}: not a regular file", "name another file")
            folder = f" in {path.parent}" if path.parent.name else ""
            raise ModelError(f"{path.name}: no such file{folder}", code="pull-whole")
        with path.open("rb") as file:
            return file.read(limit + 1)
    except OSError as error:
        raise ModelError(f"{path}: {error.strerror}", "check the permissions of the folder") from None


def read_object(path: Path, limit: int = MAX_JSON_BYTES) -> Fields:
    return parse_object(read_bytes(path, limit), path.name, limit)


def finite(value: Any) -> Any:
    """Return `value` with null for each number that is not finite, such as an infinite perplexity: JSON has none."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite(inner) for key, inner in value.items()}
    return [finite(inner) for inner in value] if isinstance(value, list | tuple) else value
