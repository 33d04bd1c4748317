"""Presets: a name of one's own for a model with its settings, as a table of config.toml.

    [preset.pirate]
    model = "pico"
    system = "You are a pirate."
    temperature = 0.9

`mycli chat pirate` is then `mycli chat pico` with these options, as far as the command has them; what is typed counts
more. Knows the command line before it is parsed. Does not know what the options mean.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mycli.runtime.errors import UsageError

TABLE = "preset"  # of config.toml; each table in it is one
MODEL = "model"  # its field that names the model


def apply_preset(
    arguments: list[str],
    presets: Mapping[str, Mapping[str, Any]],
    model_of: Callable[[list[str]], str | None],
) -> tuple[list[str], Mapping[str, Any]]:
    """The command line with the model in place of the preset that it names, and the preset's settings.

    `model_of` says what a command line gives as MODEL. A prompt that is spelled like a preset stays a prompt.
    """
    name = model_of(arguments)
    if name is None or name not in presets:
        return arguments, {}
    preset = presets[name]
    for index, word in enumerate(arguments):
        replaced = [*arguments[:index], preset[MODEL], *arguments[index + 1 :]]
        if word == name and model_of(replaced) == preset[MODEL]:
            return replaced, {key: value for key, value in preset.items() if key != MODEL}
    return arguments, {}


def check_presets(path: Path, table: Any, is_option: Callable[[str], bool]) -> Mapping[str, Mapping[str, Any]]:
    """The presets of config.toml. Raises UsageError naming the file and the field that cannot be."""
    hint = f'edit {path}; a preset is [preset.NAME] with model = "..." and options'
    if not isinstance(table, dict) or not all(isinstance(one, dict) for one in table.values()):
        raise UsageError(f"{path}: {TABLE} must hold tables", hint)
    for name, preset in table.items():
        if not isinstance(preset.get(MODEL), str) or preset[MODEL] == name:
            raise UsageError(f"{path}: [{TABLE}.{name}] does not say which model", hint)
        unknown = next((key for key in preset if key != MODEL and not is_option(key.replace("-", "_"))), None)
        if unknown is not None:
            raise UsageError(f"{path}: [{TABLE}.{name}] {unknown} is not an option of any command", hint)
    return table
