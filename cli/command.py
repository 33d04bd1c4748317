"""The global options of every command, and the exit code for anything that goes wrong.

A command is a function `command(call, ...)` decorated with `@command`; it returns None or raises a `UserError`. A
command that has already printed its failures returns an exit code.
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

from mycli.cli.flags import options
from mycli.cli.output import Output
from mycli.cli.remedies import Subject
from mycli.runtime.errors import ExitCode, ModelError, ResourceError, UserError
from mycli.runtime.hub.names import GGUF, is_hub_name, is_path, normalize_model_name
from mycli.runtime.hub.store import RECORD, data_dir
from mycli.runtime.utils import version
from mycli.runtime.utils.files import expand_user


@dataclass(frozen=True)
class Call:
    """The printer and the global options of one call of a command."""

    out: Output
    offline: bool


def command_line(*words: str) -> list[str]:
    """Return the command line of a process that runs mycli; Python files of the current folder are not imported."""
    return [sys.executable, "-P", "-m", "mycli.cli", *words]


class Terminated(BaseException):
    """SIGTERM or SIGHUP, raised in the main thread so that temporary files are removed on the way out."""


_OFFLINE = ["HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"]  # both, in this order, as huggingface_hub reads them
NAMES = {"model", "models", "draft", "ref"}  # parameters that are names of models
MAX_SHOWN_PATH = 200  # characters of a path in an error, so that the cause behind it is visible
_RESOURCES = {errno.ENOSPC, errno.EDQUOT, errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.EFBIG, errno.EROFS}
_STOPS: dict[type[BaseException], ExitCode] = {
    KeyboardInterrupt: ExitCode.INTERRUPT,
    Terminated: ExitCode.TERMINATED,
    BrokenPipeError: ExitCode.PIPE,  # ends silently, as other programs in a pipe do
}


def print_version(requested: bool) -> None:
    """Print the version and exit; the callback of --version."""
    if requested:
        Output().result(f"mycli {version()}")
        raise typer.Exit


@dataclass(frozen=True)
class CommonFlags:
    """The options of every command; --device and --threads are hidden in commands that compute nothing.

    All commands accept them, so that a shell alias such as `mycli --device cpu` works.
    """

    json: Annotated[bool, options.flag("--json", "Print one JSON object (JSON lines for a stream).")] = False
    quiet: Annotated[bool, options.flag("-q --quiet", "Print only the result, warnings and errors.")] = False
    verbose: Annotated[bool, options.flag("-v --verbose", "Print more details.")] = False
    debug: Annotated[bool, options.flag("--debug", "Print the traceback of an error.")] = False
    offline: Annotated[bool, options.flag("--offline", "Never use the network.", envvar=_OFFLINE)] = False
    version: Annotated[bool, typer.Option("--version", callback=print_version, is_eager=True, hidden=True)] = False
    device: Annotated[str, typer.Option("--device", hidden=True)] = "auto"
    threads: Annotated[int | None, typer.Option("--threads", min=1, max=1024, hidden=True)] = None

    def resolve(self) -> Call:
        if self.threads is not None:
            os.environ["OMP_NUM_THREADS"] = str(self.threads)  # torch reads it when it is imported
        return Call(Output(json_mode=self.json, quiet=self.quiet, verbose=self.verbose, debug=self.debug), self.offline)


def _is_out_of_memory(error: Exception) -> bool:
    # torch is not imported here, and has no exception of its own for CPU memory.
    return (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        or (isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error))
    )


def explain(error: Exception) -> UserError | None:
    """Return `error` as a UserError with cause and remedy; None for a bug."""
    if isinstance(error, UserError):
        return error
    if _is_out_of_memory(error):
        return ResourceError("not enough memory", "mycli estimate MODEL shows what it needs")
    if type(error).__name__ == "AcceleratorError":  # torch: a failed assertion or a lost device; later calls fail too
        cause = next(iter(str(error).splitlines()), "")
        return ResourceError(f"the GPU failed: {cause}", "start again; mycli doctor checks the GPU")
    if not isinstance(error, OSError):
        return None
    name = str(error.filename) if error.filename else ""
    where = "" if not name else f"{name}: " if len(name) <= MAX_SHOWN_PATH else f"…{name[-MAX_SHOWN_PATH:]}: "
    kind = ResourceError if error.errno in _RESOURCES else ModelError
    return kind(f"{where}{error.strerror or error}", "check the path, its permissions and the free space")


def guarded(out: Output, action: Callable[[], ExitCode | None]) -> ExitCode:
    """Run `action`, print any error, and return the exit code."""
    try:
        code = action()
        out.flush()
        return code or ExitCode.OK
    except tuple(_STOPS) as stop:
        return next(code for kind, code in _STOPS.items() if isinstance(stop, kind))
    except Exception as error:  # the only handler of every exception: a bug ends in one line too
        problem = explain(error)
        with suppress(OSError):  # stderr may be closed; the exit code still counts
            if problem is None:
                out.bug(error)
            else:
                if problem.model:
                    out.subject = subject_of(problem.model)
                out.error(problem, error)
        return ExitCode.BUG if problem is None else problem.exit_code
    finally:
        out.release()


def _imports_torch() -> bool:
    return bool(getattr(getattr(sys.modules.get("torch"), "__spec__", None), "_initializing", False))


def _on_signal(number: int, frame: object) -> None:
    stop = KeyboardInterrupt if number == signal.SIGINT else Terminated
    if _imports_torch():  # its C++ code turns an exception into SIGABRT, or ignores it, until it is imported
        os._exit(_STOPS[stop])
    if stop is Terminated:
        signal.signal(number, signal.SIG_DFL)  # a second signal ends the process without cleaning up
    raise stop


def _handle_signals() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores SIGHUP, `&` in a script SIGINT
            signal.signal(number, _on_signal)


def _options(parameter: inspect.Parameter) -> list[inspect.Parameter]:
    # A parameter annotated with a record of options stands for the record's fields.
    is_record = is_dataclass(parameter.annotation)
    options = inspect.signature(parameter.annotation).parameters.values() if is_record else (parameter,)
    return [option.replace(kind=inspect.Parameter.KEYWORD_ONLY) for option in options]


def _argument(parameter: inspect.Parameter, values: dict[str, Any]) -> Any:
    is_record = is_dataclass(parameter.annotation)
    if not is_record:
        return values[parameter.name]
    return parameter.annotation(**{field.name: values[field.name] for field in fields(parameter.annotation)})


def _normalized(value: Any) -> Any:
    if isinstance(value, list):
        return [normalize_model_name(name) for name in value]
    return value and normalize_model_name(value)


def subject_of(model: str) -> Subject:
    """Return what the hints of errors need to know about a model, from its name and its record on disk."""
    try:
        is_name = not is_path(model) and "/" not in model and not Path(model).is_dir()
        folder = data_dir() / "models" / model if is_name else Path(model)
        recorded = (expand_user(folder) / RECORD).is_file()
    except (OSError, ValueError):  # no valid path
        recorded = False
    fetched = is_hub_name(model) and not Path(model).exists()
    return Subject(model, fetched, recorded, single_file=not fetched and model.endswith(GGUF))


def command(function: Callable[..., ExitCode | None]) -> Callable[..., None]:
    """Return `function(call, ...)` with the global options and error handling, ready to be registered with Typer."""
    annotations = get_type_hints(function, include_extras=True)
    parameters = [
        parameter.replace(annotation=annotations[name])
        for name, parameter in list(inspect.signature(function).parameters.items())[1:]
    ]
    common = inspect.Parameter("common", inspect.Parameter.KEYWORD_ONLY, annotation=CommonFlags)
    options: dict[str, inspect.Parameter] = {}
    for option in (option for parameter in (*parameters, common) for option in _options(parameter)):
        options.setdefault(option.name, option)  # --device of a command replaces the hidden one

    def invoke(**values: Any) -> None:
        values |= {name: _normalized(values[name]) for name in NAMES & values.keys()}
        call = _argument(common, values).resolve()
        if isinstance(values.get("model"), str):
            call.out.subject = subject_of(values["model"])
        _handle_signals()
        arguments = {parameter.name: _argument(parameter, values) for parameter in parameters}
        sys.exit(guarded(call.out, lambda: function(call, **arguments)))

    invoke.__signature__ = inspect.Signature(list(options.values()))  # type: ignore[attr-defined]  # what inspect.signature reads
    invoke.__annotations__ = {name: option.annotation for name, option in options.items()}
    invoke.__doc__ = function.__doc__
    return invoke
