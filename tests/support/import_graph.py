"""Computes the import graph of the product by file and by room: `python -m tests.support.import_graph` prints both.

A room is a folder of `runtime/`, or a file next to the folders; its floor is one above the highest room that it
imports. Uses only the syntax tree. An import inside a function counts. One under TYPE_CHECKING counts among files,
because a reader still needs both files, but not among rooms, where it only names a type.
"""

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.support.sources import name, sources, tree

Graph = Mapping[str, set[str]]


def _imports(node: ast.AST, type_checking: bool) -> Iterator[str]:
    """Yield dotted names of the product's modules, or of names in them, that `node` imports."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and isinstance(child.test, ast.Name) and child.test.id == "TYPE_CHECKING":
            if not type_checking:
                continue
        elif isinstance(child, ast.ImportFrom):
            yield from (f"{child.module}.{alias.name}" for alias in child.names)
        elif isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names)
        yield from _imports(child, type_checking)


def _module(path: Path) -> str:
    parts = Path(name(path)).with_suffix("").parts
    return ".".join(("mycli", *(parts[:-1] if parts[-1] == "__init__" else parts)))


def file_graph(type_checking: bool = True) -> dict[str, set[str]]:
    modules = {_module(path): name(path) for path in sources()}
    graph: dict[str, set[str]] = {}
    for path in sources():
        targets = graph.setdefault(name(path), set())
        for imported in _imports(tree(path), type_checking):
            # `from package import module` and `from module import name` look alike.
            module = imported if imported in modules else imported.rpartition(".")[0]
            if module in modules and modules[module] != name(path):
                targets.add(modules[module])
    return graph


def circles(graph: Graph) -> list[list[str]]:
    """Return groups of nodes that reach each other (Tarjan's strongly connected components of two or more)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    groups: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for target in sorted(graph[node]):
            if target not in index:
                visit(target)
                low[node] = min(low[node], low[target])
            elif target in stack:
                low[node] = min(low[node], index[target])
        if low[node] == index[node]:
            group = stack[stack.index(node) :]
            del stack[-len(group) :]
            if len(group) > 1:
                groups.append(sorted(group))

    for node in sorted(graph):
        if node not in index:
            visit(node)
    return sorted(groups)


def room_graph() -> dict[str, set[str]]:
    graph: dict[str, set[str]] = {}
    for file, imported in file_graph(type_checking=False).items():
        room = _room(file)
        if room is not None:
            targets = {target for target in map(_room, imported) if target is not None}
            graph.setdefault(room, set()).update(targets - {room})
    return graph


def _room(file: str) -> str | None:
    parts = Path(file).with_suffix("").parts
    return parts[1] if parts[0] == "runtime" and parts[1] != "__init__" else None


def floors(graph: Graph) -> list[list[str]]:
    """Return the rooms by floor, the lowest first. Raises ValueError naming the rooms of a cycle."""
    remaining = {room: set(targets) for room, targets in graph.items()}
    levels: list[list[str]] = []
    while remaining:
        level = sorted(room for room, targets in remaining.items() if not targets & remaining.keys())
        if not level:
            raise ValueError(
                "a circle among " + ", ".join(f"{r} -> {sorted(t & remaining.keys())}" for r, t in remaining.items())
            )
        levels.append(level)
        for room in level:
            del remaining[room]
    return levels


def main() -> None:
    files, rooms = file_graph(), room_graph()
    for number, names in reversed(list(enumerate(floors(rooms)))):
        print(f"{number}: {', '.join(names)}")
    print(f"{len(rooms)} rooms, {len(floors(rooms))} floors, {sum(map(len, rooms.values()))} arrows, no circle")
    print(f"{len(files)} files, {sum(map(len, files.values()))} arrows, {len(circles(files))} circles")
    for group in circles(files):
        print("  " + ", ".join(group))


if __name__ == "__main__":
    main()
