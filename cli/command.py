"""What every command has in common: the global options, and how anything that goes wrong becomes an exit code.

A command is a function `command(call, ...)` decorated with `@command`; it returns normally or raises a `UserError`.
"""

import errno
import inspect
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import MISSING, dataclass, fields, is_dataclass
from typing import Annotated, Any, get_type_hints

import typer

from mycli.cli import options
from mycli.cli.output import Output
from mycli.runtime.errors import ExitCode, ModelError, ResourceError, UserError
from mycli.runtime.utils.version import version


@dataclass(frozen=True)
class Call:
    """How a command was called: its printer and the options that every command has."""

    out: Output
    offline: bool


class Terminated(BaseException):
    """SIGTERM or SIGHUP, raised in the main thread so that temporary files are removed on the way out."""


MAX_SHOWN_PATH = 200  # characters of a path in an error, so that the cause behind it is seen
_RESOURCES = {errno.ENOSPC, errno.EDQUOT, errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.EFBIG}
_STOPS: dict[type[BaseException], ExitCode] = {
    KeyboardInterrupt: ExitCode.INTERRUPT,
    Terminated: ExitCode.TERMINATED,
    BrokenPipeError: ExitCode.PIPE,  # nobody reads any more: nothing to say, and nobody to say it to
}


def print_version(wanted: bool) -> None:
    """Callback of --version."""
    if wanted:
        Output().result(f"mycli {version()}")
        raise typer.Exit


# Every command takes these two, so that an alias such as `mycli --device cpu` works; the help of those that run a model
# shows --device.
_Version = Annotated[bool, typer.Option("--version", callback=print_version, is_eager=True, hidden=True)]
_Device = Annotated[str, typer.Option("--device", hidden=True)]


def _common(
    json: options.Json = False,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
    debug: options.Debug = False,
    offline: options.Offline = False,
    version: _Version = False,
    device: _Device = "auto",
) -> Call:
    return Call(Output(json_mode=json, quiet=quiet, verbose=verbose, debug=debug), offline)


def _out_of_memory(error: Exception) -> bool:
    """Of Python or of torch, which is not imported here; for memory of the CPU it has no exception of its own."""
    return (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        or (isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error))
    )


def explain(error: Exception) -> UserError | None:
    """The line to show for `error`; None for a bug."""
    if isinstance(error, UserError):
        return error
    if _out_of_memory(error):
        return ResourceError("not enough memory", "mycli estimate MODEL says what it needs")
    if type(error).__name__ == "AcceleratorError":  # of torch: a failed assertion, a lost device; the rest fails
        cause = next(iter(str(error).splitlines()), "")
        return ResourceError(f"the GPU failed: {cause}", "start again; mycli doctor says whether the GPU is well")
    if not isinstance(error, OSError):
        return None
    name = str(error.filename) if error.filename else ""
    where = "" if not name else f"{name}: " if len(name) <= MAX_SHOWN_PATH else f"…{name[-MAX_SHOWN_PATH:]}: "
    kind = ResourceError if error.errno in _RESOURCES else ModelError
    return kind(f"{where}{error.strerror or error}", "check the path, its permissions and the free space")


def guarded(out: Output, action: Callable[[], None]) -> ExitCode:
    """Run `action` and say what went wrong, if something did, as one line and an exit code."""
    try:
        action()
        out.flush()
        return ExitCode.OK
    except tuple(_STOPS) as stop:
        return next(code for kind, code in _STOPS.items() if isinstance(stop, kind))
    except Exception as error:  # the one place where anything may arrive: a bug still ends in one line
        problem = explain(error)
        with suppress(OSError):  # stderr may be closed, the code still counts
            if problem is None:
                out.bug(error)
            else:
                out.error(problem, error)
        return ExitCode.BUG if problem is None else problem.exit_code
    finally:
        out.release()


def _on_signal(number: int, frame: object) -> None:
    signal.signal(number, signal.SIG_DFL)  # a second one does not wait for the cleaning up
    raise Terminated


def _listen() -> None:
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
            signal.signal(number, _on_signal)


def _options(function: Callable[..., Any]) -> tuple[dict[str, inspect.Parameter], dict[str, Any]]:
    """The options of `function(call, ...)` by name, and those parameters that are records of several, with their kinds.

    A record is a frozen dataclass whose fields are annotated as options are.
    """
    expanded: dict[str, inspect.Parameter] = {}
    records: dict[str, Any] = {}
    hints = get_type_hints(function, include_extras=True)
    for parameter in list(inspect.signature(function).parameters.values())[1:]:
        kind = hints[parameter.name]
        if not is_dataclass(kind):
            parts = [parameter.replace(annotation=kind)]
        else:
            records[parameter.name] = kind
            inner = get_type_hints(kind, include_extras=True)
            parts = [
                inspect.Parameter(
                    field.name,
                    inspect.Parameter.KEYWORD_ONLY,
                    default=inspect.Parameter.empty if field.default is MISSING else field.default,
                    annotation=inner[field.name],
                )
                for field in fields(kind)
            ]
        expanded |= {part.name: part.replace(kind=inspect.Parameter.KEYWORD_ONLY) for part in parts}
    return expanded, records


def command(function: Callable[..., None]) -> Callable[..., None]:
    """Give `function(call, ...)` the global options and the error handling; what Typer registers."""
    own, records = _options(function)
    names = list(inspect.signature(function).parameters)[1:]
    common_hints = get_type_hints(_common, include_extras=True)
    common = {
        name: parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=common_hints[name])
        for name, parameter in inspect.signature(_common).parameters.items()
    }

    def argument(name: str, values: dict[str, Any]) -> Any:
        record = records.get(name)
        return values[name] if record is None else record(**{one.name: values[one.name] for one in fields(record)})

    def invoke(**values: Any) -> None:
        call = _common(**{name: values[name] for name in common})
        _listen()
        sys.exit(guarded(call.out, lambda: function(call, **{name: argument(name, values) for name in names})))

    shown = {**own, **{name: parameter for name, parameter in common.items() if name not in own}}
    invoke.__signature__ = inspect.Signature(list(shown.values()))  # type: ignore[attr-defined]  # what inspect.signature reads
    invoke.__annotations__ = {name: parameter.annotation for name, parameter in shown.items()}
    invoke.__doc__ = function.__doc__
    return invoke
