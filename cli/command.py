"""What every command has in common: the global options, and how anything that goes wrong becomes an exit code.

A command is a function `command(call, ...)` decorated with `@command`; it returns normally or raises a `UserError`.
"""

import errno
import inspect
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, get_type_hints

from mycli.cli import options
from mycli.cli.output import Output
from mycli.runtime.errors import ExitCode, ResourceError, UserError


@dataclass(frozen=True)
class Call:
    """How a command was called: its printer and the options that every command has."""

    out: Output
    offline: bool


class Terminated(BaseException):
    """SIGTERM or SIGHUP, raised in the main thread so that temporary files are removed on the way out."""


_RESOURCES = {errno.ENOSPC, errno.EDQUOT, errno.ENOMEM, errno.EMFILE, errno.EFBIG}


def _common(
    json: options.Json = False,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
    debug: options.Debug = False,
    offline: options.Offline = False,
) -> Call:
    return Call(Output(json_mode=json, quiet=quiet, verbose=verbose, debug=debug), offline)


def _from_system(error: OSError) -> UserError:
    where = f"{error.filename}: " if error.filename else ""
    problem = UserError(f"{where}{error.strerror or error}", "check the path, its permissions and the free space")
    problem.exit_code = ExitCode.RESOURCES if error.errno in _RESOURCES else ExitCode.MODEL
    return problem


def guarded(out: Output, action: Callable[[], None]) -> ExitCode:
    """Run `action` and say what went wrong, if something did, as one line and an exit code."""
    try:
        action()
        return out.flush()
    except UserError as error:
        out.error(error)
        return error.exit_code
    except KeyboardInterrupt:
        return ExitCode.INTERRUPT
    except Terminated:
        return ExitCode.TERMINATED
    except BrokenPipeError:
        out.flush()
        return ExitCode.PIPE
    except MemoryError:
        out.error(ResourceError("not enough memory", "mycli estimate MODEL says what it needs"))
        return ExitCode.RESOURCES
    except OSError as error:
        problem = _from_system(error)
        out.error(problem)
        return problem.exit_code
    except Exception as error:  # the one place where anything may arrive: a bug still ends in one line
        out.bug(error)
        return ExitCode.BUG


def _on_signal(number: int, frame: object) -> None:
    raise Terminated


def command(function: Callable[..., None]) -> Callable[..., None]:
    """Give `function(call, ...)` the global options and the error handling; what Typer registers."""
    signature = inspect.signature(function)
    hints = get_type_hints(function, include_extras=True)
    shared = inspect.signature(_common)
    shared_hints = get_type_hints(_common, include_extras=True)

    def invoke(**values: Any) -> None:
        call = _common(**{name: values.pop(name) for name in shared.parameters})
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, _on_signal)
        sys.exit(guarded(call.out, lambda: function(call, **values)))

    own = list(signature.parameters.values())[1:]
    annotated = {**{p.name: hints[p.name] for p in own}, **{name: shared_hints[name] for name in shared.parameters}}
    parameters = [
        p.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=annotated[p.name])
        for p in [*own, *shared.parameters.values()]
    ]
    invoke.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # what inspect.signature reads
    invoke.__annotations__ = annotated
    invoke.__doc__ = function.__doc__
    return invoke
