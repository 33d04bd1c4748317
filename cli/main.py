"""The table of commands, and the start of the program. A new command is one file and one line here.

Only the module of the command that is called is imported, so that help and light commands start at once.
"""

import importlib
import os
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer

from mycli.cli.command import guarded, print_version
from mycli.cli.flags.config_file import config_path, option_key, read_presets, read_settings
from mycli.cli.flags.presets import apply_preset
from mycli.cli.mistakes import as_typed, foreign_command, foreign_option, meant_option, too_many, with_message
from mycli.cli.output import Output
from mycli.cli.text.streams import prepare_streams
from mycli.runtime.errors import ExitCode, UsageError

# name -> (file and function, one line for the list of commands), in the order a newcomer needs them
COMMANDS: Mapping[str, tuple[str, str]] = {
    "chat": ("chat", "Talk with a model in the terminal."),
    "run": ("run", "Answer one prompt and exit; made for pipes."),
    "serve": ("serve", "Serve a model over HTTP, with a page to talk with it."),
    "quantize": ("quantize", "Make a smaller copy of a model, and measure what it lost."),
    "eval": ("evaluate", "Score a model on a text, alone or against another."),
    "estimate": ("estimate", "Say how much memory a model takes and whether it fits."),
    "export": ("export", "Write a model in another program's layout."),
    "search": ("search", "Find models on the Hugging Face hub."),
    "pull": ("pull", "Fetch a model from the Hugging Face hub."),
    "list": ("list_models", "List the models on this machine."),
    "show": ("show", "Say what a model is, without loading it."),
    "verify": ("verify", "Check the files of a model byte by byte."),
    "rm": ("rm", "Delete stored models."),
    "bench": ("bench", "Measure how fast a model is."),
    "spec check": ("spec_check", "Say whether one model can draft for another."),
    "spec verify": ("spec_verify", "Test that a draft changes nothing but the speed."),
    "doctor": ("doctor", "Check that everything works on this machine."),
}
# What may also stand before the name of a command.
GLOBAL = ("--json", "-q", "--quiet", "-v", "--verbose", "--debug", "--offline", "--device", "--threads")
# torch's OpenMP sleeps at once after each product, and waking it takes as long as a small product: wait first, but only
# for some 50 microseconds. Whoever waits longer takes the core that a thread with work needs, where another program has
# one of them: a reply was twenty times slower with a millisecond. OpenMP reads this as it is loaded.
SPINS = "5000"
GROUPS = {"spec": "Check that a small model can draft for a larger one."}  # first words of commands of two

Version = Annotated[bool, typer.Option("--version", callback=print_version, is_eager=True, help="Print the version.")]


def _main(version: Version = False) -> None:
    """Quantize language models and run them on this machine.

    Start with the model that is built in:  mycli chat pico
    """


def _load(name: str) -> tuple[Any, str]:
    module = importlib.import_module(f"mycli.cli.commands.{COMMANDS[name][0]}")
    return getattr(module, COMMANDS[name][0]), "Examples:\n\n\b\n" + "\n".join(module.EXAMPLES)


def build(selected: frozenset[str]) -> typer.Typer:
    """The program with the commands of `selected` ready to run and only names and summaries of the others."""
    settings: dict[str, Any] = {
        "no_args_is_help": True,
        "rich_markup_mode": None,  # plain help: it is read in pipes and narrow terminals, and starts faster
        "pretty_exceptions_enable": False,
        "context_settings": {"help_option_names": ["-h", "--help"]},
    }
    app = typer.Typer(add_completion=True, **settings)
    app.callback()(_main)
    groups = {"": app, **{name: typer.Typer(**settings) for name in GROUPS}}
    for name, (_, summary) in COMMANDS.items():
        function, epilog = _load(name) if name in selected else ((lambda: None), "")
        first, _, last = name.rpartition(" ")
        groups[first].command(last, short_help=summary, epilog=epilog or None)(function)
    for name, summary in GROUPS.items():
        app.add_typer(groups[name], name=name, help=summary)
    return app


def find_command(program: Any, name: str) -> Any:
    """The parser's command of that name in `program`."""
    for word in name.split():
        program = program.commands[word]
    return program


def _options(command: Any) -> list[Any]:
    return [p for p in command.params if p.param_type_name == "option" and p.name not in ("help", "version")]


def program(selected: frozenset[str]) -> Any:
    """`build` as the parser runs it.

    Every option also listens to MYCLI_COMMAND_OPTION and MYCLI_OPTION, as config.toml has a table for each command and
    keys at the top; the docs give the rule once, the help of an option does not repeat it.
    """
    group: Any = typer.main.get_command(build(selected))
    for name in COMMANDS:
        command = find_command(group, name)
        for option in _options(command):
            key = option_key(option.opts).upper()
            foreign = [option.envvar] if isinstance(option.envvar, str) else option.envvar or []
            option.envvar = [f"MYCLI_{name.upper().replace(' ', '_')}_{key}", f"MYCLI_{key}", *foreign]
        for parameter in command.params:
            parameter.show_envvar = False
    return group


def option_keys(name: str) -> dict[str, str]:
    """What config.toml may set of a command: the name of an option as it is typed -> the parameter."""
    command = find_command(program(frozenset({name})), name)
    return {option_key(option.opts): option.name for option in _options(command)}


def _model(name: str, arguments: Sequence[str]) -> str | None:
    """What a command line of the command `name` gives as MODEL."""
    parser = find_command(program(frozenset({name})), name)
    context = parser.make_context(name, list(arguments[name.count(" ") + 1 :]), resilient_parsing=True)
    found = context.params.get("model")
    return found if isinstance(found, str) else None


def _mistake(error: Any, command: str | None) -> UsageError:
    """A mistake that Typer found, in our words: where the value came from, what is wrong, whose help to read."""
    context: Any = getattr(error, "ctx", None)
    option: Any = getattr(error, "param", None)
    hint = f"{context.command_path if context else f'mycli {command}' if command else 'mycli'} --help"
    if option is None or not error.message:  # not about a value that was given
        typed = re.match(r"No such command '(\S+)'", str(error.format_message()))
        if typed and (ours := foreign_command(typed[1])):
            return UsageError(f"no such command '{typed[1]}'", ours)
        if unknown := re.match(r"No such option: (\S+)", str(error.format_message())):
            return _unknown_option(unknown[1].rstrip("."), context.command if context else None, hint)
        said = with_message(str(error.format_message()))
        return UsageError(said, (said.startswith("unexpected: ") and too_many(command or "")) or hint)
    source = getattr(context.get_parameter_source(option.name), "name", "")
    if source == "ENVIRONMENT":
        where = next(name for name in option.envvar if os.environ.get(name))
    elif source == "DEFAULT_MAP":
        where = f"{config_path()}: {option_key(option.opts)}"
    else:
        where = " / ".join(option.opts) if option.param_type_name == "option" else option.name.upper()
    return UsageError(f"{where}: {with_message(error.message)}", hint)


def _unknown_option(word: str, command: Any, hint: str) -> UsageError:
    """An option that `command` does not have: what it is called here, or the one that was meant."""
    if ours := foreign_option(word):
        return UsageError(f"no such option: {word}", ours)
    options = [option for option in command.params if not getattr(option, "hidden", False)] if command else []
    meant = meant_option(word, (spelling for option in options for spelling in option.opts if spelling[0] == "-"))
    return UsageError(f"no such option: {word}{f'; did you mean {meant}?' if meant else ''}", hint)


def reorder(arguments: Sequence[str]) -> list[str]:
    """`mycli --json run pico` as `mycli run --json pico`: the command understands the options that all have."""
    leading: list[str] = []
    rest = list(arguments)
    while rest and rest[0].partition("=")[0] in GLOBAL:
        leading.append(rest.pop(0))
        if leading[-1] in ("--device", "--threads") and rest:
            leading.append(rest.pop(0))
    name = _named(rest)
    if name is None:
        return list(arguments)
    words = name.count(" ") + 1
    return [*rest[:words], *leading, *rest[words:]]


def _named(words: Sequence[str]) -> str | None:
    """The command that a line begins with."""
    return next((name for count in (2, 1) if (name := " ".join(words[:count])) in COMMANDS), None)


def _run(arguments: list[str]) -> ExitCode:
    arguments = reorder(arguments)
    if not arguments or arguments in ([group] for group in GROUPS):
        arguments.append("--help")
    completing = os.environ.get("COMP_WORDS", os.environ.get("_TYPER_COMPLETE_ARGS", ""))
    named = _named(completing.split()[1:] if "_MYCLI_COMPLETE" in os.environ else arguments)
    defaults: dict[str, Any] = {}
    if named and not {"-h", "--help"} & set(arguments):
        defaults = read_settings(config_path(), named, COMMANDS, option_keys)
        presets = read_presets(config_path(), named, COMMANDS, option_keys)
        if presets:
            own = option_keys(named)
            arguments, chosen = apply_preset(arguments, presets, lambda line: _model(named, line))
            settings = {own.get(key.replace("-", "_")): value for key, value in chosen.items()}
            defaults |= {name: value for name, value in settings.items() if name is not None}
        for word in reversed(named.split()):
            defaults = {word: defaults}
    group = program(frozenset({named} if named else ()))
    try:
        result = group.main(arguments, prog_name="mycli", default_map=defaults, standalone_mode=False)
    except typer.TyperException as error:
        raise _mistake(error, named) from error
    except SystemExit as stop:  # every command ends this way, and so does completion
        result = stop.code
    except typer.Abort:  # the end of the input where an answer was expected
        result = ExitCode.INTERRUPT
    return ExitCode(result or 0)


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit with its code."""
    prepare_streams()
    os.environ.setdefault("GOMP_SPINCOUNT", SPINS)
    words = [as_typed(word) for word in sys.argv[1:]] if arguments is None else arguments
    sys.exit(guarded(Output(json_mode="--json" in words, debug="--debug" in words), lambda: _run(words)))
