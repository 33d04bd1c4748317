"""Options that several commands share, with one name, help and check; counts accept 32k and 1M, memory 24GiB."""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from typing import Annotated, Any, TypeVar, get_type_hints

import typer

from mycli.runtime.errors import UsageError

Choice = TypeVar("Choice", bound=str)
NO_LIMIT = -1  # tokens of a reply: as many as the context has room for
KEY_VARIABLE = "MYCLI_API_KEY"  # the API key of a server, read by the server and by bench serve
_SECONDS = {"": 1.0, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_FACTORS = {"": 1, "k": 1 << 10, "m": 1 << 20}
# A letter without B is binary, as in llama.cpp, Docker and systemd: 24G is 24GiB.
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
    """Parse 4096, 4k (4,096) or 1M (1,048,576). Raises typer.BadParameter."""
    match = re.fullmatch(r"([0-9]+)\s*([kKmM]?)", str(text).strip())
    if match and len(match[1]) > 12:
        raise typer.BadParameter(f"{text!r:.40} is too large")
    if not match:
        raise typer.BadParameter(f"{text!r} is not a count such as 4096, 32k or 1M")
    return int(match[1]) * _FACTORS[match[2].lower()]


def parse_limit(text: str) -> int:
    """Parse a count, or -1 for no limit, as in llama.cpp. Raises typer.BadParameter."""
    return NO_LIMIT if str(text).strip() == str(NO_LIMIT) else parse_count(text)


def parse_memory(text: str) -> int:
    """Parse 24GiB (or 24G) and 24GB (24 x 10^9) into bytes. Raises typer.BadParameter for 0 and a missing unit."""
    match = re.fullmatch(r"([0-9]{1,12}(?:\.[0-9]{1,6})?)\s*([a-zA-Z]*)", str(text).strip())
    if match and not match[2]:
        raise typer.BadParameter(f"{text!r} has no unit: write {match[1]}GiB or {match[1]}MiB")
    if not match or match[2].lower() not in _MEMORY:
        raise typer.BadParameter(f"{text!r} is not a memory size such as 24GiB or 800MiB")
    size = int(float(match[1]) * _MEMORY[match[2].lower()])
    if not size:
        raise typer.BadParameter(f"{text!r} must be above zero")
    return size


def parse_duration(text: str) -> float:
    """Parse 30s, 500ms, 2m and 1h into seconds; a number alone is seconds. Raises typer.BadParameter."""
    match = re.fullmatch(r"([0-9]{1,6}(?:\.[0-9]{1,6})?)\s*([a-z]*)", str(text).strip())
    if not match or match[2] not in _SECONDS:
        raise typer.BadParameter(f"{text!r} is not a time such as 30s or 2m")
    seconds = float(match[1]) * _SECONDS[match[2]]
    if not 0 < seconds <= _SECONDS["d"]:
        raise typer.BadParameter(f"{text!r} must be above zero and at most a day")
    return seconds


def parse_counts(flag: str, text: str) -> tuple[int, ...]:
    """Parse `512,1k`, the value of `flag`. Raises UsageError."""
    try:
        return tuple(parse_count(part) for part in text.split(","))
    except typer.BadParameter as error:
        raise UsageError(f"{flag} {text}: {error.message}", "separate counts with commas") from None


def choice(flag: str, value: str, allowed: Sequence[Choice]) -> Choice:
    """Return `value` as one of `allowed`. Raises UsageError."""
    for allowed_value in allowed:
        if value == allowed_value:
            return allowed_value
    raise UsageError(f"{flag} {value} is not supported", f"{flag} takes: {', '.join(allowed)}")


def parse_biases(texts: Sequence[str]) -> tuple[tuple[int, float], ...]:
    """Parse `["17=-100", ...]` into (token id, bias). Raises UsageError."""
    biases = []
    for text in texts:
        token, _, bias = text.partition("=")
        try:
            biases.append((int(token), float(bias)))
        except ValueError:
            raise UsageError(f"--logit-bias {text}: not TOKEN_ID=NUMBER", "for example: --logit-bias 17=-100") from None
    return tuple(biases)


def complete_model(incomplete: str) -> list[str]:
    """Return the presets and the models on this machine whose names begin with `incomplete`."""
    from mycli.cli.flags.config_file import config_path, preset_names
    from mycli.runtime.hub.store import local_model_names

    return [name for name in (*preset_names(config_path()), *local_model_names()) if name.startswith(incomplete)]


def complete_word(*words: str) -> Callable[[str], list[str]]:
    return lambda incomplete: [word for word in words if word.startswith(incomplete)]


def option(flags: str, metavar: str, text: str, **settings: Any) -> Any:
    """Return an option with the spellings `flags`, separated by spaces, and the help `text`."""
    return typer.Option(*flags.split(), metavar=metavar, help=text, **settings)


def flag(flags: str, text: str, **settings: Any) -> Any:
    return typer.Option(*flags.split(), help=text, **settings)


def words(flags: str, allowed: Sequence[str], text: str, **settings: Any) -> Any:
    """Return an option that takes one of `allowed`; its help and shell completion show them."""
    metavar = settings.pop("metavar", "|".join(allowed))
    return option(flags, metavar, text, autocompletion=complete_word(*allowed), **settings)


def count(flags: str, text: str, **settings: Any) -> Any:
    return option(flags, "N", text, parser=parse_count, **settings)


def limit(flags: str, text: str, **settings: Any) -> Any:
    return option(flags, "N", text, parser=parse_limit, **settings)


def size(flags: str, text: str, **settings: Any) -> Any:
    return option(flags, "SIZE", text, parser=parse_memory, **settings)


def time_span(flags: str, text: str, **settings: Any) -> Any:
    return option(flags, "TIME", text, parser=parse_duration, **settings)


def argument(metavar: str, text: str, complete: Callable[[str], list[str]] | None = None) -> Any:
    return typer.Argument(metavar=metavar, help=text, show_default=False, autocompletion=complete)


def _given(record: Any) -> Iterator[tuple[str, Any, Any]]:
    # The flag, the declaration and the value of each option of a record that differs from its default.
    hints = get_type_hints(type(record), include_extras=True)
    for entry in fields(record):
        value = getattr(record, entry.name)
        if value != entry.default and value is not None:
            declared = hints[entry.name].__metadata__[0]
            # Inside Annotated, typer takes the first spelling for the default until it builds the parser.
            names = (declared.default, *declared.param_decls)
            yield max((name for name in names if isinstance(name, str)), key=len), declared, value


def given_options(record: Any) -> list[str]:
    """Return the flags of the options of a record that differ from their defaults."""
    return [name for name, _, _ in _given(record)]


def option_words(record: Any) -> list[str]:
    """Return the options of a record that differ from their defaults, as words of a command line."""
    words: list[str] = []
    for name, declared, value in _given(record):
        for item in value if isinstance(value, list) else [value]:
            words += [name] if item is True else [name, f"{item}B" if declared.parser is parse_memory else str(item)]
    return words


_MODEL = (
    "A name that mycli list shows, org/repo[@revision] on the hub or its URL, a folder, a .gguf file, or a preset of "
    "config.toml."
)
Model = Annotated[str, argument("MODEL", _MODEL, complete_model)]
HubModel = Annotated[
    str,
    argument("MODEL", "org/repo[@revision] on the hub, its URL, or a file: org/repo:file.gguf.", complete_model),
]
OptionalModel = Annotated[str, argument("MODEL", _MODEL, complete_model)]
Models = Annotated[list[str], argument("MODEL", "One or more models.", complete_model)]
ServedModels = Annotated[
    list[str] | None,
    argument("MODEL", "One model, or several that are loaded on request.", complete_model),
]
DraftName = Annotated[str, argument("DRAFT", "A small model of the same vocabulary.", complete_model)]
Device = Annotated[
    str,
    option("--device", "auto|cuda[:N]|cpu", "Device to run on.", autocompletion=complete_word("auto", "cuda", "cpu")),
]
Threads = Annotated[
    int | None, option("--threads", "N", "Number of CPU threads.", min=1, max=1024, show_default="all cores")
]
Context = Annotated[int | None, count("-c --ctx", "Context length in tokens, such as 8k.", show_default="what fits")]
System = Annotated[str | None, option("--system", "TEXT", "System prompt.")]
Escapes = Annotated[bool, flag("--escapes", "Pass control characters of the reply to the terminal.")]
Precision = Annotated[str, words("--dtype", ("auto", "bf16", "fp16", "fp32"), "Precision of activations.")]
CacheKind = Annotated[
    str, words("--kv", ("auto", "bf16", "int8", "int4"), "Data type of the KV cache; auto: that of activations.")
]
ActivationKind = Annotated[
    str,
    words(
        "--activations",
        ("auto", "8", "16"),
        "Bits of activations next to packed weights on a CPU; auto: 8 where card or measurement allow it.",
    ),
]
PortableBits = Annotated[
    bool,
    flag(
        "--portable-bits",
        "On a CPU: compute the same bits as every CPU with fused multiply-add; dense models run slower.",
    ),
]
Shadow = Annotated[bool, flag("--shadow", "On a GPU: keep a 16-bit copy of packed weights, for faster prompts.")]
Fp8Prompts = Annotated[
    bool,
    flag("--fp8-prompts", "On a GPU: keep an 8-bit float copy of packed weights; prompts are faster and less exact."),
]
Draft = Annotated[
    str,
    option(
        "--draft",
        "MODEL|ngram|mtp|none",
        "Speculative decoding: with a small model of the same vocabulary, by n-gram lookup in the text, or with "
        "the model's own MTP head.",
        autocompletion=complete_model,
    ),
]
ExpertMemory = Annotated[
    int | None,
    size(
        "--expert-memory",
        "On the CPU: memory limit for MoE experts; the rest is read from disk on demand.",
        show_default="what fits",
    ),
]
AdapterName = Annotated[
    str | None,
    option("--adapter", "PATH|REPO", "Apply a LoRA adapter (PEFT, mlx-lm, GGUF) to the weights."),
]
