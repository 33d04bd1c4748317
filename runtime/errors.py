"""Exceptions shown to users, each with an exit code and a remedy.

Remedies that name commands or flags are codes here, worded by `cli.remedies`. Messages may quote hostile files: they
are sanitized (`runtime.utils.sanitize`) where they are printed.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Self


class ExitCode(IntEnum):
    """Exit codes of the process; documented in docs/commands.md."""

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
    """A failure with its cause (`message`) and remedy: either the text `hint`, or `code` with `data`."""

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
        copy = type(self)(message, self.hint, code=self.code, data=self.data)
        copy.model = self.model
        return copy


class UsageError(UserError):
    exit_code = ExitCode.USAGE


class ModelError(UserError):
    exit_code = ExitCode.MODEL


class NotFoundError(UserError):
    exit_code = ExitCode.NOT_FOUND


class ResourceError(UserError):
    exit_code = ExitCode.RESOURCES


class GateError(UserError):
    exit_code = ExitCode.GATE


@dataclass(frozen=True)
class Declined:
    """The reason why a kernel or a pass does not take a piece of work; `cli/reasons.py` words each code."""

    code: str
    data: Mapping[str, object] = field(default_factory=dict)


def summarize_error(error: BaseException) -> str:
    """Return the type and first line of an error and of its first cause, for errors of compilers and drivers."""
    lines = str(error).strip().splitlines()
    text = f"{type(error).__name__}: {lines[0]:.200}" if lines else type(error).__name__
    # Triton says in the causes what it could not compile, and itself only where.
    return text if error.__cause__ is None else f"{text} {summarize_error(_first_cause(error))}"


def _first_cause(error: BaseException) -> BaseException:
    return error if error.__cause__ is None else _first_cause(error.__cause__)
