"""Mistakes on the command line in our words: what is wrong with a value, and which command of ours a foreign one means.

Knows the sentences of the parser, and the verbs of other programs. Does not know options or where a value came from.
"""

import os
import re
from collections.abc import Iterable

# What is typed by those who know another program: how the same is asked for here.
_FOREIGN = {
    "ask": "mycli run",
    "convert": "mycli export",
    "cp": "mycli list, which says where models lie: copy the folder",
    "create": "mycli quantize, or a preset in config.toml",
    "delete": "mycli rm",
    "download": "mycli pull",
    "generate": "mycli run",
    "help": "mycli COMMAND --help",
    "info": "mycli show",
    "ls": "mycli list",
    "perplexity": "mycli eval",
    "ppl": "mycli eval",
    "ps": "no model stays in memory between commands; mycli serve holds one as long as it runs",
    "remove": "mycli rm",
    "server": "mycli serve",
    "stop": "no model stays in memory between commands; mycli serve holds one until Ctrl-C",
    "version": "mycli --version",
}
# And options of other programs, llama.cpp's above all.
_FOREIGN_OPTIONS = {
    "--ctx-size": "--ctx N",
    "--gpu-layers": "--device cuda: a model is on the GPU as a whole",
    "--interactive": "mycli chat MODEL",
    "--max-new-tokens": "-n N",
    "--model": "the model needs no option: mycli run MODEL PROMPT",
    "--n-gpu-layers": "--device cuda: a model is on the GPU as a whole",
    "--n-predict": "-n N",
    "--prompt": "the prompt needs no option: mycli run MODEL PROMPT",
    "--system-prompt": "--system TEXT",
    "-V": "mycli --version",
    "-c": "--ctx N",
    "-i": "mycli chat MODEL",
    "-m": "the model needs no option: mycli run MODEL PROMPT",
    "-p": "the prompt needs no option: mycli run MODEL PROMPT",
    "-s": "--seed N",
}
# What is meant by words that a command has no place for.
_TOO_MANY = {
    "chat": "mycli run MODEL PROMPT answers one prompt; a chat begins without",
    "run": "put a prompt of several words in quotes",
}
# The parser's sentences about values and words, and ours.
_SENTENCES = (
    (r"got unexpected extra arguments?(?:\(s\))? \((.*)\)", r"unexpected: \1"),
    (r"input should be a valid number.*", "not a number"),
    (r"input should be a valid integer.*", "not a whole number"),
    (r"input should be a valid boolean.*", "not true or false"),
    (r"input should be greater than or equal to (\S+)", r"less than \1"),
    (r"input should be less than or equal to (\S+)", r"more than \1"),
    (r"input should be greater than (\S+)", r"not above \1"),
    (r"input should be less than (\S+)", r"not below \1"),
)


def with_message(sentence: str) -> str:
    """The parser's `sentence` without a full stop, in our words where we have any."""
    sentence = sentence.rstrip(".")
    for pattern, ours in _SENTENCES:
        if match := re.fullmatch(pattern, sentence, re.IGNORECASE | re.DOTALL):
            return match.expand(ours)
    return sentence[:1].lower() + sentence[1:]


def foreign_command(word: str) -> str:
    """How what `word` does in another program is asked for here; "" for a word that none has."""
    return _FOREIGN.get(word, "")


def too_many(name: str) -> str:
    """What somebody meant who gave the command `name` more words than it takes; "" where there is no telling."""
    return _TOO_MANY.get(name, "")


def foreign_option(word: str) -> str:
    """How what the option `word` does in another program is asked for here; "" for one that none has."""
    return _FOREIGN_OPTIONS.get(word, "")


def meant_option(word: str, known: Iterable[str]) -> str:
    """The option of `known` that `word` is the beginning of, or a slip of the fingers away from; "" for none."""
    import difflib  # only for an option that is not there

    spelled, known = word.replace("_", "-"), sorted(known)
    begun = [option for option in known if len(spelled) > 3 and option.startswith(spelled)]
    return next(iter(begun or difflib.get_close_matches(spelled, known, 1, 0.75)), "")


def as_typed(word: str) -> str:
    """`word` of a command line as UTF-8, where the locale could not decode what was typed."""
    try:
        word.encode()
    except UnicodeEncodeError:
        return os.fsencode(word).decode("utf-8", "surrogateescape")
    return word
