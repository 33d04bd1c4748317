"""The structure of the code: import directions, printing, import cost, and the contents of a wheel."""

import ast
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

from tests.support.import_graph import circles, file_graph, floors, room_graph
from tests.support.paths import ROOT
from tests.support.sources import PARTS, name, sources, tree

MAY_IMPORT = {"cli": {"cli", "quant", "runtime"}, "quant": {"quant", "runtime"}, "runtime": {"runtime"}}
PRINTER = "cli/output.py"
# Standard streams that are not used for messages to users.
PIPES = {
    "cli/text/progress.py": "the printer's bar",
    "cli/replies/batch_file.py": "reads prompts from standard input",
    "cli/text/input.py": "reads standard input and the terminal, and opens streams that are closed",
    "runtime/utils/sandbox.py": "the helper process answers its parent in JSON lines",
}
MOST_ROOMS, MOST_FLOORS = 18, 9
# Public names that several modules define on purpose, because one loader reads each from any module of its kind.
SHARED_NAMES = {
    "EXAMPLES",  # help of a command
    "read",  # configs, one family each
    "layer",  # families that declare their own
    "ARCHITECTURE",  # GGUF architectures
    "names",  # registries: formats, solvers, transforms
    "load",
    "spec",  # registries: solvers, transforms
    "read_quantization",  # layouts, this and the following
    "READABLE",
    "IGNORED",
    "UNEXPECTED",
    "tensors",
    "check",
    "read_linear",
    "planned_packing",  # layouts that are written, this and the following
    "planned_tensors",
    "write_weight",
    "write_quantization",
    "export",  # targets, named like the command
    "VARIANTS",
    "SOLVER",  # solvers
    "solve",
    "handler",  # helper processes
    "TYPE",  # ggml types that are written, this and the following
    "encode",
    "WEIGHT_NAMES",  # readers of other programs
}
# Commands that run no model start without these, and their help without tokenizers. A line -> its exit code.
HEAVY = ("torch", "huggingface_hub", "transformers", "triton", "rich", "numpy")
HELPED = ("run", "chat", "pull", "rm", "verify", "quantize", "eval", "bench", "doctor")
LIGHT = {
    **{f"{command} --help".strip(): 0 for command in ("", *HELPED)},
    **{"--version": 0, "nonsense": 2, "list": 0, "show pico": 0, "show pico --json": 0, "estimate pico --table": 0},
    **{"rm pico": 2, "verify pico": 3, "pull pico": 0, "pull org/x": 4},
}


def imports(module: ast.Module) -> Iterator[str]:
    """Yield the full names that a module imports, inside functions too; a relative import starts with a dot."""
    for node in ast.walk(module):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield "." * node.level + (node.module or "")
            yield from (f"{node.module}.{alias.name}" for alias in node.names if not node.level)


def test_imports_point_one_way() -> None:
    for path in sources():
        names = list(imports(tree(path)))
        assert not [imported for imported in names if imported.startswith(".")], f"{name(path)}: imports are absolute"
        assert not [imported for imported in names if imported.split(".")[0] in PARTS], (
            f"{name(path)}: it is called mycli.cli, ..."
        )
        ours = {imported.split(".")[1] for imported in names if imported.startswith("mycli.")}
        assert ours <= MAY_IMPORT[path.relative_to(ROOT).parts[0]], name(path)
        foreign = [
            imported for imported in names if imported.split(".")[0] in ("click", "transformers", "compressed_tensors")
        ]
        assert not foreign, name(path)


def test_every_module_says_what_it_does() -> None:
    assert not [name(path) for path in sources() if not ast.get_docstring(tree(path))]


def test_rooms_of_runtime_form_layers() -> None:
    graph = room_graph()
    assert len(graph) <= MOST_ROOMS and len(floors(graph)) <= MOST_FLOORS


def test_files_form_no_circle() -> None:
    groups = circles(file_graph())
    assert not groups, f"move what both need into the lower file, or into a third: {groups}"


def _public(path: Path) -> set[str]:
    names: set[str] = set()
    for node in tree(path).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names |= {child.id for target in node.targets for child in ast.walk(target) if isinstance(child, ast.Name)}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
    return {public for public in names if not public.startswith("_")}


def test_no_public_name_is_defined_twice() -> None:
    where: dict[str, list[str]] = {}
    for path in sources():
        for public in _public(path) - SHARED_NAMES:
            # A command's module is called through its function of the same name.
            if not (path.parent.name == "commands" and public == path.stem):
                where.setdefault(public, []).append(name(path))
    assert not {public: paths for public, paths in where.items() if len(paths) > 1}


def _speaks(node: ast.AST) -> bool:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("print", "input"):
        return True
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        pair = f"{node.value.id}.{node.attr}"
        return pair in ("sys.stdout", "sys.stderr", "sys.stdin", "typer.echo", "typer.secho", "warnings.warn")
    return isinstance(node, ast.ImportFrom | ast.Import) and any(
        module.startswith("rich") for module in imports_of(node)
    )


def imports_of(node: ast.Import | ast.ImportFrom) -> list[str]:
    return [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]


def test_only_the_printer_speaks() -> None:
    for path in (path for path in sources() if name(path) not in {PRINTER, *PIPES}):
        lines = [node.lineno for node in ast.walk(tree(path)) if _speaks(node)]  # type: ignore[attr-defined]  # all have one
        assert not lines, f"{name(path)}:{lines}: say it through mycli.cli.output.Output"


def test_no_module_keeps_a_growing_state() -> None:
    """A heuristic: no `global`, and no empty container at module level, which only a later write could fill."""
    for path in sources():
        assert not [node for node in ast.walk(tree(path)) if isinstance(node, ast.Global)], name(path)
        for node in tree(path).body:
            value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
            empty = isinstance(value, ast.Dict) and not value.keys or isinstance(value, ast.List) and not value.elts
            assert not empty, f"{name(path)}:{node.lineno}"


def test_light_commands_import_nothing_heavy(environment: dict[str, str]) -> None:
    code = (
        "import sys\n"
        "from mycli.cli.main import main\n"
        f"for line, code in {LIGHT!r}.items():\n"
        "    try:\n"
        "        main(line.split())\n"
        "    except SystemExit as end:\n"
        "        assert end.code == code, (line, end.code)\n"
        f"    heavy = {HEAVY!r} + ('tokenizers',) * line.endswith('--help')\n"
        "    assert not sys.modules.keys() & set(heavy), (line, sys.modules.keys() & set(heavy))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_pyproject_lists_every_package() -> None:
    """A subpackage that is not listed still imports from a checkout, but is missing from the wheel."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        listed = tomllib.load(file)["tool"]["setuptools"]["packages"]
    folders = {"mycli." + path.parent.relative_to(ROOT).as_posix().replace("/", ".") for path in sources()}
    assert set(listed) == folders | {"mycli"} and len(listed) == len(set(listed))


def test_the_wheel_holds_every_file(tmp_path: Path) -> None:
    copy = tmp_path / "source"
    for part in PARTS:
        shutil.copytree(ROOT / part, copy / part, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    (copy / "docs").mkdir()
    for file in ("pyproject.toml", "README.md", "LICENSE", "docs/mycli.1"):
        shutil.copy(ROOT / file, copy / file)
    build = f"from setuptools import build_meta; build_meta.build_wheel({str(tmp_path)!r})"
    variables = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run([sys.executable, "-c", build], cwd=copy, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    (wheel,) = tmp_path.glob("*.whl")
    held = set(zipfile.ZipFile(wheel).namelist())
    files = {f"mycli/{p.relative_to(copy)}" for part in PARTS for p in (copy / part).rglob("*") if p.is_file()}
    files = {file for file in files if ".egg-info/" not in file} | {"mycli/__main__.py"}
    assert {file for file in held if ".dist-info/" not in file and ".data/" not in file} == files
    assert any(file.endswith(".data/data/share/man/man1/mycli.1") for file in held)
    assert "mycli/__init__.py" not in held, "mycli is a namespace"
    assert any(file.endswith(".dist-info/licenses/LICENSE") for file in held)
    (points,) = (file for file in held if file.endswith("entry_points.txt"))
    assert "mycli = mycli.cli.__main__:start_program" in zipfile.ZipFile(wheel).read(points).decode()
    zipfile.ZipFile(wheel).extractall(tmp_path / "installed")
    command = [sys.executable, "-m", "mycli", "--version"]
    environment = {**variables, "PYTHONPATH": str(tmp_path / "installed")}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.stdout.startswith("mycli "), done.stderr[-2000:]


def test_nothing_forks() -> None:
    """D20: a fork of a process with CUDA or threads is unsafe; helper processes are spawned."""
    for path in sources():
        names = {node.attr for node in ast.walk(tree(path)) if isinstance(node, ast.Attribute)}
        assert not names & {"fork", "forkpty", "get_context", "Process"}, name(path)
