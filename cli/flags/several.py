"""Options of a server for several models, and options of a record as words of a command line."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, get_type_hints

from mycli.cli.flags import options


@dataclass(frozen=True)
class SeveralModelsFlags:
    """Which models are served, and when they are loaded, as typed."""

    models_dir: Annotated[
        Path | None, options.option("--models-dir", "DIR", "Also serve the models in this folder, loaded on request.")
    ] = None
    idle: Annotated[
        float | None,
        options.time_span("--idle", "Unload a model after this time without requests.", show_default="never"),
    ] = None
    pinned: Annotated[
        list[str] | None,
        options.option("--pin", "MODEL", "Load this model at the start and never unload it; repeatable."),
    ] = None
    manages: Annotated[
        bool,
        options.flag("--manage-models", "Let clients of Ollama's interface pull models, and delete those stored here."),
    ] = False
    memory: Annotated[
        int | None,
        options.size("--memory", "Memory that models may use, all together.", show_default="90% of what is free"),
    ] = None


def option_words(record: Any) -> list[str]:
    """Return the options of a record that differ from their defaults, as words of a command line."""
    words: list[str] = []
    hints = get_type_hints(type(record), include_extras=True)
    for entry in fields(record):
        value = getattr(record, entry.name)
        if value == entry.default or value is None:
            continue
        option = hints[entry.name].__metadata__[0]
        # Inside Annotated, typer takes the first spelling for the default until it builds the parser.
        flag = max((word for word in (option.default, *option.param_decls) if isinstance(word, str)), key=len)
        for item in value if isinstance(value, list) else [value]:
            if item is True:
                words.append(flag)
            else:
                words += [flag, f"{item}B" if option.parser is options.parse_memory else str(item)]
    return words


def setting_words(settings: dict[str, Any]) -> list[str]:
    """Return the keys and values of a table of config.toml as words of a command line."""
    words: list[str] = []
    for key, value in settings.items():
        flag = "--" + key.replace("_", "-")
        for item in value if isinstance(value, list) else [value]:
            words += [] if item is False else [flag] if item is True else [flag, str(item)]
    return words
