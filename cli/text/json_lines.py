"""Answers and errors as lines of JSON for a program: one object each, with the version of what their fields mean."""

import json
import math
from collections.abc import Mapping
from typing import Any

from mycli.cli.remedies import Subject, remedy
from mycli.runtime.errors import UserError

SCHEMA_VERSION = 1


def _finite(value: Any) -> Any:
    """`value` with null for what JSON has no number for: an infinite perplexity must not spoil the answer."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(inner) for key, inner in value.items()}
    return [_finite(inner) for inner in value] if isinstance(value, list | tuple) else value


def json_line(value: Mapping[str, Any], encoding: str = "utf-8") -> str:
    """`value` and `schema_version` as one line of JSON, with escapes where `encoding` could not write it."""
    whole = _finite({"schema_version": SCHEMA_VERSION, **value})
    line = json.dumps(whole, ensure_ascii=False, allow_nan=False)
    try:
        line.encode(encoding)
        return line
    except UnicodeEncodeError:
        return json.dumps(whole, allow_nan=False)


def error_fields(error: UserError, subject: Subject = Subject()) -> dict[str, Any]:  # noqa: B008  # frozen
    """An error as an object for a program; `code` names the remedy where there is a name for it."""
    code = {"code": error.code} if error.code else {}
    return {"message": error.message, "hint": remedy(error, subject), "exit_code": int(error.exit_code), **code}
