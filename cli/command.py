"""What every command has in common: the global options, and how anything that goes wrong becomes an exit code.

A command is a function `command(call, ...)` decorated with `@command`; it returns nothing, or raises a `UserError`. One
that has said all there is to say of a failure returns its exit code.
"""

import errno
import inspect
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from mycli.cli.output import Output
from mycli.cli.remedies import Subject
from mycli.runtime.errors import ExitCode, ModelError, ResourceError, UserError
from mycli.runtime.hub.names import is_hub_name, is_path, normalize_model_name
from mycli.runtime.hub.store import RECORD, data_dir
from mycli.runtime.utils import version


@dataclass(frozen=True)
class Call:
    """How a command was called: its printer and the options that every command has."""

    out: Output
    offline: bool


class Terminated(BaseException):
    """SIGTERM or SIGHUP, raised in the main thread so that temporary files are removed on the way out."""


NAMES = {"model", "models", "draft", "ref"}  # parameters that are names of models
MAX_SHOWN_PATH = 200  # characters of a path in an error, so that the cause behind it is seen
_RESOURCES = {errno.ENOSPC, errno.EDQUOT, errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.EFBIG, errno.EROFS}
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


@dataclass(frozen=True)
class CommonFlags:
    """What every command takes, so that an alias such as `mycli --device cpu` works too.

    The help of the commands that compute shows --device and --threads.
    """

    json: Annotated[bool, typer.Option("--json", help="Print one JSON object (JSON lines for a stream).")] = False
    quiet: Annotated[bool, typer.Option("-q", "--quiet", help="Only the result, warnings and errors.")] = False
    verbose: Annotated[bool, typer.Option("-v", "--verbose", help="Say more about what is done.")] = False
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False
    offline: Annotated[bool, typer.Option("--offline", envvar="HF_HUB_OFFLINE", help="Never use the network.")] = False
    version: Annotated[bool, typer.Option("--version", callback=print_version, is_eager=True, hidden=True)] = False
    device: Annotated[str, typer.Option("--device", hidden=True)] = "auto"
    threads: Annotated[int | None, typer.Option("--threads", min=1, max=1024, hidden=True)] = None

    def resolve(self) -> Call:
        """How the command was called. The number of threads is told to torch, which reads it as it is imported."""
        if self.threads is not None:
            os.environ["OMP_NUM_THREADS"] = str(self.threads)
        return Call(Output(json_mode=self.json, quiet=self.quiet, verbose=self.verbose, debug=self.debug), self.offline)


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
        return ResourceError(f"the GPU failed: {cause}", "start again; mycli doctor checks the GPU")
    if not isinstance(error, OSError):
        return None
    name = str(error.filename) if error.filename else ""
    where = "" if not name else f"{name}: " if len(name) <= MAX_SHOWN_PATH else f"…{name[-MAX_SHOWN_PATH:]}: "
    kind = ResourceError if error.errno in _RESOURCES else ModelError
    return kind(f"{where}{error.strerror or error}", "check the path, its permissions and the free space")


def guarded(out: Output, action: Callable[[], ExitCode | None]) -> ExitCode:
    """The exit code of `action`, success for None; what went wrong, if something did, is said as one line."""
    try:
        code = action()
        out.flush()
        return code or ExitCode.OK
    except tuple(_STOPS) as stop:
        return next(code for kind, code in _STOPS.items() if isinstance(stop, kind))
    except Exception as error:  # the one place where anything may arrive: a bug still ends in one line
        problem = explain(error)
        with suppress(OSError):  # stderr may be closed, the code still counts
            if problem is None:
                out.bug(error)
            else:
                if problem.model:
                    out.subject = subject_of(problem.model)
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


def _expanded(parameter: inspect.Parameter) -> list[inspect.Parameter]:
    """The options that a parameter stands for: itself, or the fields of a record, annotated as options are."""
    record = is_dataclass(parameter.annotation)
    found = inspect.signature(parameter.annotation).parameters.values() if record else (parameter,)
    return [option.replace(kind=inspect.Parameter.KEYWORD_ONLY) for option in found]


def _value(parameter: inspect.Parameter, values: dict[str, Any]) -> Any:
    """What `parameter` is given of the `values` of all options."""
    record = is_dataclass(parameter.annotation)
    if not record:
        return values[parameter.name]
    return parameter.annotation(**{field.name: values[field.name] for field in fields(parameter.annotation)})


def _plain(value: Any) -> Any:
    """The name of a model, or several, without the address around it that a person may have pasted."""
    return (
        [normalize_model_name(one) for one in value]
        if isinstance(value, list)
        else value and normalize_model_name(value)
    )


def subject_of(model: str) -> Subject:
    """What can be said of a model by its name, for the remedies of what goes wrong with it."""
    named = not is_path(model) and "/" not in model and not Path(model).is_dir()
    folder = data_dir() / "models" / model if named else Path(model)
    try:
        recorded = (folder.expanduser() / RECORD).is_file()
    except (OSError, RuntimeError, ValueError):  # a name that cannot be a path, or is of nobody's home
        recorded = False
    return Subject(model, is_hub_name(model) and not Path(model).is_dir(), recorded)


def command(function: Callable[..., ExitCode | None]) -> Callable[..., None]:
    """Give `function(call, ...)` the global options and the error handling; what Typer registers."""
    kinds = get_type_hints(function, include_extras=True)
    own = [one.replace(annotation=kinds[one.name]) for one in list(inspect.signature(function).parameters.values())[1:]]
    common = inspect.Parameter("common", inspect.Parameter.KEYWORD_ONLY, annotation=CommonFlags)
    shown: dict[str, inspect.Parameter] = {}
    for option in (option for parameter in (*own, common) for option in _expanded(parameter)):
        shown.setdefault(option.name, option)

    def invoke(**values: Any) -> None:
        values |= {name: _plain(values[name]) for name in NAMES & values.keys()}
        call = _value(common, values).resolve()
        if isinstance(values.get("model"), str):
            call.out.subject = subject_of(values["model"])
        _listen()
        sys.exit(guarded(call.out, lambda: function(call, **{one.name: _value(one, values) for one in own})))

    invoke.__signature__ = inspect.Signature(list(shown.values()))  # type: ignore[attr-defined]  # what inspect.signature reads
    invoke.__annotations__ = {name: option.annotation for name, option in shown.items()}
    invoke.__doc__ = function.__doc__
    return invoke
