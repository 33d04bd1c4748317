"""The only exceptions a person ever sees: what happened, and what kind of remedy there is, as a code and its data.

Knows the exit codes. Does not know commands or flags: whoever speaks to a person (the command line, a server) words the
remedy of a code. Does not clean its text: names in a message may come from hostile files, so whoever shows it passes it
through `runtime.utils.sanitize`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Self


class ExitCode(IntEnum):
    """What a process of mycli ends with; documented in docs/commands.md."""

    OK = 0
    BUG = 1
    USAGE = 2
    MODEL = 3  # bad or unsupported model or file
    NOT_FOUND = 4  # not found, gated, network
    RESOURCES = 5  # not enough memory, disk or device
    GATE = 6  # a quality or verification gate failed
    INTERRUPT = 130
    PIPE = 141
    TERMINATED = 143


class UserError(Exception):
    """A failure with a cause and a remedy.

    `message` names the file or field at fault. The remedy is `hint`, words that are true wherever the error is shown,
    or `code` with `data`: a name of the remedy, worded by whoever knows how it is asked for here (`cli.remedies`).
    """

    exit_code = ExitCode.BUG

    def __init__(
        self, message: str, hint: str = "", *, code: str = "", data: Mapping[str, object] | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.code = code
        self.data = dict(data or {})
        self.model = ""  # the name of the adapter or draft at fault; "" for the model that the caller asked for

    def with_message(self, message: str) -> Self:
        """The same failure with its remedy, told by `message`: by whoever knows more of where it happened."""
        copy = type(self)(message, self.hint, code=self.code, data=self.data)
        copy.model = self.model
        return copy


class UsageError(UserError):
    """The command line, an option or the prompt asks for something impossible."""

    exit_code = ExitCode.USAGE


class ModelError(UserError):
    """A model or one of its files is bad, or asks for what this program does not do."""

    exit_code = ExitCode.MODEL


class NotFoundError(UserError):
    """A model is not there, not accessible, or the network is down."""

    exit_code = ExitCode.NOT_FOUND


class ResourceError(UserError):
    """Not enough memory, disk or device."""

    exit_code = ExitCode.RESOURCES


class GateError(UserError):
    """The work was done, but its result fails a check that was asked for."""

    exit_code = ExitCode.GATE


@dataclass(frozen=True)
class Declined:
    """The reason why a kernel or a pass does not take a piece of work: a code and its values.

    `cli/reasons.py` holds the message of each code; a test compares the two.
    """

    code: str
    data: Mapping[str, object] = field(default_factory=dict)


def summarize_error(error: BaseException) -> str:
    """The kind of an error and the first line of what it says: for errors of compilers and drivers, of all kinds."""
    said = str(error).strip().splitlines()
    return f"{type(error).__name__}: {said[0]:.200}" if said else type(error).__name__
