"""Check that a solver is one file: recipes, help and layouts use only what it declares."""

import ast
import json
from pathlib import Path

import pytest

from mycli.quant import solvers, transforms
from mycli.quant.declarations import declared
from mycli.quant.recipe import Recipe, method_help, methods
from mycli.runtime.checkpoint.open_folder import open_model_folder
from mycli.runtime.errors import UsageError
from mycli.runtime.hub.resolve import Source
from tests.support.paths import DRAFT
from tests.support.quantizing import make
from tests.support.sources import name, sources, tree

TOY = """
from mycli.quant.rounding.grid import Quantized, find_scales
from mycli.quant.solvers import Solution, SolverSpec

SOLVER = SolverSpec(help="every code is the zero level", bits=(8, 4), group=32, row_scales=False)


def solve(weight, grid, hessian):
    codes = weight.new_full(weight.shape, grid.half).byte()
    return Solution(Quantized(codes, find_scales(weight, grid)))
"""


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "toy.py").write_text(TOY)
    monkeypatch.setattr(solvers, "__path__", [*solvers.__path__, str(tmp_path)])
    return "toy"


def test_a_solver_file_is_a_method(toy: str, tmp_path: Path) -> None:
    assert toy in methods() and "toy: every code is the zero level" in method_help()
    recipe = Recipe(toy, 4, solvers.spec(toy).group)
    outcome = make(Source("draft", DRAFT, None, None), tmp_path / "out", recipe)
    assert {layer.error for layer in outcome.layers} == {1.0}
    packings = open_model_folder(tmp_path / "out").packings
    assert {packing.name for packing in packings.values()} == {"int4-g32"}
    assert json.loads((tmp_path / "out" / "mycli.json").read_text())["recipe"]["method"] == toy


@pytest.mark.parametrize(
    ("recipe", "code"),
    [({"bits": 3}, "method-bits"), ({"group": None}, "choose-block"), ({"tune": True}, "tune-with-data")],
    ids=lambda part: part if isinstance(part, str) else "-".join(part),
)
def test_its_declaration_decides_what_a_recipe_refuses(toy: str, recipe: dict[str, object], code: str) -> None:
    with pytest.raises(UsageError) as refused:
        Recipe(**{"method": toy, "group": 32, **recipe})  # type: ignore[arg-type]  # the fields have several types
    assert refused.value.code == code


def test_a_file_without_a_declaration_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.py").write_text("X = 1\n")
    with pytest.raises(ValueError, match="no assignment SOLVER"):
        declared([str(tmp_path)], "empty", "SOLVER")


def test_a_declaration_is_the_same_read_and_imported() -> None:
    assert all(solvers.spec(solver) == solvers.load(solver).SOLVER for solver in solvers.names())
    assert all(transforms.spec(one) == transforms.load(one).TRANSFORM for one in transforms.names())


# Exports and readers name other programs' layouts; types of GGUF are solved with GPTQ's factor of the Hessian.
OWN_FILES = ("quant/solvers/", "quant/transforms/", "quant/export/", "quant/readers/", "quant/ggml/")


def test_only_their_own_files_name_solvers_and_transforms() -> None:
    known = set(methods())
    for path in sources():
        if not name(path).startswith(("cli/", "quant/")) or name(path).startswith(OWN_FILES):
            continue
        statements = (node for node in tree(path).body if not _examples(node))
        for node in (inner for statement in statements for inner in ast.walk(statement)):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                options = {part.split(maxsplit=1)[0] for part in node.value.split("--method ")[1:] if part}
                assert node.value not in known and not known & options, name(path)
            elif isinstance(node, ast.ImportFrom):
                package = (node.module or "").rpartition(".")[0]
                assert package not in ("mycli.quant.solvers", "mycli.quant.transforms"), name(path)


def _examples(node: ast.stmt) -> bool:
    return isinstance(node, ast.Assign | ast.AnnAssign) and "EXAMPLES" in ast.unparse(node).partition("=")[0]
