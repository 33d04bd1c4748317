"""The table of commands, and the start of the program. A new command is one file and one line here.

Only the module of the command that is called is imported, so that help and light commands start at once.
"""

import importlib
import os
import sys
from importlib import metadata
from typing import Annotated, Any

import typer

from mycli.cli.command import guarded
from mycli.cli.output import Output
from mycli.cli.settings import config_path, read_settings
from mycli.runtime.errors import ExitCode

# name -> (file and function, one line for the list of commands), in the order a newcomer needs them
COMMANDS = {
    "chat": ("chat", "Talk with a model in the terminal."),
    "run": ("run", "Answer one prompt and exit; made for pipes."),
    "quantize": ("quantize", "Make a smaller copy of a model, and measure what it lost."),
    "eval": ("evaluate", "Score a model on a text, alone or against another."),
    "estimate": ("estimate", "Say how much memory a model takes and whether it fits."),
    "pull": ("pull", "Fetch a model from the Hugging Face hub."),
    "list": ("list_models", "List the models on this machine."),
    "show": ("show", "Say what a model is, without loading it."),
    "verify": ("verify", "Check the files of a model byte by byte."),
    "rm": ("rm", "Delete a stored model."),
    "bench": ("bench", "Measure how fast a model is."),
    "doctor": ("doctor", "Check that everything works on this machine."),
}


def version() -> str:
    """Of the installed distribution; a checkout that runs from its links is not installed."""
    try:
        return metadata.version("mycli-llm")
    except metadata.PackageNotFoundError:
        return "0+checkout"


def _print_version(wanted: bool) -> None:
    if wanted:
        Output().result(f"mycli {version()}")
        raise typer.Exit


Version = Annotated[bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")]


def _main(version: Version = False) -> None:
    """Quantize language models and run them on this machine.

    Start with the model that is built in:  mycli chat pico
    """


def _load(name: str) -> tuple[Any, str]:
    module = importlib.import_module(f"mycli.cli.commands.{COMMANDS[name][0]}")
    return getattr(module, COMMANDS[name][0]), "Examples:\n\n\b\n" + "\n".join(module.EXAMPLES)


def build(selected: frozenset[str]) -> typer.Typer:
    """The program with the commands of `selected` ready to run and only names and summaries of the others."""
    app = typer.Typer(
        add_completion=True,
        no_args_is_help=True,
        rich_markup_mode=None,  # plain help: it is read in pipes and narrow terminals, and starts faster
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"], "auto_envvar_prefix": "MYCLI"},
    )
    app.callback()(_main)
    for name, (_, summary) in COMMANDS.items():
        function, epilog = _load(name) if name in selected else ((lambda: None), "")
        app.command(name, short_help=summary, epilog=epilog or None)(function)
    return app


def program(selected: frozenset[str]) -> Any:
    """`build` as the parser runs it, without the environment variable beside every option: the docs give the rule."""
    group: Any = typer.main.get_command(build(selected))
    for command in (group, *group.commands.values()):
        for parameter in command.params:
            parameter.show_envvar = False
    return group


def option_names(name: str) -> frozenset[str]:
    """Parameters of a command that config.toml may set: its options, not its arguments."""
    command = program(frozenset({name})).commands[name]
    return frozenset(p.name for p in command.params if p.param_type_name == "option" and p.name != "help")


def _run(arguments: list[str]) -> None:
    completing = "_MYCLI_COMPLETE" in os.environ
    named = next((word for word in arguments if not word.startswith("-")), "")
    selected = frozenset(COMMANDS) if completing else frozenset({named} & COMMANDS.keys())
    path = config_path()
    defaults = read_settings(path, {name: option_names(name) for name in COMMANDS}) if path.exists() else {}
    program(selected).main(arguments, prog_name="mycli", default_map=defaults)


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit with its code."""
    if arguments is None:
        arguments = sys.argv[1:]
    code = ExitCode.OK

    def run() -> None:
        nonlocal code
        try:
            _run(arguments)
        except SystemExit as stop:  # Typer ends every call this way; usage errors with 2
            code = ExitCode(stop.code) if isinstance(stop.code, int) else ExitCode.OK

    problem = guarded(Output(json_mode="--json" in arguments, debug="--debug" in arguments), run)
    sys.exit(problem or code)
