"""The table of commands and the start of the program; a new command is one file and one line here.

Only the module of the called command is imported, so that help and light commands start fast.
"""

import importlib
import os
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer

from mycli.cli.command import guarded, print_version
from mycli.cli.flags import options
from mycli.cli.flags.config_file import apply_preset, config_path, option_key, read_presets, read_settings
from mycli.cli.flags.spellings import argument_usage, spelling_rule, usage_line
from mycli.cli.output import Output, writing_stdout
from mycli.cli.text.input import prepare_streams
from mycli.runtime.device.system import cpu_quota, usable_cores
from mycli.runtime.errors import ExitCode, ModelError

# name -> (file and function, summary in the list of commands), in the order a new user needs them
COMMANDS: Mapping[str, tuple[str, str]] = {
    "chat": ("chat", "Chat with a model in the terminal."),
    "run": ("run", "Answer one prompt and exit."),
    "replay": ("replay", "Make the reply of a receipt again and compare it token by token."),
    "embed": ("embed", "Compute the vectors of texts with an embedding model."),
    "serve": ("serve", "Serve models over HTTP, with an API and a web page."),
    "launch": ("launch", "Start a coding agent on a served model."),
    "ps": ("ps", "List the servers that run on this machine."),
    "stop": ("stop", "Stop a server, or unload one model of a server for several."),
    "quantize": ("quantize", "Make a smaller copy of a model and measure its quality."),
    "eval": ("evaluate", "Measure the perplexity of a model, or compare two models."),
    "compare": ("compare", "Compare the replies of two models to your prompts."),
    "estimate": ("estimate", "Estimate how much memory a model needs and whether it fits."),
    "choose": ("choose", "Choose the copy of a model that loses least and fits."),
    "export": ("export", "Write a model in the file format of another program."),
    "search": ("search", "Search models on the Hugging Face hub."),
    "pull": ("pull", "Download a model from the Hugging Face hub."),
    "list": ("list_models", "List the models on this machine."),
    "show": ("show", "Show what a model is, without loading it."),
    "verify": (
        "verify",
        "Check a model's files against their recorded hashes, or against another program's reading.",
    ),
    "rm": ("rm", "Delete stored models."),
    "bench": ("bench", "Measure the speed of models; see also bench serve, bench draft."),
    "bench serve": ("bench_serve", "Measure a server under load."),
    "bench draft": ("bench_draft", "Measure how much faster a draft makes a model."),
    "cache why": ("cache_why", "Say why the prompt of one request misses the cache of another."),
    "template check": ("template_check", "Check what a chat template loses, refuses and costs."),
    "spec check": ("spec_check", "Check that a draft has the vocabulary of its target."),
    "spec verify": ("spec_verify", "Test that a draft changes only the speed."),
    "doctor": ("doctor", "Check that everything works on this machine, and show how it runs a model."),
}
GROUPS = {  # first words that are no command
    "cache": "Explain the prefix cache.",
    "template": "Check chat templates.",
    "spec": "Check whether a small model can draft for a larger one.",
}
# Options that may also stand before the name of a command.
GLOBAL = ("--json", "-q", "--quiet", "-v", "--verbose", "--debug", "--offline", "--device", "--threads")
# OpenMP threads by default sleep immediately after each product, and waking them takes as long as a small product; so
# they first spin for about 50 microseconds. Longer spinning takes the core from threads of other programs: with 1 ms a
# reply next to a busy program was 20 times slower. libgomp reads this when it is loaded.
SPINS = "5000"

Version = Annotated[bool, options.flag("--version", "Print the version.", callback=print_version, is_eager=True)]


def _main(version: Version = False) -> None:
    """Quantize language models and run them on this machine.

    Start with the built-in model:  mycli chat pico
    """


def _load(name: str) -> tuple[Any, str]:
    module = importlib.import_module(f"mycli.cli.commands.{COMMANDS[name][0]}")
    return getattr(module, COMMANDS[name][0]), "Examples:\n\n\b\n" + "\n".join(module.EXAMPLES)


def build(selected: str | None) -> typer.Typer:
    """Return the program with the command `selected` ready to run, and only names and summaries of the others."""
    settings: dict[str, Any] = {
        "no_args_is_help": True,
        "rich_markup_mode": None,  # plain help: it is read in pipes and narrow terminals, and starts faster
        "pretty_exceptions_enable": False,
        "context_settings": {"help_option_names": ["-h", "--help"]},
    }
    app = typer.Typer(add_completion=True, **settings)
    app.callback()(_main)
    # The parser has no command that is also a group: `bench` is a group only when `bench serve` or `bench draft` runs.
    names = [name for name in COMMANDS if _group(name) in GROUPS or not _group(name) or name == selected]
    groups = {group: typer.Typer(**settings) for group in dict.fromkeys(map(_group, names)) if group}
    for name in names:
        if name in groups:
            continue
        function, epilog = _load(name) if name == selected else ((lambda: None), "")
        target = groups.get(_group(name), app)
        target.command(name.split()[-1], short_help=COMMANDS[name][1], epilog=epilog or None)(function)
    for group, typer_group in groups.items():
        app.add_typer(typer_group, name=group, help=GROUPS.get(group))
    return app


def _group(name: str) -> str:
    return name.rpartition(" ")[0]


def _options(command: Any) -> list[Any]:
    return [p for p in command.params if p.param_type_name == "option" and p.name not in ("help", "version")]


def _find(parser: Any, name: str) -> Any:
    for word in name.split():
        parser = parser.commands[word]
    return parser


def program(selected: str | None) -> Any:
    """Return the parser of `build`, with environment variables for the options of `selected`.

    Every option also reads MYCLI_COMMAND_OPTION and MYCLI_OPTION, as config.toml has a table for each command and
    keys at the top. The docs give this rule once; the help of an option does not repeat it.
    """
    parser: Any = typer.main.get_command(build(selected))
    if selected is not None:
        command = _find(parser, selected)
        for option in _options(command):
            key = option_key(option.opts).upper()
            foreign = [option.envvar] if isinstance(option.envvar, str) else option.envvar or []
            option.envvar = [f"MYCLI_{selected.upper().replace(' ', '_')}_{key}", f"MYCLI_{key}", *foreign]
        for parameter in command.params:
            parameter.show_envvar = False
            if parameter.param_type_name == "argument":
                _show_plainly(parameter)
        if "_MYCLI_COMPLETE" not in os.environ:  # a shell that completes a line shows no errors
            known = {spelling for option in command.params for spelling in option.opts}
            rule = spelling_rule(known, usage_line(command, selected))
            command.context_settings = {**command.context_settings, "token_normalize_func": rule}
    return parser


def _show_plainly(argument: Any) -> None:
    # By its metavar alone, as an option is: the parser would show {MODEL} in the usage line and MODEL <str> below.
    usage = [argument_usage(argument)]
    argument.get_usage_pieces = lambda context: usage
    argument.display_type_rich = lambda ctx: None


def find_command(name: str) -> Any:
    """Return the parser of one command."""
    return _find(program(name), name)


def option_keys(name: str) -> dict[str, str]:
    """Return the keys of config.toml for a command, each with the parameter that it sets."""
    return {option_key(option.opts): option.name for option in _options(find_command(name))}


def _model_argument(name: str, arguments: Sequence[str]) -> str | None:
    words = list(arguments[name.count(" ") + 1 :])
    parameters = find_command(name).make_context(name, words, resilient_parsing=True).params
    model = parameters.get("model")
    if name == "serve" and len(parameters.get("models") or ()) == 1:
        (model,) = parameters["models"]
    return model if isinstance(model, str) else None


def reorder(arguments: Sequence[str]) -> list[str]:
    """Move global options behind the command: `mycli --json run pico` becomes `mycli run --json pico`."""
    leading: list[str] = []
    rest = list(arguments)
    while rest and (rest[0].partition("=")[0] in GLOBAL or re.fullmatch("-[qv]+", rest[0])):
        leading.append(rest.pop(0))
        if leading[-1] in ("--device", "--threads") and rest:
            leading.append(rest.pop(0))
    name = _command_name(rest)
    if name is None:  # the parser knows these options only behind a command, and would call them unknown
        return rest
    words = name.count(" ") + 1
    return [*rest[:words], *leading, *rest[words:]]


def replace_old_bench(arguments: list[str]) -> list[str]:
    """Return the present spelling of `bench --serve MODEL` and `bench MODEL --draft DRAFT`, both to be removed."""
    if _command_name(arguments) != "bench":
        return arguments
    rest = arguments[1:]
    if "--serve" in rest:
        return ["bench", "serve", *(word for word in rest if word != "--serve")]
    for index, word in enumerate(rest):
        option, equals, draft = word.partition("=")
        if option == "--draft" and (equals or index + 1 < len(rest)):
            end = index + (1 if equals else 2)
            draft = draft if equals else rest[index + 1]
            rest = rest[:index] + rest[end:]
            return ["bench", *rest] if draft == "none" else ["bench", "draft", *rest, draft]
    return arguments


def replace_help(arguments: list[str]) -> list[str]:
    """Return `help COMMAND` as `COMMAND --help`, and `help` as `--help`."""
    return [*arguments[1:], "--help"] if arguments[:1] == ["help"] else arguments


def join_sweep(arguments: list[str]) -> list[str]:
    """Return `--sweep bits=4,3 method=rtn` with its values in one word: the parser takes one value of an option."""
    if "--sweep" not in arguments or _command_name(arguments) != "quantize":
        return arguments
    # A shell user types lists as separate words, as in make; quoting them is the exception.
    start = arguments.index("--sweep") + 1
    end = start
    while end < len(arguments) and re.match(r"[a-z]+=", arguments[end]):
        end += 1
    return [*arguments[:start], " ".join(arguments[start:end]), *arguments[end:]] if end > start else arguments


def _command_name(words: Sequence[str]) -> str | None:
    return next((name for count in (2, 1) if (name := " ".join(words[:count])) in COMMANDS), None)


def _defaults(name: str, arguments: list[str]) -> tuple[list[str], dict[str, Any]]:
    # The model of a preset replaces its name among the arguments; its other settings count as those of config.toml.
    defaults = read_settings(config_path(), name, COMMANDS, option_keys)
    presets = read_presets(config_path(), name, COMMANDS, option_keys)
    if presets:
        parameters = option_keys(name)
        arguments, chosen = apply_preset(arguments, presets, lambda line: _model_argument(name, line))
        settings = {parameters.get(key.replace("-", "_")): value for key, value in chosen.items()}
        defaults |= {parameter: value for parameter, value in settings.items() if parameter is not None}
    for word in reversed(name.split()):
        defaults = {word: defaults}
    return arguments, defaults


def _require_current_folder() -> None:
    # A library that torch loads ends the process without it, and relative paths mean nothing.
    try:
        os.getcwd()
    except FileNotFoundError:
        raise ModelError("the current folder was deleted", "change to a folder that exists: cd") from None


def _run(arguments: list[str]) -> ExitCode:
    arguments = join_sweep(replace_old_bench(replace_help(reorder(arguments))))
    if not arguments or arguments in ([group] for group in GROUPS):
        arguments.append("--help")
    completing = os.environ.get("COMP_WORDS", os.environ.get("_TYPER_COMPLETE_ARGS", ""))
    name = _command_name(completing.split()[1:] if "_MYCLI_COMPLETE" in os.environ else arguments)
    defaults: dict[str, Any] = {}
    if name and not {"-h", "--help"} & set(arguments):
        _require_current_folder()
        arguments, defaults = _defaults(name, arguments)
    parser = program(name)
    try:
        with writing_stdout():  # of a help page; a command handles its own errors
            result = parser.main(arguments, prog_name="mycli", default_map=defaults, standalone_mode=False)
    except typer.TyperException as error:
        from mycli.cli.mistakes import explain_mistake  # tables that only a mistake needs

        raise explain_mistake(error, name, arguments) from error
    except SystemExit as stop:  # every command ends this way, and so does completion
        result = stop.code
    except typer.Abort:  # the end of the input where an answer was expected
        result = ExitCode.INTERRUPT
    if result in list(ExitCode) or not result:
        return ExitCode(result or 0)
    sys.exit(result)  # the code of another program, which the command has started


def decode_argument(word: str) -> str:
    """Return an argument as UTF-8 if the locale could not decode it; otherwise unchanged."""
    try:
        word.encode()
    except UnicodeEncodeError:
        return os.fsencode(word).decode("utf-8", "surrogateescape")
    return word


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit with its code."""
    prepare_streams()
    if os.path.expanduser("~") == "~":  # no HOME, and a user without an entry in the user database: as containers do
        os.environ["HOME"] = "/"
    os.environ.setdefault("GOMP_SPINCOUNT", SPINS)
    # torch starts a thread for each core of the machine. Under a quota of a container's time (docker --cpus=2), all of
    # them are stopped together for most of each period, in the middle of a product that then waits.
    if (quota := cpu_quota()) is not None:
        os.environ.setdefault("OMP_NUM_THREADS", str(usable_cores(quota)))
    words = [decode_argument(word) for word in sys.argv[1:]] if arguments is None else arguments
    sys.exit(guarded(Output(json_mode="--json" in words, debug="--debug" in words), lambda: _run(words)))
