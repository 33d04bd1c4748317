"""config.toml: defaults for options, below flags and environment variables.

    device = "cpu"            # top level: every command that has the option
    [chat]                    # one command
    ctx = "8k"
    [preset.pirate]           # a model with its settings, see `cli.flags.presets`

The file is $XDG_CONFIG_HOME/mycli/config.toml. Knows TOML and names of options; the parser checks the values.
"""

import os
import tomllib
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from mycli.cli.flags.presets import TABLE, check_presets
from mycli.runtime.errors import NotFoundError, UsageError
from mycli.runtime.utils.files import read_input

MAX_SETTINGS_BYTES = 1 << 20


def config_path(environment: Mapping[str, str] = os.environ) -> Path:
    """Where config.toml is looked for. A relative XDG_CONFIG_HOME does not count, as its specification says."""
    base = environment.get("XDG_CONFIG_HOME", "")
    return Path(base if os.path.isabs(base) else os.path.expanduser("~/.config")) / "mycli" / "config.toml"


def option_key(spellings: Sequence[str]) -> str:
    """An option's name in config.toml and, in capitals, in the environment: `--top-p` is top_p, `-n` is n."""
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


def read_settings(
    path: Path, command: str, commands: Collection[str], keys: Callable[[str], Mapping[str, str]]
) -> dict[str, Any]:
    """Defaults of `command` by parameter.

    `keys(name)` gives the options of a command as key -> parameter. It is called for another command only where a key
    at the top is no option of this one, because it imports that command.
    Raises UsageError naming the file and the key for TOML that is not, and for a command or option that does not exist.
    """
    hint = f"edit {path}; mycli COMMAND --help lists the options"
    values = _parse(path, hint)
    if not values:
        return {}
    parameters = keys(command)
    general: dict[str, Any] = {}
    special: dict[str, Any] = {}
    for name, value in values.items():
        key = name.replace("-", "_")
        if name == TABLE:
            continue
        if isinstance(value, dict):
            if name not in commands:
                raise UsageError(f"{path}: [{name}] is not a command", hint)
            if name == command:
                special = value
        elif key in parameters:
            general[parameters[key]] = value
        elif not any(key in keys(other) for other in commands):
            raise UsageError(f"{path}: {name} is not an option of any command", hint)
    for name, value in special.items():
        key = name.replace("-", "_")
        if key not in parameters:
            raise UsageError(f"{path}: [{command}] {name} is not an option of that command", hint)
        general[parameters[key]] = value
    return general


def read_presets(
    path: Path, command: str, commands: Collection[str], keys: Callable[[str], Mapping[str, str]]
) -> Mapping[str, Mapping[str, Any]]:
    """The presets of the file, with `keys` as for `read_settings`. Raises UsageError for one that cannot be."""
    table = _parse(path, f"edit {path}").get(TABLE)
    if table is None:
        return {}
    own = keys(command)
    return check_presets(path, table, lambda key: key in own or any(key in keys(other) for other in commands))


def preset_names(path: Path) -> list[str]:
    """For completion: none where the file is not as it should be."""
    try:
        table = _parse(path, "").get(TABLE)
    except UsageError:
        return []
    return list(table) if isinstance(table, dict) else []
