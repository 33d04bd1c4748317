"""Options that several commands share: the same name, help and checks everywhere.

Integers accept 32k and 1M, memory 24GiB. Environment variables and config.toml are Typer's business.
"""

import re
from collections.abc import Callable, Sequence
from typing import Annotated, Any, TypeVar

import typer

from mycli.runtime.errors import UsageError

Choice = TypeVar("Choice", bound=str)
KEY_VARIABLE = "MYCLI_API_KEY"  # of a server, for it and for its clients
_FACTORS = {"": 1, "k": 1 << 10, "m": 1 << 20}
# A letter alone is binary, as for llama.cpp, Docker and systemd.
_MEMORY = {
    **{
        unit: 1 << 10 * power
        for power, letter in enumerate("kmgt", 1)
        for unit in (letter, f"{letter}i", f"{letter}ib")
    },
    **{f"{letter}b": 1000**power for power, letter in enumerate("kmgt", 1)},
    "b": 1,
}


def parse_count(text: str) -> int:
    """`4096`, `4k` (4,096) or `1M` (1,048,576) as an integer. Raises typer.BadParameter."""
    match = re.fullmatch(r"([0-9]+)\s*([kKmM]?)", str(text).strip())
    if match and len(match[1]) > 12:
        raise typer.BadParameter(f"{text!r:.40} is too large")
    if not match:
        raise typer.BadParameter(f"{text!r} is not a count such as 4096, 32k or 1M")
    return int(match[1]) * _FACTORS[match[2].lower()]


def parse_memory(text: str) -> int:
    """`24GiB` (or `24G`) and `24GB` (24 x 10^9) as bytes. Raises typer.BadParameter for 0 and for no unit."""
    match = re.fullmatch(r"([0-9]{1,12}(?:\.[0-9]{1,6})?)\s*([a-zA-Z]*)", str(text).strip())
    if match and not match[2]:
        raise typer.BadParameter(f"{text!r} has no unit: write {match[1]}GiB or {match[1]}MiB")
    if not match or match[2].lower() not in _MEMORY:
        raise typer.BadParameter(f"{text!r} is not an amount of memory such as 24GiB or 800MiB")
    size = int(float(match[1]) * _MEMORY[match[2].lower()])
    if not size:
        raise typer.BadParameter(f"{text!r} is not above zero")
    return size


def parse_counts(flag: str, text: str) -> tuple[int, ...]:
    """`512,1k`, given with `flag`, as integers. Raises UsageError."""
    try:
        return tuple(parse_count(part) for part in text.split(","))
    except typer.BadParameter as error:
        raise UsageError(f"{flag} {text}: {error.message}", "separate counts by commas") from None


def choice(flag: str, value: str, allowed: Sequence[Choice], what: str = "choice") -> Choice:
    """`value` as one of `allowed`. Raises UsageError."""
    found = next((one for one in allowed if one == value), None)
    if found is None:
        raise UsageError(f"{flag} {value}: not a {what}", f"choose from {', '.join(allowed)}")
    return found


def parse_biases(texts: Sequence[str]) -> tuple[tuple[int, float], ...]:
    """`["17=-100", ...]` as (token id, bias). Raises UsageError."""
    found = []
    for text in texts:
        token, _, bias = text.partition("=")
        try:
            found.append((int(token), float(bias)))
        except ValueError:
            raise UsageError(f"--logit-bias {text}: not a token id and a number", "write it as 17=-100") from None
    return tuple(found)


def complete_model(incomplete: str) -> list[str]:
    """Names of the models on this machine, and of presets, that begin like what was typed."""
    from mycli.cli.flags.config_file import config_path, preset_names
    from mycli.runtime.hub.store import local_model_names

    return [name for name in (*preset_names(config_path()), *local_model_names()) if name.startswith(incomplete)]


def complete_word(*words: str) -> Callable[[str], list[str]]:
    """Completion of an option that takes one of `words`."""
    return lambda incomplete: [word for word in words if word.startswith(incomplete)]


def word_option(*flags: str, words: Sequence[str], **settings: Any) -> Any:
    """An option that takes one of `words`, which its help and the shell offer."""
    return typer.Option(*flags, metavar="|".join(words), autocompletion=complete_word(*words), **settings)


def count_option(*flags: str, **settings: Any) -> Any:
    """An option whose value is a count such as 4k."""
    return typer.Option(*flags, parser=parse_count, metavar="N", **settings)


def size_option(*flags: str, **settings: Any) -> Any:
    """An option whose value is an amount of memory such as 24GiB."""
    return typer.Option(*flags, parser=parse_memory, metavar="SIZE", **settings)


Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A name that mycli list shows, org/repo[@revision] of the hub or its address, a folder, a .gguf file, or "
        "a preset of config.toml.",
        show_default=False,
        autocompletion=complete_model,
    ),
]
Models = Annotated[
    list[str],
    typer.Argument(metavar="MODEL", help="One or more models.", show_default=False, autocompletion=complete_model),
]
Device = Annotated[
    str,
    typer.Option(
        "--device",
        metavar="auto|cuda[:N]|cpu",
        help="Where to run.",
        autocompletion=complete_word("auto", "cuda", "cpu"),
    ),
]
Threads = Annotated[
    int | None,
    typer.Option("--threads", min=1, max=1024, metavar="N", help="CPU threads to use.", show_default="all cores"),
]
Context = Annotated[int | None, count_option("--ctx", help="Context in tokens, such as 8k.", show_default="fits")]
System = Annotated[str | None, typer.Option("--system", metavar="TEXT", help="System prompt.")]
Escapes = Annotated[bool, typer.Option("--escapes", help="Show control characters to a terminal as they are.")]
Precision = Annotated[
    str,
    word_option("--dtype", words=("auto", "bf16", "fp16", "fp32"), help="Precision of activations."),
]
CacheKind = Annotated[
    str,
    word_option(
        "--kv",
        words=("auto", "bf16", "int8", "int4"),
        help="How the cache holds keys and values; auto: as activations.",
    ),
]
Shadow = Annotated[
    bool, typer.Option("--shadow", help="On a GPU: keep packed weights in 16 bits too, which makes prompts faster.")
]
Draft = Annotated[
    str,
    typer.Option(
        "--draft",
        metavar="MODEL|ngram|mtp|none",
        help="Guess tokens ahead: a small model of the same vocabulary, a lookup in the text, or the model's own head.",
        autocompletion=complete_model,
    ),
]
ExpertMemory = Annotated[
    int | None,
    size_option(
        "--expert-memory",
        help="On the CPU: hold no more of a mixture's experts, read the others from disk when they are chosen.",
        show_default="what fits",
    ),
]
AdapterName = Annotated[
    str | None,
    typer.Option(
        "--adapter",
        metavar="FOLDER|REPO",
        help="Add a LoRA adapter, in PEFT's layout, to the weights as they are read.",
    ),
]
DraftName = Annotated[
    str,
    typer.Argument(
        metavar="DRAFT",
        help="The small model that is to guess.",
        show_default=False,
        autocompletion=complete_model,
    ),
]
