"""config.toml: defaults of options, below flags and environment variables, and presets.

    device = "cpu"            # top level: every command that has the option
    [chat]                    # one command
    ctx = "8k"
    [preset.pirate]           # a name for a model with settings: `mycli chat pirate` is `mycli chat pico --system ...`
    model = "pico"
    system = "You are a pirate."
    [models.coder]            # a model of a server for several: `mycli serve` serves all
    model = "Qwen/Qwen3-8B"   # default: the name of the table
    ctx = "16k"               # options of `mycli serve` that concern one model; also pin and idle

The file is $XDG_CONFIG_HOME/mycli/config.toml. The parser checks the values.
"""

import os
import tomllib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mycli.runtime.errors import NotFoundError, UsageError
from mycli.runtime.utils.files import read_input

MAX_SETTINGS_BYTES = 1 << 20
PRESETS = "preset"  # the table that holds a table for each preset
MODEL = "model"  # the key of a preset that names the model
SERVED = "models"  # the table that holds a table for each model of a server for several
Keys = Callable[[str], Mapping[str, str]]  # the options of a command: key of config.toml -> parameter
Presets = Mapping[str, Mapping[str, Any]]


def config_path(environment: Mapping[str, str] = os.environ) -> Path:
    base = environment.get("XDG_CONFIG_HOME", "")
    # The XDG specification says to ignore a relative path.
    return Path(base if os.path.isabs(base) else os.path.expanduser("~/.config")) / "mycli" / "config.toml"


def option_key(spellings: Sequence[str]) -> str:
    """Return the key of an option, in capitals also its environment variable: top_p for `--top-p`, n for `-n`."""
    return max(spellings, key=len).lstrip("-").replace("-", "_")


def _parse(path: Path, hint: str) -> dict[str, Any]:
    try:
        return tomllib.loads(read_input(path, MAX_SETTINGS_BYTES).decode())
    except NotFoundError:
        return {}
    except UsageError as error:
        raise UsageError(error.message, hint) from None
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: not UTF-8 at byte {error.start}", hint) from None
    except ValueError as error:
        raise UsageError(f"{path}: {error}", hint) from None


def _is_option(key: str, command: str, commands: Collection[str], keys: Keys) -> bool:
    # `keys` of another command imports that command, so the called one is looked at first.
    return key in keys(command) or any(key in keys(other) for other in commands)


def _command_tables(values: Mapping[str, Any], commands: Collection[str]) -> Iterator[tuple[str, Any]]:
    # [bench.serve] is the table of `bench serve`, as ["bench serve"] is.
    for name, value in values.items():
        inner = {key for key in value if f"{name} {key}" in commands} if isinstance(value, dict) else set()
        yield from ((f"{name} {key}", value[key]) for key in inner)
        rest = {key: value[key] for key in value if key not in inner} if inner else value
        if rest or not inner:
            yield name, rest


def read_settings(path: Path, command: str, commands: Collection[str], keys: Keys) -> dict[str, Any]:
    """Return the defaults of `command` by parameter. Raises UsageError naming the file and the key at fault."""
    hint = f"edit {path}; mycli COMMAND --help lists the options"
    values = _parse(path, hint)
    if not values:
        return {}
    parameters = keys(command)
    general: dict[str, Any] = {}
    special: dict[str, Any] = {}
    for name, value in _command_tables(values, commands):
        key = name.replace("-", "_")
        if name in (PRESETS, SERVED):
            continue
        if isinstance(value, dict):
            if name not in commands:
                raise UsageError(f"{path}: [{name}] is not a command", hint)
            if name == command:
                special = value
        elif key in parameters:
            general[parameters[key]] = value
        elif not _is_option(key, command, commands, keys):
            raise UsageError(f"{path}: {name} is not an option of any command", hint)
    for name, value in special.items():
        key = name.replace("-", "_")
        if key not in parameters:
            raise UsageError(f"{path}: [{command}] {name} is not an option of that command", hint)
        general[parameters[key]] = value
    return general


def read_presets(path: Path, command: str, commands: Collection[str], keys: Keys) -> Presets:
    """Return the presets. Raises UsageError naming the file and the field at fault."""
    hint = f'edit {path}; a preset is [preset.NAME] with model = "..." and options'
    presets = _parse(path, f"edit {path}").get(PRESETS, {})
    if not isinstance(presets, dict) or not all(isinstance(preset, dict) for preset in presets.values()):
        raise UsageError(f"{path}: {PRESETS} must hold tables", hint)
    for name, preset in presets.items():
        if not isinstance(preset.get(MODEL), str) or preset[MODEL] == name:
            raise UsageError(f"{path}: [{PRESETS}.{name}] names no model", hint)
        for key in preset:
            if key != MODEL and not _is_option(key.replace("-", "_"), command, commands, keys):
                raise UsageError(f"{path}: [{PRESETS}.{name}] {key} is not an option of any command", hint)
    return presets


def read_served_models(path: Path, keys: Collection[str]) -> Mapping[str, dict[str, Any]]:
    """Return the tables of the models to serve, with keys of `keys`. Raises UsageError naming the file and the key."""
    hint = f"edit {path}; a model is [{SERVED}.NAME] with options of mycli serve"
    tables = _parse(path, f"edit {path}").get(SERVED, {})
    if not isinstance(tables, dict) or not all(isinstance(table, dict) for table in tables.values()):
        raise UsageError(f"{path}: {SERVED} must hold tables", hint)
    models = {name: {key.replace("-", "_"): value for key, value in table.items()} for name, table in tables.items()}
    for name, table in models.items():
        for key, value in table.items():
            if key not in keys:
                raise UsageError(f"{path}: [{SERVED}.{name}] {key} is not an option of one model", hint)
            if isinstance(value, dict):
                raise UsageError(f"{path}: [{SERVED}.{name}] {key} must be a value", hint)
    return models


def apply_preset(
    arguments: list[str], presets: Presets, model_of: Callable[[list[str]], str | None]
) -> tuple[list[str], Mapping[str, Any]]:
    """Replace the preset that a command line names by its model; return it with the preset's other settings."""
    name = model_of(arguments)
    if name is None or name not in presets:
        return arguments, {}
    preset = presets[name]
    # The word to replace is the one whose replacement changes MODEL: a prompt may be spelled like the preset.
    for index, word in enumerate(arguments):
        replaced = [*arguments[:index], preset[MODEL], *arguments[index + 1 :]]
        if word == name and model_of(replaced) == preset[MODEL]:
            return replaced, {key: value for key, value in preset.items() if key != MODEL}
    return arguments, {}


def preset_names(path: Path) -> list[str]:
    """Return the names of presets for shell completion; none if the file is invalid."""
    try:
        presets = _parse(path, "").get(PRESETS)
    except UsageError:
        return []
    return list(presets) if isinstance(presets, dict) else []
