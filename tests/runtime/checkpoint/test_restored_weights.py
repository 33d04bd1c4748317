"""Test which linears the files of a family have in one tensor: exports that pack linears refuse those families."""

from pathlib import Path

import pytest

from mycli.runtime.checkpoint.open_folder import open_model_folder
from mycli.runtime.checkpoint.restored_weights import joined_linears
from mycli.runtime.models.registry import parse_config
from mycli.runtime.utils.json_fields import Fields
from tests.support.embedding_models import encoder
from tests.support.families import CASES
from tests.support.family_parts import SMALL


@pytest.mark.parametrize(
    ("case", "names"),
    [
        ("llama-biases", set()),
        ("falcon-7b", set()),  # query_key_value is one linear, with a single key head
        ("falcon-biases-untied", set()),
        ("falcon-40b-biases-untied", {"self_attention.query_key_value.weight", "self_attention.query_key_value.bias"}),
        ("falcon-11b", {"self_attention.query_key_value.weight"}),
        ("gpt_neox-parallel", {"attention.query_key_value.weight", "attention.query_key_value.bias"}),
        ("gpt_neox-sequential-half-rotated-no-bias", {"attention.query_key_value.weight"}),
    ],
)
def test_queries_keys_and_values_are_joined_by_key_head(case: str, names: set[str]) -> None:
    model_type, changes = CASES[case]
    config = parse_config(Fields({**SMALL, **changes, "model_type": model_type}, "config.json"))
    shapes = dict(config.tensors())
    joined = [tensor for tensor in joined_linears(config) if tensor.name.startswith("model.layers.0.")]
    assert {tensor.name.removeprefix("model.layers.0.") for tensor in joined} == names
    for tensor in joined:
        assert [part.split(".")[-2] for part in tensor.parts] == ["q_proj", "k_proj", "v_proj"]
        assert sum(shapes[part][0] for part in tensor.parts) == tensor.shape[0]
        assert tensor.shape[1:] == shapes[tensor.parts[0]][1:] and tensor.groups == config.kv_heads


def test_gte_has_up_and_gate_in_one_tensor(tmp_path: Path) -> None:
    folder = open_model_folder(encoder(tmp_path / "model", "gte"))
    joined, declared = list(joined_linears(folder.config)), dict(folder.config.tensors())
    assert len(joined) == folder.config.layers
    for tensor in joined:
        assert [part.split(".")[-2] for part in tensor.parts] == ["up_proj", "gate_proj"]
        assert tensor.shape == (sum(declared[part][0] for part in tensor.parts), folder.config.hidden_size)
