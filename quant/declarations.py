"""Reads what the files of a package declare without importing them: the help must not wait seconds for torch."""

import ast
import pkgutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def file_names(paths: Iterable[str]) -> list[str]:
    """The public modules of a package's `__path__`, sorted."""
    return sorted(module.name for module in pkgutil.iter_modules(paths) if not module.name.startswith("_"))


def declared(paths: Iterable[str], module: str, name: str) -> dict[str, Any]:
    """The keyword arguments of the call assigned to `name` in a module; each must be a Python literal.

    Raises ValueError if the module has no such assignment.
    """
    file = next(path for folder in paths if (path := Path(folder, f"{module}.py")).is_file())
    for node in ast.parse(file.read_bytes()).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and ast.unparse(node.targets[0]) == name:
            return {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in node.value.keywords}
    raise ValueError(f"{file}: no assignment {name} = ...(...)")
