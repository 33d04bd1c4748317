"""What a person can do about an error, in the words of the command line: one line for each code.

An error raised below `cli/` says what happened and names its remedy by a code; flags and commands are spelled here
alone. Knows every code; a test holds the table against the codes that are raised.
"""

from collections.abc import Mapping

from mycli.runtime.errors import UserError

# code -> what to do; the fields in braces are the error's data
REMEDIES: Mapping[str, str] = {
    "pull-again": "download the model again: mycli pull MODEL",
}


def remedy(error: UserError) -> str:
    """The line of what to do: the words of the error's code, or the error's own. "" where nothing can be done."""
    return REMEDIES[error.code].format_map(error.data) if error.code else error.hint
