"""The rooms of `runtime/` and who imports whom: `python -m tests.support.import_graph` prints the floors.

A room is a folder of `runtime/` (or a file beside them); an arrow is any import, inside functions too, unless only a
type checker reads it. A room stands one floor above the highest that it imports. Knows syntax; imports nothing of ours.
"""

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

RUNTIME = Path(__file__).parents[2] / "runtime"
DATA = "pico"


def _imported(node: ast.AST) -> Iterator[str]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and isinstance(child.test, ast.Name) and child.test.id == "TYPE_CHECKING":
            continue
        if isinstance(child, ast.ImportFrom) and child.module == "mycli.runtime":
            yield from (f"mycli.runtime.{alias.name}" for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            yield child.module or ""
        elif isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names)
        yield from _imported(child)


def arrows() -> dict[str, set[str]]:
    """Each room with the rooms that it imports."""
    found: dict[str, set[str]] = {}
    for path in sorted(RUNTIME.rglob("*.py")):
        parts = path.relative_to(RUNTIME).with_suffix("").parts
        if parts[0] in (DATA, "__init__"):
            continue
        targets = found.setdefault(parts[0], set())
        for name in _imported(ast.parse(path.read_text(encoding="utf-8"))):
            words = name.split(".")
            if words[:2] == ["mycli", "runtime"] and len(words) > 2 and words[2] != parts[0]:
                targets.add(words[2])
    return found


def floors(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """Rooms by floor, the ground first. Raises ValueError naming the rooms that stand in a circle."""
    left = {room: set(targets) for room, targets in graph.items()}
    built: list[list[str]] = []
    while left:
        free = sorted(room for room, targets in left.items() if not targets & left.keys())
        if not free:
            raise ValueError(
                "a circle among " + ", ".join(f"{r} -> {sorted(t & left.keys())}" for r, t in left.items())
            )
        built.append(free)
        for room in free:
            del left[room]
    return built


def main() -> None:
    """Print floors and arrows."""
    graph = arrows()
    for number, rooms in reversed(list(enumerate(floors(graph)))):
        print(f"{number}: {', '.join(rooms)}")
    print(f"{len(graph)} rooms, {len(floors(graph))} floors, {sum(map(len, graph.values()))} arrows, no circle")


if __name__ == "__main__":
    main()
