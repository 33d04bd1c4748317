"""The messages for reasons why a kernel or a pass does not take a piece of work, one for each code of `Declined`."""

from collections.abc import Mapping

from mycli.runtime.errors import Declined

# code -> message; the fields in braces are the values of `Declined.data`
REASONS: Mapping[str, str] = {}


def reason(declined: Declined) -> str:
    """The message for `declined`."""
    return REASONS[declined.code].format_map(declined.data)
