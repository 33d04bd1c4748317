"""Check that planted faults are one token, change the program, and skip what no test should detect."""

from pathlib import Path

import pytest

from tests.support.mutants import Fault, environment_in, faults, files, room_tests, sample

SOURCE = '''"""Sums 1 + 1."""
from typing import TYPE_CHECKING, Protocol

LIMIT: int = 3


class Shape(Protocol):
    def size(self) -> int:
        return 1 + 1


def total(values: "list[int] | None", start: int = 0) -> int:
    """Add 2 < 3."""
    assert start >= 0
    if values is None or not values:
        raise ValueError(f"{start + 1} and " + "nothing")
    if TYPE_CHECKING and LIMIT > 4:
        return 5
    return max(start, -sum(values)) if min(values) < LIMIT else -start
'''


def test_each_kind_of_fault_is_found_where_it_counts(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(SOURCE)
    found = [(fault.line, fault.old, fault.new) for fault in faults("a.py", tmp_path)]
    assert sorted(found) == [
        (4, "3", "4"),
        (12, "0", "1"),
        (15, "is", "is not"),
        (15, "not ", ""),
        (15, "or", "and"),
        (19, "-", ""),
        (19, "-", ""),
        (19, "<", "<="),
        (19, "max", "min"),
        (19, "min", "max"),
    ]


def test_a_fault_changes_one_place_of_one_line() -> None:
    fault = Fault("a.py", 2, 7, "<", "<=")
    assert fault.applied("é = 1\nx = é < 2\n") == "é = 1\nx = é <= 2\n"


def test_tests_run_in_another_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault in the choice of a folder does not reach the user's; the compiled kernels are there."""
    kernels = tmp_path / "cache" / "mycli" / "kernels"
    kernels.mkdir(parents=True)
    (kernels / "library.so").write_text("code")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    environment = environment_in(tmp_path / "home")
    assert environment["HOME"] == str(tmp_path / "home")
    assert not [name for name in environment if name.startswith(("HF_", "XDG_"))]
    assert (tmp_path / "home" / ".cache" / "mycli" / "kernels" / "library.so").read_text() == "code"


def test_a_sample_is_repeatable_and_has_tests() -> None:
    first, again = (sample(["runtime/tokenizer/parsing"], 5, seed=1) for _ in range(2))
    assert first == again and len({(fault.path, fault.line) for fault in first}) == 5
    for fault in first:
        near, far, _ = room_tests(fault.path)
        assert near or far
    assert sum(1 for _ in files([])) > 200


def test_tests_of_a_file_are_its_room_and_what_lies_above_or_names_it_elsewhere(tmp_path: Path) -> None:
    texts = {
        "runtime/server/routes/test_chat.py": "",
        "runtime/server/routes/test_other.py": "",
        "runtime/server/test_agents.py": "",
        "runtime/server/http/test_body.py": "",
        "runtime/hub/test_names.py": "from mycli.runtime.server.routes.chat_log import lines\n",
        "runtime/server/test_routes_chat.py": "",
        "runtime/server/test_pages.py": "from mycli.runtime.server.routes import (\n    body,\n    chat,\n)\n",
        "runtime/kernels/test_tables.py": "",
        "quant/test_recipe.py": "from mycli.runtime.server.routes.chat import route\n",
        "gpu/test_models.py": "from mycli.runtime.server.routes.chat import route\n",
        "quant/test_export.py": "",
    }
    for name, text in texts.items():
        (tmp_path / "tests" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "tests" / name).write_text(text)
    near, far, outer = room_tests("runtime/server/routes/chat.py", tmp_path)
    assert near == [
        "tests/runtime/server/routes/test_chat.py",
        "tests/runtime/server/test_routes_chat.py",
        "tests/runtime/server/test_pages.py",
    ]
    assert far == ["tests/runtime/server/routes/test_other.py"]
    assert outer == [
        "tests/runtime/server/test_agents.py",
        "tests/runtime/server/http/test_body.py",
        "tests/quant/test_recipe.py",
    ]
