"""Explains mistakes on the command line: the value at fault, and our command or option for those of other programs."""

import os
import re
import shlex
from collections.abc import Iterable, Sequence
from typing import Any

from mycli.cli.flags.config_file import config_path, option_key
from mycli.cli.flags.spellings import FOREIGN_OPTIONS, argument_usage, usage_line
from mycli.runtime.errors import UsageError

# Commands of other programs (ollama, llama.cpp, hf) -> ours.
FOREIGN_COMMANDS = {
    "ask": "mycli run",
    "benchmark": "mycli bench",
    "convert": "mycli export",
    "cp": "mycli list --json prints the folder of each model: copy the folder",
    "create": "mycli quantize, or a preset in config.toml",
    "delete": "mycli rm",
    "download": "mycli pull",
    "fuse": "mycli export MODEL --adapter ADAPTER --to safetensors",
    "generate": "mycli run",
    "get": "mycli pull",
    "info": "mycli show",
    "kill": "mycli stop",
    "load": "mycli serve MODEL; requests name the model",
    "ls": "mycli list",
    "perplexity": "mycli eval",
    "ppl": "mycli eval",
    "push": "hf upload NAME FOLDER; mycli list --json prints the folder of each model",
    "remove": "mycli rm",
    "server": "mycli serve",
    "start": "mycli serve",
    "status": "mycli ps",
    "unload": "mycli stop",
    "upload": "hf upload NAME FOLDER; mycli list --json prints the folder of each model",
    "version": "mycli --version",
}
_SAMPLING = (
    *("--temperature", "--temp", "--top-k", "--top-p", "--min-p", "--seed", "--greedy", "--stop"),
    *("--repetition-penalty", "--repeat-penalty", "--presence-penalty", "--frequency-penalty", "--logit-bias"),
)
_BY_REQUEST = "omit it: requests state it; the defaults are those of the model's generation_config.json"
# Options of other programs whose meaning differs by command -> what to type here.
OPTIONS_OF_COMMANDS = {
    ("estimate", "--bits"): "--quant int4-g128, or another scheme",
    ("eval", "-f"): "--text FILE",
    ("eval", "--file"): "--text FILE",
    ("quantize", "-b"): "--bits N",
    ("quantize", "--outtype"): "--bits TYPE",
    ("quantize", "--quantize"): "--bits TYPE, such as q4_k_m",
    ("rm", "-f"): "--yes",
    ("rm", "--force"): "--yes",
    ("show", "--modelfile"): "--template prints the chat template",
    **{("serve", option): _BY_REQUEST for option in _SAMPLING},
    **{("serve", option): "omit it: requests state max_tokens" for option in ("-n", "--max-tokens", "--n-predict")},
}
_BENCH_SERVE = ("--clients", "--rate", "--requests", "--shared", "--plot", "--slo")
# Hints for arguments that a command does not take.
_EXTRA_ARGUMENTS = {
    "chat": "chat takes no prompt; mycli run MODEL PROMPT answers one",
    "compare": "prompts are lines of a file: mycli compare A B --prompts FILE.jsonl",
    "export": "mycli export MODEL --to gguf -o FILE.gguf",
    "pull": "a file of a repository is part of its name: mycli pull org/name:file.gguf",
    "quantize": "type and file are options: mycli quantize MODEL --bits q4_k_m -o FILE.gguf",
    "run": "put a prompt of several words in quotes",
}
# Sentences of the parser about a value -> ours, which follow the name of the option.
_SENTENCES = (
    (r"input should be a valid number.*", ": not a number"),
    (r"input should be a valid integer.*", ": not a whole number"),
    (r"input should be a valid boolean.*", ": not true or false"),
    (r"value must be an iterable", ': not a list such as ["a", "b"]'),
    (r"input should be greater than or equal to (\S+)", r" must be at least \1"),
    (r"input should be less than or equal to (\S+)", r" must be at most \1"),
    (r"input should be greater than (\S+)", r" must be above \1"),
    (r"input should be less than (\S+)", r" must be below \1"),
)


def explain_mistake(error: Any, name: str | None, words: Sequence[str]) -> UsageError:
    """Return the UsageError for an exception of the parser.

    `name` is the command in `words`, the command line, if one was recognised.
    """
    if name is None and words and (mistake := _missing_command(words[0])):
        return mistake
    context: Any = getattr(error, "ctx", None)
    option: Any = getattr(error, "param", None)
    hint = f"{context.command_path if context else f'mycli {name}' if name else 'mycli'} --help"
    sentence = str(error.format_message())
    if option is not None and error.message:  # about a value
        source = getattr(context.get_parameter_source(option.name), "name", "")
        if source == "ENVIRONMENT":
            place = next(variable for variable in option.envvar if os.environ.get(variable))
        elif source == "DEFAULT_MAP":
            place = f"{config_path()}: {option_key(option.opts)}"
        else:
            place = " / ".join(option.opts) if option.param_type_name == "option" else option.name.upper()
        return UsageError(place + _value_problem(error.message, option), hint)
    if (match := re.match(r"No such command '(\S+)'", sentence)) and match[1] in FOREIGN_COMMANDS:
        return UsageError(f"no such command '{match[1]}'", FOREIGN_COMMANDS[match[1]])
    if match := re.match(r"No such option: (\S+)", sentence):
        return _unknown_option(match[1].rstrip("."), context.command if context else None, hint, name)
    if match := re.match(r"(?is)got unexpected extra arguments?(?:\(s\))? \((.*)\)", sentence):
        arguments = [parameter for parameter in context.command.params if parameter.param_type_name == "argument"]
        usage = " ".join(map(argument_usage, arguments))
        message = f"unexpected {match[1]!r}; {name} takes {usage or 'no arguments'}"
        return UsageError(message, _EXTRA_ARGUMENTS.get(name or "", hint))
    if sentence.startswith("Missing"):
        hint = f"for example: {_example(context.command)}; {hint}"
    return UsageError(_lowered(sentence), hint)


def _missing_command(word: str) -> UsageError | None:
    # `mycli -m MODEL` and `mycli -hf MODEL`, as of llama.cpp, and `mycli MODEL`.
    if word.startswith("-"):
        option = word.partition("=")[0]
        usage = FOREIGN_OPTIONS.get(option, "").format(usage="mycli chat MODEL")
        return UsageError(f"no such option: {option}", usage) if usage else None
    from mycli.cli.flags.options import complete_model

    if word.endswith(".gguf") or "/" in word or word in complete_model(word):
        return UsageError(f"no such command {word!r}", f"to chat with a model: mycli chat {shlex.quote(word)}")
    return None


def _example(command: Any) -> str:
    return str(command.epilog).partition("\b\n")[2].partition("\n")[0].partition("  #")[0]


def _lowered(sentence: str) -> str:
    sentence = sentence.rstrip(".")
    return sentence[:1].lower() + sentence[1:]


def _value_problem(sentence: str, option: Any) -> str:
    sentence = sentence.rstrip(".")
    for pattern, ours in _SENTENCES:
        if match := re.fullmatch(pattern, sentence, re.IGNORECASE | re.DOTALL):
            low, high = getattr(option, "min", None), getattr(option, "max", None)
            if "must be" in ours and low is not None and high is not None:
                return f" must be {low} to {high}"
            return match.expand(ours)
    return f": {_lowered(sentence)}"


def _unknown_option(word: str, command: Any, hint: str, name: str | None) -> UsageError:
    if ours := OPTIONS_OF_COMMANDS.get((name or "", word)):
        return UsageError(f"no such option: {word}", ours)
    if word in FOREIGN_OPTIONS and command and name:
        return UsageError(f"no such option: {word}", FOREIGN_OPTIONS[word].format(usage=usage_line(command, name)))
    if word in _BENCH_SERVE and command.name == "bench":
        return UsageError(f"no such option: {word}", f"mycli bench serve MODEL {word}")
    options = [option for option in command.params if not getattr(option, "hidden", False)] if command else []
    similar = closest_option(word, (spelling for option in options for spelling in option.opts if spelling[0] == "-"))
    return UsageError(f"no such option: {word}{f'; did you mean {similar}?' if similar else ''}", hint)


def closest_option(word: str, known: Iterable[str]) -> str:
    """Return the option that `word` abbreviates or misspells; "" if there is none."""
    import difflib

    spelled, known = word.replace("_", "-"), sorted(known)
    longer = [option for option in known if len(spelled) > 3 and option.startswith(spelled)]
    return next(iter(longer or difflib.get_close_matches(spelled, known, 1, 0.75)), "")
