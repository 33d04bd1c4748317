"""config.toml: defaults for options, below flags and environment variables.

    device = "cpu"            # top level: every command that has the option
    [chat]                    # one command
    ctx = "8k"

The file is $XDG_CONFIG_HOME/mycli/config.toml. Knows TOML and names of options; the parser checks the values.
"""

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mycli.runtime.errors import UsageError


def config_path(environment: Mapping[str, str] = os.environ) -> Path:
    """Where config.toml is looked for."""
    base = environment.get("XDG_CONFIG_HOME") or str(Path.home() / ".config")
    return Path(base) / "mycli" / "config.toml"


def read_settings(path: Path, options: Mapping[str, frozenset[str]]) -> dict[str, dict[str, Any]]:
    """Defaults by command and parameter. `options` holds the parameters of each command that may be set.

    Raises UsageError naming the file and the key for TOML that is not, and for a command or option that does not exist.
    """
    hint = f"edit {path}; mycli COMMAND --help lists the options"
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
        raise UsageError(f"{path}: {error}", hint) from None
    defaults: dict[str, dict[str, Any]] = {command: {} for command in options}
    for key, value in values.items():
        if isinstance(value, dict):
            if key not in options:
                raise UsageError(f"{path}: [{key}] is not a command", hint)
            for name, inner in value.items():
                parameter = name.replace("-", "_")
                if parameter not in options[key]:
                    raise UsageError(f"{path}: [{key}] {name} is not an option of that command", hint)
                defaults[key][parameter] = inner
            continue
        parameter = key.replace("-", "_")
        having = [command for command, names in options.items() if parameter in names]
        if not having:
            raise UsageError(f"{path}: {key} is not an option of any command", hint)
        for command in having:
            defaults[command].setdefault(parameter, value)
    return defaults
