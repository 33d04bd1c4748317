"""The only exceptions a person ever sees: one line of cause, one line of what to do, an exit code.

Knows the exit codes of the command line. Does not know how an error is printed, and does not clean its text: names in a
message may come from hostile files, so whoever shows it passes it through `runtime.utils.sanitize`.
"""

from enum import IntEnum


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

    `message` names the file or field at fault; `hint` says what to do, as a runnable command where one exists.
    """

    exit_code = ExitCode.BUG

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


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
