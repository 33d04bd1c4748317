"""Check that every reason for declining a kernel or a pass has a message with exactly its values, and is used."""

import ast
from collections.abc import Iterator
from pathlib import Path
from string import Formatter

from mycli.cli.reasons import REASONS, reason
from mycli.runtime.errors import Declined
from tests.support.sources import name, sources, tree


def declined(path: Path) -> Iterator[tuple[str, set[str], int]]:
    """Yield code, names of the values and line of every `Declined(...)` in a module; all must be literals."""
    for node in ast.walk(tree(path)):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Declined"):
            continue
        code, *data = node.args
        where = f"{name(path)}:{node.lineno}"
        assert isinstance(code, ast.Constant) and isinstance(code.value, str) and not node.keywords, where
        values = data[0] if data else ast.Dict([], [])
        assert isinstance(values, ast.Dict), where
        keys = [key.value for key in values.keys if isinstance(key, ast.Constant)]
        assert len(keys) == len(values.keys), where
        yield code.value, {str(key) for key in keys}, node.lineno


def test_every_reason_has_a_message_with_its_values_and_every_message_is_used() -> None:
    used = set()
    for path in sources():
        for code, keys, line in declined(path):
            assert code in REASONS, f"{name(path)}:{line}: {code} has no message in cli/reasons.py"
            fields = {field for _, field, _, _ in Formatter().parse(REASONS[code]) if field}
            assert fields == keys, f"{name(path)}:{line}: {code}"
            used.add(code)
    assert used == set(REASONS)


def test_a_reason_inside_a_reason_is_worded() -> None:
    compile_error = Declined("compiler-failed", {"compiler": "g++", "error": "out of memory"})
    library = Declined("no-native-library", {"compile": compile_error, "prebuilt": Declined("no-prebuilt-library")})
    assert reason(library) == (
        "compiling failed: g++ failed: out of memory; prebuilt: the installation contains no prebuilt library"
    )
