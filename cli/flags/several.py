"""Options of a server for several models, and keys of config.toml as words of a command line."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

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


def setting_words(settings: dict[str, Any]) -> list[str]:
    """Return the keys and values of a table of config.toml as words of a command line."""
    words: list[str] = []
    for key, value in settings.items():
        flag = "--" + key.replace("_", "-")
        for item in value if isinstance(value, list) else [value]:
            words += [] if item is False else [flag] if item is True else [flag, str(item)]
    return words
