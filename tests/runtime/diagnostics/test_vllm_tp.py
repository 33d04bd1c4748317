"""Test the shape rules of tensor parallelism against models with known results."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from mycli.runtime.checkpoint.open_folder import open_model_folder
from mycli.runtime.diagnostics.vllm_tp import obstacles
from mycli.runtime.memory.fit import PackingScheme
from mycli.runtime.quantization.scheme import Packing
from tests.support.packed_mixture import FIELDS
from tests.support.published import published


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("group", [32, 128])
@pytest.mark.parametrize("name", ["Llama-3.1-8B", "Qwen3-8B", "Qwen2.5-7B"])
def test_fine(name: str, group: int, ranks: int) -> None:
    config = published(name)
    assert obstacles(config, PackingScheme(Packing(4, group)).packings(config), ranks) == []


@pytest.mark.parametrize(
    "name, group, fine_up_to, ranks, where, number, layers",
    [
        ("Qwen2.5-1.5B", 128, 2, 4, "down_proj", "2240", 28),
        ("Llama-2-7B", 128, 2, 4, "down_proj", "2752", 32),
        ("Qwen2.5-0.5B", 128, 1, 2, "o_proj", "448", 24),
        ("SmolLM2-135M", 64, 0, 1, "q_proj+k_proj+v_proj", "576", 30),
    ],
)
def test_known_breaks(name: str, group: int, fine_up_to: int, ranks: int, where: str, number: str, layers: int) -> None:
    config = published(name)
    packings = PackingScheme(Packing(4, group)).packings(config)
    for fewer in range(1, fine_up_to + 1):
        assert obstacles(config, packings, fewer) == []
    found = {(one.where, one.problem.split()[0], one.layers) for one in obstacles(config, packings, ranks)}
    assert (where, number, layers) in found


def test_heads_must_be_shared_evenly() -> None:
    config = published("Qwen2.5-0.5B")  # 14 heads, 2 kv heads
    assert "num_attention_heads" in {one.where for one in obstacles(config, {}, 4)}
    assert "num_key_value_heads" in {one.where for one in obstacles(replace(config, heads=12, kv_heads=6), {}, 4)}
    assert obstacles(replace(config, heads=16, kv_heads=2), {}, 4) == []  # each kv head on two ranks


def test_a_model_without_attention_has_no_heads_to_divide() -> None:
    config = published("mamba-130m")
    assert obstacles(config, {}, 2) == []


def test_fused_linears_share_a_scheme() -> None:
    config = published("Llama-3.1-8B")
    packings = PackingScheme(Packing(4, 128)).packings(config)
    packings["model.layers.3.self_attn.k_proj"] = Packing(8, 128)
    del packings["model.layers.5.mlp.up_proj"]
    found = {one.where: one.problem for one in obstacles(config, packings, 1)}
    assert found == {
        "q_proj+k_proj+v_proj": "the fused linears differ in scheme: int4-g128, int8-g128",
        "gate_proj+up_proj": "the fused linears differ in scheme: dense, int4-g128",
    }


def test_a_problem_of_all_experts_is_one_of_their_layers(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(FIELDS))
    config = open_model_folder(tmp_path).config
    packings = PackingScheme(Packing(4, 32)).packings(config)
    assert {obstacle.layers for obstacle in obstacles(config, packings, 4) if "proj" in obstacle.where} == {2}


@pytest.mark.parametrize("bits", [2, 3])
def test_marlin_takes_four_and_eight_bits(bits: int) -> None:
    config = published("Llama-3.1-8B")
    found = obstacles(config, PackingScheme(Packing(bits, 128)).packings(config), 1)
    assert len(found) == 4 and all(f"{bits} bits" in one.problem for one in found)


def test_outputs_per_rank() -> None:
    config = replace(published("Llama-3.1-8B"), intermediate_size=1040)  # gate and up: 2080 in all, 32 x 65
    found = {one.where: one.problem for one in obstacles(config, PackingScheme(Packing(4, None)).packings(config), 1)}
    assert found["gate_proj+up_proj"].startswith("2080 outputs")
    narrow = replace(published("Llama-3.1-8B"), head_dim=16)
    found = {one.where: one.problem for one in obstacles(narrow, PackingScheme(Packing(4, None)).packings(narrow), 16)}
    # 2 heads plus a copied kv head each for k and v: 64 outputs; 48 at 32 ranks.
    assert "q_proj+k_proj+v_proj" not in found
    found = {one.where: one.problem for one in obstacles(narrow, PackingScheme(Packing(4, None)).packings(narrow), 32)}
    assert found["q_proj+k_proj+v_proj"].startswith("48 outputs")


def test_dense_models_only_need_even_division() -> None:
    assert obstacles(published("SmolLM2-135M"), {}, 3) == []
    assert [one.where for one in obstacles(published("Llama-2-7B"), {}, 64)] == ["num_attention_heads"]
    assert [one.where for one in obstacles(published("SmolLM2-135M"), {}, 9)] == ["gate_proj+up_proj", "down_proj"]
