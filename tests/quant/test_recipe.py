"""Test recipes: their effect on a model, and the requests that are refused."""

from dataclasses import replace
from typing import Any

import pytest

from mycli.quant.recipe import Recipe
from mycli.runtime.errors import UsageError
from mycli.runtime.models.config import ModelConfig
from mycli.runtime.models.registry import parse_config
from mycli.runtime.quantization.scheme import Packing
from mycli.runtime.utils.json_fields import Fields


def config(**changes: object) -> ModelConfig:
    raw = {
        "model_type": "llama",
        "hidden_size": 128,
        "intermediate_size": 352,  # 11 x 32: no larger group divides it
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 100,
    }
    return parse_config(Fields({**raw, **changes}, "config.json"))


@pytest.mark.parametrize(
    ("recipe", "name"),
    [
        (Recipe(), "gptq-int4-g128"),
        (Recipe("rtn"), "rtn-int4-g128"),
        (Recipe("awq+gptq", bits=3), "awq-gptq-int3-g128"),
        (Recipe("rtn", bits=8, group=None), "rtn-int8-channel"),
        (Recipe("rtn", bits=3, group=64, scales="absmax"), "rtn-absmax-int3-g64"),
        (Recipe("rtn", bits=2, group=32, head="int8"), "rtn-int2-g32-head-int8"),
        (Recipe(head="keep"), "gptq-int4-g128-head-keep"),
        (Recipe(bits=3, tune=True), "gptq-int3-g128-tuned"),
        (Recipe("awq+gptq", bits=2, hessian="model"), "awq-gptq-int2-g128-model"),
        (Recipe(tune=True, hessian="model"), "gptq-int4-g128-model-tuned"),
        (Recipe("nf4", group=64), "nf4-g64"),
        (Recipe("nf4", group=32, scales="absmax"), "nf4-absmax-g32"),
    ],
)
def test_names_state_facts(recipe: Recipe, name: str) -> None:
    assert recipe.name == name


@pytest.mark.parametrize(
    ("method", "transform", "solver"),
    [("gptq", None, "gptq"), ("rtn", None, "rtn"), ("awq", "awq", "rtn"), ("awq+gptq", "awq", "gptq")],
)
def test_a_method_may_transform_before_it_solves(method: str, transform: str | None, solver: str) -> None:
    assert (Recipe(method).transform, Recipe(method).solver) == (transform, solver)


def test_every_linear_and_nothing_else_is_packed() -> None:
    model = config()
    packings = Recipe(group=32, head="keep").packings(model)
    weights = [name.removesuffix(".weight") for name, shape in model.tensors() if len(shape) == 2]
    assert list(packings) == [name for name in weights if name not in ("model.embed_tokens", "lm_head")]
    assert set(packings.values()) == {Packing(4, 32)}


def test_a_head_of_its_own_may_get_other_bits() -> None:
    packings = Recipe(bits=3, group=32, head="int8").packings(config())
    assert packings["lm_head"] == Packing(8, 32)
    assert list(packings)[-1] == "lm_head"


@pytest.mark.parametrize(
    ("inner", "group", "suggested"),
    [(352, 128, 32), (320, 128, 64), (350, 32, "channel")],
    ids=["E5-352-g128", "E5-320-g128", "E5-350-g32"],
)
def test_a_group_that_divides_not_everything_is_refused_with_one_that_does(
    inner: int, group: int, suggested: int | str
) -> None:
    model = config(intermediate_size=inner)
    with pytest.raises(
        UsageError, match=f"a group of {group} does not divide the {inner} inputs of .*layers.0.mlp.down"
    ) as c:
        Recipe(group=group).packings(model)
    assert c.value.data == {"group": suggested}
    assert Recipe(group=None if isinstance(suggested, str) else suggested).packings(model)


def test_auto_packs_a_head_only_where_readers_load_it() -> None:
    """No reader loads a packed embedding, and the layouts of methods such as nf4 name no head."""
    assert Recipe(bits=3, group=32).packings(config())["lm_head"] == Packing(8, 32)
    assert "lm_head" not in Recipe(group=32).packings(config(tie_word_embeddings=True))
    assert "lm_head" not in Recipe("nf4", group=32).packings(config())


def test_a_tied_head_cannot_be_quantized() -> None:
    with pytest.raises(UsageError, match="uses its embedding as head"):
        Recipe(group=32, head="int4").packings(config(tie_word_embeddings=True))


@pytest.mark.parametrize("changes", [{"bits": 5}, {"bits": 0}, {"group": 16}, {"group": 0}])
def test_widths_and_groups_outside_the_format_are_refused(changes: dict[str, int]) -> None:
    with pytest.raises(UsageError, match=next(iter(changes))):
        replace(Recipe(), **changes)  # type: ignore[arg-type]  # on purpose


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"method": "awq+nf4"}, "method-alone"),
        ({"bits": 3}, "method-bits"),
        ({"target_bpw": 4.5}, "method-bits"),
        ({"group": None}, "choose-block"),
        ({"head": "int8"}, "keep-head"),
        ({"tune": True}, "tune-with-data"),
        ({"tune_codes": True}, "tune-codes"),
    ],
    ids=lambda part: part if isinstance(part, str) else "-".join(part),
)
def test_a_method_with_a_table_of_its_own_stands_alone(changes: dict[str, Any], code: str) -> None:
    with pytest.raises(UsageError) as caught:
        Recipe(**{"method": "nf4", "group": 64, **changes})
    assert caught.value.code == code


def test_every_linear_gets_nested_blocks_of_the_table() -> None:
    packings = Recipe("nf4", group=32).packings(config())
    assert list(packings) == list(Recipe(group=32, head="keep").packings(config()))
    assert {packing.name for packing in packings.values()} == {"nf4-g32"}
    with pytest.raises(UsageError, match="a group of 64 does not divide the 352 inputs"):
        Recipe("nf4", group=64).packings(config())
