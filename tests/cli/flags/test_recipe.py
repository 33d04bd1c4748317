"""Test the options of a recipe: what they leave out is chosen, and what has no meaning together is refused."""

from typing import Any

import pytest

from mycli.cli.flags.recipe import RecipeFlags
from mycli.quant import solvers
from mycli.quant.ggml.mixes import DEFAULT_MIX
from mycli.runtime.errors import UsageError


def test_the_group_is_that_of_the_method_unless_given() -> None:
    usual = {name: RecipeFlags(method=name).resolve().group for name in solvers.names()}
    assert usual == {name: solvers.spec(name).group for name in solvers.names()}
    assert RecipeFlags(group="64").resolve().group == 64
    assert RecipeFlags(group="channel").resolve().group is None
    with pytest.raises(UsageError, match="--group x is not supported"):
        RecipeFlags(group="x").resolve()


def test_values_of_a_recipe() -> None:
    usual, chosen = RecipeFlags().resolve(), RecipeFlags(bits="2", seed=3, seq=64, samples=8).resolve()
    assert (usual.bits, usual.tune, usual.tune_codes) == (4, False, False)
    assert (chosen.bits, chosen.seed, chosen.seq, chosen.samples) == (2, 3, 64, 8)
    tuned, codes = RecipeFlags(tune=True).resolve(), RecipeFlags(tune_codes=True).resolve()
    assert (tuned.tune, tuned.tune_codes) == (True, False) and (codes.tune, codes.tune_codes) == (True, True)


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ({"bits": "5"}, "^5 bits are not supported"),
        ({"bits": "q4_k_m"}, "^--bits q4_k_m is not supported"),
        ({"bits": "4", "target_bpw": 3.5}, "--bits and --target-bpw exclude each other"),
        ({"scales": "max"}, "--scales max is not supported"),
    ],
)
def test_what_is_no_recipe(flags: dict[str, Any], problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        RecipeFlags(**flags).resolve()


@pytest.mark.parametrize(
    ("flags", "mix", "target"),
    [
        ({"format": "gguf"}, DEFAULT_MIX, None),
        ({"bits": "q8_0"}, "q8_0", None),
        ({"target_size": 1 << 30}, DEFAULT_MIX, 1 << 30),
    ],
)
def test_each_of_three_options_makes_a_gguf_file(flags: dict[str, Any], mix: str, target: int | None) -> None:
    options = RecipeFlags(**flags)
    recipe = options.resolve_gguf()
    assert options.is_gguf and (recipe.mix, recipe.target_size) == (mix, target)
    assert not RecipeFlags().is_gguf and not RecipeFlags(bits="4", format="folder").is_gguf


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ({"bits": "q8_0", "format": "folder"}, "--format folder excludes GGUF types"),
        ({"bits": "q8_0", "method": "rtn"}, "--method does not apply to GGUF"),
        ({"bits": "q8_0", "target_size": 1 << 30}, "--bits and --target-size exclude each other"),
        ({"bits": "4", "format": "gguf"}, "--bits 4: not a GGUF type"),
    ],
)
def test_what_is_no_recipe_of_a_gguf_file(flags: dict[str, Any], problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        RecipeFlags(**flags).resolve_gguf()
