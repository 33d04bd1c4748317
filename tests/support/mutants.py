"""Runs mutation tests: plants one-line faults and counts those that the tests of their room miss: `make mutants`.

    python -m tests.support.mutants --count 20 --seed 1 --room runtime/hub

A fault changes one operator, comparison, constant, `min`, sign or `and` in a copy of the checkout. The tests of the
file's room run there, those that name the module first and those of the folders above last, until one fails that passes
without the fault. A survivor is a fault that no test detects: a missing test, or a change without an effect.
"""

import argparse
import ast
import compileall
import json
import os
import random
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from py_compile import PycInvalidationMode
from tempfile import TemporaryDirectory

from tests.support.paths import ROOT

PARTS = ("runtime", "quant", "cli")
SECONDS = 300  # of processor time for a run; more counts as detected, since the fault caused an endless loop
# Without an effect that a room's tests could detect: messages, measurements, GPU code, programs shipped as data.
SKIPPED = ("runtime/kernels/triton/", "runtime/pico/", "runtime/diagnostics/vllm_tp.py", "cli/serving/other_engines.py")
NOT_RUN = ("tests/gpu/", "tests/ptx/")  # need a GPU, or take hours
NEEDS_GPU = ("passes/cuda.py", "passes/device_loop.py", "passes/graphs.py", "passes/fused.py", "device/nvml.py")

OPERATORS: dict[type[ast.AST], tuple[str, str]] = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "+"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "*"),
    ast.LShift: ("<<", ">>"),
    ast.RShift: (">>", "<<"),
    ast.BitAnd: ("&", "|"),
    ast.BitOr: ("|", "&"),
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.And: ("and", "or"),
    ast.Or: ("or", "and"),
}
CALLS = {"min": "max", "max": "min", "any": "all", "all": "any"}


@dataclass(frozen=True)
class Fault:
    """Replaces `old` at a position (byte columns, lines from 1) of a file with `new`."""

    path: str
    line: int
    column: int
    old: str
    new: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}:{self.column + 1}: {self.old} → {self.new}"

    def applied(self, source: str) -> str:
        lines = source.encode().splitlines(keepends=True)
        line, end = lines[self.line - 1], self.column + len(self.old.encode())
        assert line[self.column : end] == self.old.encode(), str(self)
        lines[self.line - 1] = line[: self.column] + self.new.encode() + line[end:]
        return b"".join(lines).decode()


class _Finder(ast.NodeVisitor):
    # Changes to annotations, docstrings, error messages, f-strings, asserts, decorators, protocols and help
    # declarations have no effect that a test should detect.
    def __init__(self, path: str, source: str) -> None:
        self._path, self._lines = path, source.encode().splitlines()
        self.faults: list[Fault] = []

    def _add(self, line: int, column: int, old: str, new: str) -> None:
        if self._lines[line - 1][column : column + len(old)] == old.encode():
            self.faults.append(Fault(self._path, line, column, old, new))

    def _between(self, left: ast.expr, right: ast.expr, operator: ast.AST) -> None:
        old, new = OPERATORS.get(type(operator), ("", ""))
        if not old or left.end_lineno != right.lineno or left.end_lineno is None or left.end_col_offset is None:
            return
        gap = self._lines[right.lineno - 1][left.end_col_offset : right.col_offset]
        position = gap.find(f" {old} ".encode())
        if position >= 0:
            self._add(left.end_lineno, left.end_col_offset + position + 1, old, new)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        texts = (ast.Constant, ast.JoinedStr)
        if not (isinstance(node.left, texts) and isinstance(getattr(node.left, "value", ""), str)):
            self._between(node.left, node.right, node.op)
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        for left, right in zip(node.values, node.values[1:], strict=False):
            self._between(left, right, node.op)
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        left = node.left
        for operator, right in zip(node.ops, node.comparators, strict=True):
            self._between(left, right, operator)
            left = right
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not):
            self._add(node.lineno, node.col_offset, "not ", "")
        elif isinstance(node.op, ast.USub) and isinstance(node.operand, ast.Name | ast.Call | ast.Attribute):
            self._add(node.lineno, node.col_offset, "-", "")
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        value = node.value
        if isinstance(value, bool):
            self._add(node.lineno, node.col_offset, str(value), str(not value))
        elif isinstance(value, int) and node.end_col_offset is not None and abs(value) < 1 << 20:
            old = self._lines[node.lineno - 1][node.col_offset : node.end_col_offset].decode()
            self._add(node.lineno, node.col_offset, old, str(value + 1))

    def visit_Call(self, node: ast.Call) -> None:
        if isinstance(node.func, ast.Name) and node.func.id in CALLS:
            self._add(node.lineno, node.col_offset, node.func.id, CALLS[node.func.id])
        self.generic_visit(node)

    def visit_Raise(self, node: ast.Raise) -> None: ...
    def visit_Assert(self, node: ast.Assert) -> None: ...
    def visit_JoinedStr(self, node: ast.JoinedStr) -> None: ...

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_keyword(self, node: ast.keyword) -> None:
        # `strict=` of zip, `exist_ok=` and similar arguments guard against cases that do not occur.
        if not isinstance(node.value, ast.Constant):
            self.visit(node.value)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        for default in (*node.args.defaults, *node.args.kw_defaults):
            if default is not None:
                self.visit(default)
        for statement in node.body:
            self.visit(statement)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        if not any("Protocol" in ast.unparse(base) for base in node.bases):
            for statement in node.body:
                self.visit(statement)

    def visit_If(self, node: ast.If) -> None:
        if "TYPE_CHECKING" not in ast.unparse(node.test):
            self.generic_visit(node)


def faults(path: str, root: Path = ROOT) -> list[Fault]:
    """Return all faults of a file that still compile and change its bytecode."""
    source = (root / path).read_text(encoding="utf-8")
    return [fault for fault in _candidates(path, source) if _differs(fault, source)]


def _candidates(path: str, source: str) -> list[Fault]:
    finder = _Finder(path, source)
    finder.visit(ast.parse(source))
    return finder.faults


def _differs(fault: Fault, source: str) -> bool:
    try:
        return ast.dump(ast.parse(fault.applied(source))) != ast.dump(ast.parse(source))
    except SyntaxError:
        return False


def files(rooms: Sequence[str]) -> Iterator[str]:
    for part in PARTS:
        for path in sorted((ROOT / part).rglob("*.py")):
            name = path.relative_to(ROOT).as_posix()
            skipped = name.startswith(SKIPPED) or name.endswith(NEEDS_GPU) or "/_" in name or path.name == "__init__.py"
            if not skipped and (not rooms or any(name.startswith(f"{room.rstrip('/')}") for room in rooms)):
                yield name


def room_tests(path: str, root: Path = ROOT) -> list[list[str]]:
    """Return the test files of a file in groups: those that name it, the others of its room, and those further away.

    Further away are the tests of the folders above that have tests of their own, and those of other parts that name it.
    """
    part, stem, parts = Path(path).parts[0], Path(path).stem, Path(path).with_suffix("").parts
    module, package = ".".join(("mycli", *parts)), ".".join(("mycli", *parts[:-1]))
    # tests/runtime/kernels/test_cpu_table.py is the test of runtime/kernels/cpu/table.py.
    mirrors = {f"test_{'_'.join(parts[start:])}" for start in range(1, len(parts))}
    names_it = re.compile(
        rf"\b{re.escape(module)}\b|^from {re.escape(package)} import (\([^)]*|.*)\b{stem}\b", re.MULTILINE
    )
    above = [folder for folder in (root / "tests" / path).parents if folder.is_relative_to(root / "tests" / part)]
    room = next(folder for folder in above if folder.is_dir())
    rooms_above = [folder for folder in above if folder != room and any(folder.glob("test_*.py"))]
    near, far, outer = [], [], []
    for test in sorted((root / "tests").glob("*/**/test_*.py")):
        own_part, name = test.is_relative_to(above[-1]), test.relative_to(root).as_posix()
        named = test.stem in mirrors or names_it.search(test.read_text(encoding="utf-8"))
        if own_part and named:
            near.append(name)
        elif test.is_relative_to(room):
            far.append(name)
        elif any(test.is_relative_to(folder) for folder in rooms_above) or (named and not name.startswith(NOT_RUN)):
            outer.append(name)
    near.sort(key=lambda test: Path(test).stem not in mirrors)
    # The rooms above in this order: tests that lie in them, then their other rooms, then other parts.
    folders = [folder.relative_to(root).as_posix() for folder in rooms_above]
    outer.sort(key=lambda test: (not test.startswith(f"tests/{part}/"), Path(test).parent.as_posix() not in folders))
    return [near, far, outer]


def copy_checkout(target: Path) -> None:
    for part in (*PARTS, "tests", "docs"):
        shutil.copytree(ROOT / part, target / part, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "Makefile"):
        shutil.copy(ROOT / name, target)
    (target / ".links" / "mycli").mkdir(parents=True)
    for part in PARTS:
        (target / ".links" / "mycli" / part).symlink_to(f"../../{part}")
    for shared in ROOT.parent.glob("shared"):  # some tests are skipped without it
        (target.parent / "shared").symlink_to(shared)
    # By hash: a fault may have the size and the second of the file that it replaces.
    compileall.compile_dir(target, quiet=2, invalidation_mode=PycInvalidationMode.CHECKED_HASH)


def environment_in(home: Path) -> dict[str, str]:
    """Return ours with another home: a fault in the choice of a folder must not change files of the user."""
    others = ("HF_", "MYCLI_", "OLLAMA_", "XDG_")
    environment = {key: value for key, value in os.environ.items() if not key.startswith(others)}
    kernels = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mycli" / "kernels"
    copied = home / ".cache" / "mycli" / "kernels"
    if kernels.is_dir() and not copied.exists():  # compiling takes longer than most tests
        shutil.copytree(kernels, copied)
    home.mkdir(exist_ok=True)
    return {**environment, "HOME": str(home)}


class Runner:
    """Runs tests of a copy of the checkout; those that fail without a fault are left out from then on."""

    def __init__(self, copy: Path, seconds: int) -> None:
        self._copy, self._seconds = copy, seconds
        self._failing: list[str] = []
        environment = {
            **environment_in(copy.parent / "home"),
            "PYTHONPATH": str(copy / ".links"),
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, "-m", "tests.support.mutant_runner"]
        self._process = subprocess.Popen(
            command, cwd=copy, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def close(self) -> None:
        self._process.communicate()

    def first_failure(self, tests: Sequence[str]) -> str:
        """Return the first test that fails, or ""; all run in one process, in this order."""
        if not tests:
            return ""
        assert self._process.stdin is not None and self._process.stdout is not None
        left_out = [argument for test in self._failing if "::" in test for argument in ("--deselect", test)]
        tests = [test for test in tests if test not in self._failing]  # files that cannot be imported
        request = {"arguments": [f"--basetemp={self._copy.parent / 'tmp'}", *left_out, *tests]}
        self._process.stdin.write(json.dumps({**request, "seconds": self._seconds}) + "\n")
        self._process.stdin.flush()
        answer: str = json.loads(self._process.stdout.readline())
        return answer

    def noticed_by(self, fault: Fault, *, near_only: bool = False) -> str:
        """Plant `fault`, return the test that detects it, and remove it again; "" if it survives."""
        near, far, outer = room_tests(fault.path, self._copy)
        # One file a run: all of them would take longer than a run may, which counts as detected.
        for tests in ([test] for test in (near or far if near_only else [*near, *far, *outer])):
            while failed := self._failure_with(fault, tests):
                if not failed.startswith("tests/") or not self.first_failure([failed]):
                    return failed
                self._failing.append(failed)
        return ""

    def _failure_with(self, fault: Fault, tests: Sequence[str]) -> str:
        file = self._copy / fault.path
        source = file.read_text(encoding="utf-8")
        try:
            file.write_text(fault.applied(source), encoding="utf-8")
            return self.first_failure(tests)
        finally:
            file.write_text(source, encoding="utf-8")


def sample(rooms: Sequence[str], count: int, seed: int) -> list[Fault]:
    """Sample `count` faults uniformly over all faults of the rooms, at most one per line."""
    chosen: dict[tuple[str, int], Fault] = {}
    sources = {path: (ROOT / path).read_text(encoding="utf-8") for path in files(rooms)}
    everything = [fault for path, source in sources.items() for fault in _candidates(path, source)]
    for fault in random.Random(seed).sample(everything, len(everything)):
        if len(chosen) == count:
            break
        if (fault.path, fault.line) not in chosen and _differs(fault, sources[fault.path]):
            chosen[fault.path, fault.line] = fault
    return list(chosen.values())


def main() -> int:
    """Print one line for each fault and the survivors at the end; return 1 if less than 97 % are detected."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--room", action="append", default=[], metavar="FOLDER", help="such as runtime/hub; repeatable")
    parser.add_argument("--near", action="store_true", help="only the tests that name the module, if there are any")
    parser.add_argument("--seconds", type=int, default=SECONDS, help="of processor time for a run")
    parser.add_argument("--minutes", type=float, default=1e9, help="begin no further fault after this time")
    parser.add_argument("--out", type=Path, help="append one JSON line for each fault, and skip those that are in it")
    options = parser.parse_args()
    known = set()
    if options.out and options.out.exists():
        known = {json.loads(line)["fault"] for line in options.out.read_text().splitlines()}
    survivors, count, start = [], 0, time.monotonic()
    with TemporaryDirectory(prefix="mutants-") as folder:
        copy = Path(folder) / "checkout"
        copy.mkdir()
        copy_checkout(copy)
        runner = Runner(copy, options.seconds)
        for fault in sample(options.room, options.count, options.seed):
            if str(fault) in known or time.monotonic() - start > 60 * options.minutes:
                continue
            began = time.monotonic()
            noticed = runner.noticed_by(fault, near_only=options.near)
            count += 1
            survivors += [] if noticed else [fault]
            seconds = time.monotonic() - began
            print(f"{'noticed ' if noticed else 'SURVIVED'} {seconds:4.0f} s  {fault}  {noticed}"[:240], flush=True)
            if options.out:
                record = {"fault": str(fault), **asdict(fault), "noticed": noticed, "seconds": round(seconds, 1)}
                with options.out.open("a") as file:
                    file.write(json.dumps(record) + "\n")
        runner.close()
    print(f"{count - len(survivors)} of {count} noticed")
    for fault in survivors:
        print(f"survived: {fault}")
        print(f"    {(ROOT / fault.path).read_text().splitlines()[fault.line - 1].strip()}")
    return int(len(survivors) > 0.03 * count)


if __name__ == "__main__":
    sys.exit(main())
