"""Which modules the lists of a configuration mean: exact names, regular expressions, parts of names.

A regular expression from a stranger's file may take forever, so only plain ones are tried. Knows strings.
"""

import re
from collections.abc import Iterable, Sequence

from mycli.runtime.errors import ModelError

NO_MATCH = 3


def matches(name: str, pattern: str) -> bool:
    """Whether an exact name or a `re:` pattern, anchored at the start, means `name`. Raises ModelError for a pattern
    that may take long."""
    if not pattern.startswith("re:"):
        return pattern == name
    body = pattern[3:]
    # No quantifier may follow a group or another quantifier.
    if len(body) > 200 or not re.fullmatch(r"[\w.\\^$*|()\[\]\-+?]*", body) or re.search(r"[*+?)][*+]", body):
        raise ModelError(
            f"config.json: quantization_config: target {pattern[:80]!r} is too complex", "list the modules by name"
        )
    try:
        return re.match(body, name) is not None
    except re.error:
        raise ModelError(
            f"config.json: quantization_config: {pattern[:80]!r} is not a regular expression",
            "list the modules by name",
        ) from None


def rank(name: str, targets: Iterable[str]) -> int:
    """How closely targets mean a linear: 0 by name, 1 by a regex, 2 as the class "Linear", NO_MATCH not at all."""

    def one(target: str) -> int:
        if target == "Linear":
            return 2
        if not matches(name, target):
            return NO_MATCH
        return 1 if target.startswith("re:") else 0

    return min(map(one, targets), default=NO_MATCH)


def named(name: str, parts: Sequence[str]) -> bool:
    """Whether any of `parts` occurs in a module's name: how AWQ and FP8 files list what they keep."""
    return any(part in name for part in parts)
