"""Test how exports list the linears that they do not pack: routers and gates."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers.quantizers.quantizers_utils import should_convert_module

from mycli.quant.recipe import Recipe
from mycli.runtime.checkpoint.open_folder import open_model_folder
from mycli.runtime.hub.resolve import Source
from tests.support import quantizing
from tests.support.exports import WIDE, export_to, packed_family
from tests.support.families import CASES, make


@pytest.mark.parametrize("name", ["qwen2_moe-shared", "qwen3_5-delta"])
def test_routers_and_gates_are_listed_as_notpacked_family(name: str, tmp_path: Path) -> None:
    """Readers replace all linears but those that the config names: shared_expert_gate, in_proj_a and others."""
    model_type, changes = CASES[name]
    original = make(tmp_path / "dense", model_type, {**changes, **WIDE})
    recipe = Recipe("rtn", bits=4, group=32, head="keep")
    packed = open_model_folder(quantizing.make(Source("dense", tmp_path / "dense"), tmp_path / "packed", recipe).folder)
    gates = {linear.name for layer in packed.config.layer_specs for linear in layer.unquantized}
    sections = {}
    for layout in ("gptq", "awq"):
        done = export_to(packed.path, layout, tmp_path / layout, requantize=True)
        assert open_model_folder(done.path).packings.keys() == packed.packings.keys()
        assert done.separate_experts == (name == "qwen2_moe-shared")
        sections[layout] = json.loads((done.path / "config.json").read_text())["quantization_config"]
    listed = sections["awq"]["modules_to_not_convert"]
    linears = [name for name, module in original.named_modules() if isinstance(module, torch.nn.Linear)]
    converted = {name for name in linears if should_convert_module(name, [*listed, "lm_head"])}
    assert converted == {name for name in linears if name in packed.packings} and gates & {*linears}
    # As vLLM and SGLang: a name that contains one of the list.
    assert not any(gate in name for gate in listed for name in packed.packings) and gates == {*listed}
    rules = sections["gptq"]["dynamic"]
    assert len(rules) < len(gates) and all(rule.startswith("-:") for rule in rules)
    matching = {name for name in (*gates, *packed.packings) if any(re.match(rule[2:], name) for rule in rules)}
    assert matching == gates


@pytest.mark.parametrize("layout", ["gptq", "awq"])
def test_routers_are_listed_by_the_names_of_the_files_too(layout: str, tmp_path: Path) -> None:
    """Readers compare the list with their modules, which published code and transformers name differently."""
    packed = packed_family(tmp_path, "nemotron_h-every-kind", Recipe("rtn", bits=4, group=32), **WIDE)
    done = export_to(packed, layout, tmp_path / layout, requantize=True)
    section = json.loads((done.path / "config.json").read_text())["quantization_config"]
    stored = {name for name in load_file(done.path / "model.safetensors") if name.endswith(".mixer.gate.weight")}
    assert stored and all(name.startswith("backbone.layers.") for name in stored)
    for name in {*stored, *(name.replace("backbone.", "model.") for name in stored)}:
        module = name.removesuffix(".weight")
        if layout == "gptq":
            assert any(re.match(rule[2:], module) for rule in section["dynamic"])
        else:
            assert module in section["modules_to_not_convert"]


def test_a_gate_that_other_layers_pack_is_listed_by_its_layer(tmp_path: Path) -> None:
    packed = packed_family(tmp_path, "bailing_hybrid-8top3", Recipe("rtn", bits=4, group=32), **WIDE)
    done = export_to(packed, "gptq", tmp_path / "gptq", requantize=True)
    rules = json.loads((done.path / "config.json").read_text())["quantization_config"]["dynamic"]
    linears = {name.rpartition(".")[::2] for name in load_file(done.path / "model.safetensors")}
    gates = {
        kind: [module for module, part in linears if module.endswith(".g_proj") and part == kind]
        for kind in ("weight", "qweight")
    }
    assert all(gates.values())
    for kind, modules in gates.items():
        for module in modules:
            assert any(re.match(rule[2:], module) for rule in rules) == (kind == "weight")
