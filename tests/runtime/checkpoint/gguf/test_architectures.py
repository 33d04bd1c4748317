"""Test keys and tensor names recorded from llama.cpp's converter, one model per architecture."""

import json
from array import array
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mycli.runtime.checkpoint.gguf.architectures import architectures, qwen3next, written_architecture
from mycli.runtime.checkpoint.gguf.folder import GgufFolder
from mycli.runtime.checkpoint.gguf.rope import ROPE_TENSORS, rope_factors
from mycli.runtime.checkpoint.open_folder import open_model_folder
from mycli.runtime.errors import ModelError
from mycli.runtime.models.config import MAX_LAYERS
from mycli.runtime.models.experts_spec import ExpertsSpec, RoutingSpec
from mycli.runtime.models.registry import parse_config
from mycli.runtime.utils.json_fields import Fields
from tests.support import gguf_files
from tests.support.families import make
from tests.support.gguf_exports import MULTIMODAL_NAMES
from tests.support.gguf_facts import FACTS, gguf_folder
from tests.support.gguf_files import byte_tokenizer
from tests.support.published import PUBLISHED


def test_every_architecture_is_recorded() -> None:
    assert {facts["keys"]["general.architecture"] for facts in FACTS.values()} == {
        known.name for known in architectures() if known.written_types or known.multimodal_types
    }


@pytest.mark.parametrize("name", FACTS)
def test_the_converters_names_are_read(name: str) -> None:
    folder = gguf_folder(FACTS[name])
    assert set(folder.checked_manifest().tensors) == {name for name, _ in folder.config.tensors()}
    original = parse_config(Fields(FACTS[name]["config"], "config.json"))
    shapes = [(layer.index, [*layer.products()]) for layer in original.layer_specs]
    assert [(layer.index, [*layer.products()]) for layer in folder.config.layer_specs] == shapes
    rotated, expected = ([rope.dim for rope in config.distinct_ropes] for config in (folder.config, original))
    assert rotated == expected
    assert folder.config.windows == original.windows or not any(folder.config.windows)


# To these keys the converter gives other values, which make no difference to the logits.
OTHER_VALUES = {
    # 2^20
    *(f"{name}.context_length" for name in ("granitehybrid", "mamba", "mamba2", "nemotron_h", "nemotron_h_moe")),
    "jamba.expert_used_count",  # of a model without experts
    "falcon.context_length",  # 2048, which the config leaves out
    *("nemotron_h.rope.dimension_count", "nemotron_h_moe.rope.dimension_count"),  # of models without a rope
    *("qwen35.rope.dimension_sections", "qwen35moe.rope.dimension_sections"),  # of image positions
    *("kimi-linear.attention.value_length", "bailingmoe3.attention.value_length"),  # value_length_mla counts
    "ernie4_5-moe.expert_shared_feed_forward_length",  # divided by the number of key heads
    "gemma4.attention.head_count_kv",  # one number where all layers are alike
    "granitehybrid.expert_used_count",  # of a model without experts
    "llama4.feed_forward_length",  # of dense layers, which the model does not have
    "phi3.rope.scaling.original_context_length",  # of a model without scaling
}


# The converter writes them, in shapes that llama.cpp does not load.
UNLOADABLE = {
    *("dots1-8top2", "exaone4-window7", "gemma3n-sparse-shared-kv", "gemma4-ple-shared-kv-double", "mellum-window7"),
    *("granitemoehybrid-dense-odd-sizes-rope-biases-tied", "phimoe-window7-tied-biases"),
    *("qwen3_5-delta", "qwen3_5_moe-8top3", "qwen3_next-8top3"),
}


@pytest.mark.parametrize("name", FACTS)
def test_the_keys_written_are_the_converters(name: str) -> None:
    """Each writes some keys that the other does not."""
    config, keys = FACTS[name]["config"], FACTS[name]["keys"]
    model = parse_config(Fields(config, "config.json"))
    architecture = written_architecture(model, name if name in MULTIMODAL_NAMES else "")
    written = architecture.metadata(model)
    both = (written.keys() & keys.keys()) - OTHER_VALUES
    assert architecture.name == keys["general.architecture"] and len(both) > 5
    for key in both:
        assert written[key] == pytest.approx(keys[key]), key
    assert any(not needed.holds(model) for needed in architecture.requires) == (name in UNLOADABLE)


# What is written for these is read otherwise, which makes no difference to the logits: a share of gates with another
# rounding, a scaling by 1; the parameters of xIELU are no metadata but tensors.
READ_OTHERWISE = {"gemma3n-sparse-shared-kv", "bitnet-gqa4:2", "apertus-llama3"}


@pytest.mark.parametrize("name", sorted(FACTS.keys() - READ_OTHERWISE))
def test_the_keys_written_are_read_as_the_converters(name: str) -> None:
    """So no key is missing among those that are written."""
    model = parse_config(Fields(FACTS[name]["config"], "config.json"))
    architecture = written_architecture(model, name if name in MULTIMODAL_NAMES else "")
    keys: dict[str, Any] = {"general.architecture": architecture.name}
    for key, value in architecture.metadata(model).items():
        if value != []:
            keys[key] = array("f", [value])[0] if isinstance(value, float) else value  # stored in fp32
    read, expected = (gguf_folder({**FACTS[name], "keys": both}).config for both in (keys, FACTS[name]["keys"]))
    assert read.layer_specs == expected.layer_specs
    # The converter writes 2^20 for recurrent models. Sizes of layers that a model does not have make no difference.
    assert replace(read, max_context=expected.max_context, build_layer=expected.build_layer) == expected


@pytest.mark.parametrize("normalized", [True, False])
def test_the_first_version_of_ling_is_read_as_deepseek_moe(normalized: bool) -> None:
    facts = FACTS["deepseek-8top2-first-dense"]
    keys = {key.replace("deepseek.", "bailingmoe."): value for key, value in facts["keys"].items()}
    keys |= {"general.architecture": "bailingmoe", "bailingmoe.expert_weights_norm": normalized}
    mixture = gguf_folder({**facts, "keys": keys}).config.layer(1).mlp
    assert isinstance(mixture, ExpertsSpec) and mixture.routing == RoutingSpec(2, normalized)


@pytest.mark.parametrize("name", FACTS)
def test_the_frequency_factors_written_are_the_converters(name: str) -> None:
    factors = rope_factors(parse_config(Fields(FACTS[name]["config"], "config.json")))
    assert factors.keys() == {tensor for tensor in FACTS[name]["tensors"] if tensor in ROPE_TENSORS}
    assert all(values == pytest.approx(FACTS[name]["factors"]) for values in factors.values())


@pytest.mark.parametrize(
    ("changes", "writable"),
    [
        ({}, True),  # fewer tokens have per-layer inputs
        ({"vocab_size_per_layer_input": 262401}, False),
        ({"num_kv_shared_layers": 16}, False),
        ({"num_kv_shared_layers": 14}, False),
        ({"activation_sparsity_pattern": [0.95] * 11 + [0.0] * 24}, False),
        ({"activation_sparsity_pattern": [0.95] * 9 + [0.0] * 26}, False),
    ],
)
def test_llama_cpp_knows_of_gemma_3n_only_what_is_published(changes: dict[str, Any], writable: bool) -> None:
    text = Fields(PUBLISHED["gemma-3n-E4B"]["config"], "config.json").object("text_config").values
    model = parse_config(Fields({**text, **changes}, "config.json"))
    assert all(needed.holds(model) for needed in written_architecture(model).requires) is writable


def _with_fused_qkv(facts: dict[str, Any]) -> dict[str, Any]:
    """Join the tensors as the converter does with --fuse-qkv: in layers that have all three."""
    tensors = dict(facts["tensors"])
    for name in facts["tensors"]:
        parts = [name.replace(".attn_q.", f".attn_{part}.") for part in "qkv"]
        if ".attn_q." in name and tensors.keys() >= set(parts):
            shapes = [tensors.pop(part) for part in parts]
            tensors[name.replace(".attn_q.", ".attn_qkv.")] = [*shapes[0][:-1], sum(shape[-1] for shape in shapes)]
    return {**facts, "tensors": tensors}


@pytest.mark.parametrize("name", sorted(FACTS.keys() - {"mimo_v2_flash-window7"}))
def test_queries_keys_and_values_in_one_tensor_are_separated(name: str) -> None:
    facts = _with_fused_qkv(FACTS[name])
    read = gguf_folder(facts).checked_manifest()
    assert {tensor: entry.shape for tensor, entry in read.tensors.items()} == dict(gguf_folder(facts).config.tensors())


@pytest.mark.parametrize(
    ("name", "rows", "message"),
    [
        ("blk.0.attn_qkv.weight", 65, r"blk\.0\.attn_qkv\.weight has 65 rows, expected more than 65"),
        ("blk.0.attn_k.weight", 32, r"blk\.0\.attn_k\.weight is stored twice"),
    ],
)
def test_a_fused_tensor_that_does_not_fit_is_an_error(name: str, rows: int, message: str) -> None:
    facts = _with_fused_qkv(FACTS["qwen2-biases"])
    with pytest.raises(ModelError, match=message):
        gguf_folder({**facts, "tensors": {**facts["tensors"], name: [64, rows]}})


@pytest.mark.parametrize("name", ["gemma3n-sparse-shared-kv", "gemma4-ple-shared-kv-double"])
def test_keys_and_values_that_nothing_reads_are_skipped(name: str) -> None:
    """Published files have them in layers that read those of another layer."""
    facts, parts = FACTS[name], ("attn_k", "attn_v", "attn_k_norm")
    unread = {f"blk.3.{part}.weight": facts["tensors"][f"blk.1.{part}.weight"] for part in parts}
    folder = gguf_folder({**facts, "tensors": {**facts["tensors"], **unread}})
    assert not unread.keys() & facts["tensors"].keys()
    assert set(folder.checked_manifest().tensors) == {name for name, _ in folder.config.tensors()}


def test_latent_attention_of_before_the_smaller_cache_is_read() -> None:
    """The keys had the sizes of whole heads, and both halves of kv_b were one tensor."""
    facts = FACTS["deepseek_v2-yarn"]
    whole = {"attention.head_count_kv": 4, "attention.key_length": 48, "attention.value_length": 32}
    keys = {key: value for key, value in facts["keys"].items() if not key.endswith("_mla")}
    halves = ("attn_k_b.weight", "attn_v_b.weight")
    tensors = {name: shape for name, shape in facts["tensors"].items() if not name.endswith(halves)}
    tensors |= {f"blk.{layer}.attn_kv_b.weight": [32, 4 * (32 + 32)] for layer in range(3)}
    keys |= {f"deepseek2.{key}": value for key, value in whole.items()}
    older, newer = gguf_folder({**facts, "keys": keys, "tensors": tensors}), gguf_folder(facts)
    assert older.config.layer_specs == newer.config.layer_specs
    assert {name: entry.shape for name, entry in older.checked_manifest().tensors.items()} == dict(
        newer.config.tensors()
    )


@pytest.mark.parametrize(
    ("layers", "vocabulary", "lite"),
    [(26, 4096, True), (27, 4096, True), (48, 128256, True), (25, 4096, False), (48, 4096, False), (28, 128256, False)],
)
def test_deepseek_of_some_shapes_must_have_no_query_rank(layers: int, vocabulary: int, lite: bool) -> None:
    """llama.cpp expects q_lora_rank by the number of layers and tokens."""
    for rank in (16, None):
        changes = {"num_hidden_layers": layers, "vocab_size": vocabulary, "q_lora_rank": rank}
        config = parse_config(Fields({**FACTS["deepseek_v3-groups-yarn"]["config"], **changes}, "config.json"))
        needed = [requirement for requirement in written_architecture(config).requires if not requirement.holds(config)]
        assert bool(needed) == (lite == (rank is not None))


def test_mistral_large_is_a_deepseek_with_queries_scaled_by_position() -> None:
    facts = FACTS["mistral4-beyond"]
    scaled = {"attention.temperature_scale": 0.1, "attention.temperature_length": 16}
    keys = {**facts["keys"], **{f"mistral4.{key}": value for key, value in scaled.items()}}
    renamed = {key.replace("mistral4.", "deepseek2."): value for key, value in keys.items()}
    renamed["general.architecture"] = "deepseek2"
    config = gguf_folder({**facts, "keys": renamed}).config
    assert config == replace(gguf_folder({**facts, "keys": keys}).config, build_layer=config.build_layer)
    assert config.rope_scaling.query_beta == pytest.approx(0.1)
    with pytest.raises(ModelError, match=r"attention\.temperature_scale is not supported with sigmoid"):
        gguf_folder({**facts, "keys": {**renamed, "deepseek2.expert_gating_func": 2}})


def test_multipliers_of_biases_and_tied_heads_stay() -> None:
    def folds(**changes: bool) -> bool:
        config = parse_config(Fields({**FACTS["falcon_h1-multipliers"]["config"], **changes}, "config.json"))
        return written_architecture(config).folded(config) != config

    assert folds()
    for change in ("tie_word_embeddings", "attention_bias", "mlp_bias", "mamba_proj_bias"):
        assert not folds(**{change: True}), change


def _with_a_block_more(blocks: int, predicted: int) -> GgufFolder:
    """Return the recorded GLM 4.5 (layers are blocks 0 to 2) with one tensor of an MTP head in block 3."""
    facts = FACTS["glm4_moe-8top3-scaled"]
    counts = {"glm4moe.block_count": blocks, "glm4moe.nextn_predict_layers": predicted}
    head = {"blk.3.nextn.eh_proj.weight": [128, 64]}
    return gguf_folder({**facts, "keys": {**facts["keys"], **counts}, "tensors": {**facts["tensors"], **head}})


def test_blocks_of_an_mtp_head_are_skipped_if_the_metadata_counts_them() -> None:
    folder = _with_a_block_more(4, 1)
    assert folder.config.layers == 3
    assert set(folder.checked_manifest().tensors) == {name for name, _ in folder.config.tensors()}


@pytest.mark.parametrize(("blocks", "predicted"), [(3, 0), (4, 0), (3, 1)])
def test_blocks_that_the_metadata_does_not_count_are_an_error(blocks: int, predicted: int) -> None:
    with pytest.raises(ModelError, match=r"blk\.3\.nextn"):
        _with_a_block_more(blocks, predicted).checked_manifest()


def test_as_many_blocks_of_an_mtp_head_as_a_model_may_have_layers_are_an_error() -> None:
    with pytest.raises(ModelError, match="nextn_predict_layers must be between"):
        _with_a_block_more(MAX_LAYERS, MAX_LAYERS)


def test_a_layer_beyond_the_count_is_an_error() -> None:
    facts = FACTS["glm4_moe-8top3-scaled"]
    extra = {"blk.3.attn_q.weight": facts["tensors"]["blk.2.attn_q.weight"]}
    with pytest.raises(ModelError, match=r"blk\.3\.attn_q\.weight is not part of the model"):
        gguf_folder({**facts, "tensors": {**facts["tensors"], **extra}}).checked_manifest()


def test_joined_tensors_beyond_the_count_are_an_error() -> None:
    facts = FACTS["deepseek_v2-yarn"]
    fewer = {**facts["keys"], "deepseek2.block_count": 2}
    with pytest.raises(ModelError, match=r"blk\.2\..* is not part of the model"):
        gguf_folder({**facts, "keys": fewer}).checked_manifest()


@pytest.mark.parametrize("values", [[0.5] * 2, [1] * 3, 0.5, None])
def test_parameters_in_the_metadata_are_one_number_for_each_layer(values: Any) -> None:
    facts = FACTS["apertus-llama3"]
    with pytest.raises(ModelError, match=r"xielu\.beta"):
        gguf_folder({**facts, "keys": {**facts["keys"], "xielu.beta": values}})


@pytest.mark.parametrize(("key", "value"), [("rope.scaling.finetuned", False), ("residual_scale", 0.5)])
def test_a_hybrid_without_a_shared_mlp_is_a_bamba(key: str, value: object) -> None:
    facts = FACTS["bamba-2-groups"]
    assert gguf_folder(facts).config.model_type == "bamba"
    shared = {**facts["keys"], "granitehybrid.expert_shared_feed_forward_length": 88}
    assert gguf_folder({**facts, "keys": shared}).config.model_type == "granitemoehybrid"
    with pytest.raises(ModelError, match=key):
        gguf_folder({**facts, "keys": {**facts["keys"], f"granitehybrid.{key}": value}})


@pytest.mark.parametrize(
    ("key", "value"),
    [("rope.dimension_sections", [2, 3, 3, 0]), ("swiglu_clamp_exp", [0.0, 7.0, 0.0]), ("swiglu_clamp_shexp", 7.0)],
)
def test_what_ling_has_no_layer_for_is_refused(key: str, value: Any) -> None:
    facts = FACTS["bailing_hybrid-8top3"]
    with pytest.raises(ModelError, match=f"{key} is not supported"):
        gguf_folder({**facts, "keys": {**facts["keys"], f"bailingmoe3.{key}": value}})
    neutral = [0 * number for number in value] if isinstance(value, list) else 0.0
    assert gguf_folder({**facts, "keys": {**facts["keys"], f"bailingmoe3.{key}": neutral}}).config.layers


def test_queries_of_granite_rotate_unless_the_file_says_otherwise() -> None:
    facts, key = FACTS["granitemoehybrid-8top3"], "granitehybrid.rope.scaling.finetuned"
    for value in (False, True, None):
        keys = {name: old for name, old in facts["keys"].items() if name != key} | (
            {} if value is None else {key: value}
        )
        assert bool(gguf_folder({**facts, "keys": keys}).config.distinct_ropes) is (value is not False)
    facts = FACTS["granite-multipliers"]
    with pytest.raises(ModelError, match="finetuned = false is not supported"):
        gguf_folder({**facts, "keys": {**facts["keys"], "granite.rope.scaling.finetuned": False}})


@pytest.mark.parametrize(("context", "scaled"), [(32768, False), (131072, True)])
def test_gemma_3_of_ollama_is_read(context: int, scaled: bool) -> None:
    """Its converter leaves out keys, has others for the rotation, and writes the image model into the same file."""
    facts = FACTS["gemma3-window7-tied"]
    missing = ("layer_norm_rms_epsilon", "rope.freq_base", "rope.freq_base_swa", "rope.dimension_count")
    keys = {key: value for key, value in facts["keys"].items() if not key.endswith(missing)}
    keys |= {"gemma3.context_length": context, "gemma3.rope.local.freq_base": 20000.0}
    images = {"v.blk.0.attn_q.weight": [8, 8], "mm.mm_input_projection.weight": [8, 8]}
    folder = gguf_folder({**facts, "keys": keys, "tensors": {**facts["tensors"], **images}})
    assert folder.config.rms_norm_eps == 1e-6
    full, sliding = (
        next(
            layer.attention.rope
            for layer in folder.config.layer_specs
            if (layer.attention.window is not None) == slides
        )
        for slides in (False, True)
    )
    assert full is not None and sliding is not None and (full.theta, sliding.theta) == (1_000_000.0, 20000.0)
    assert (full.scaling.kind, sliding.scaling.kind) == ("linear" if scaled else "default", "default")
    assert set(folder.checked_manifest().tensors) == {name for name, _ in folder.config.tensors()}
    nested = {**keys, "gemma3.rope.global.freq_base": 500_000.0}
    assert 500_000.0 in {rope.theta for rope in gguf_folder({**facts, "keys": nested}).config.distinct_ropes}


def test_a_token_of_gemma_3_without_an_embedding_row_is_left_out() -> None:
    facts = FACTS["gemma3-window7-tied"]
    extra = {**byte_tokenizer(97), "tokenizer.ggml.eos_token_ids": [5, 7, 97]}
    for name, value in (("tokens", "<image_soft_token>"), ("token_type", 3)):
        extra[f"tokenizer.ggml.{name}"] = [*extra[f"tokenizer.ggml.{name}"], value]
    folder = gguf_folder(facts, extra)
    assert folder.config.vocab_size == 97 and len(folder.header.metadata.values["tokenizer.ggml.tokens"]) == 97
    assert {5, 7} <= set(folder.config.eos) and 97 not in folder.config.eos
    assert folder.tokenizer().encode("a", add_special=False)


def test_the_second_part_of_a_joined_tensor_alone_is_an_error() -> None:
    name = next(name for name, facts in FACTS.items() if facts["keys"]["general.architecture"] == "qwen3next")
    tensors = {stored: shape for stored, shape in FACTS[name]["tensors"].items() if stored != "blk.0.attn_qkv.weight"}
    with pytest.raises(ModelError, match=r"blk\.0\.attn_gate\.weight"):
        gguf_folder({**FACTS[name], "tensors": tensors}).checked_manifest()


def test_changed_values_are_read_as_they_were_written() -> None:
    values, changed = torch.linspace(-2, 2, 9), set()
    for known in architectures():
        for rule in (*known.model_tensors.values(), *known.layer_tensors.values(), *known.recurrent_tensors.values()):
            if rule.change is not None:
                stored = rule.change.store(values)
                assert not stored.equal(values), (known.name, rule.name)
                assert rule.change.load(stored).allclose(values, atol=1e-6), (known.name, rule.name)
                changed.add(rule.name)
    assert {"input_layernorm", "linear_attn.A_log", "model.norm"} <= changed


def test_rows_of_delta_nets_are_sorted_by_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hugging Face has q, k, v and z of one key head after the other: here of 3, 3, 10 and 10 rows."""
    spec = SimpleNamespace(heads=4, key_heads=2, key_dim=3, value_dim=5)
    monkeypatch.setattr(qwen3next, "delta_net", lambda config: spec)
    config: Any = None
    starts = [(part.start, len(part)) for part in qwen3next._by_kind(config)]
    assert starts == [(0, 3), (26, 3), (3, 3), (29, 3), (6, 10), (32, 10), (16, 10), (42, 10)]


def test_baichuan_of_13b_is_refused(tmp_path: Path) -> None:
    make(tmp_path / "hf", "llama", {"num_key_value_heads": 4})
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    keys = {**gguf_files.byte_tokenizer(config["vocab_size"]), "baichuan.block_count": 40}
    gguf_files.write_model(tmp_path / "hf", tmp_path / "model.gguf", "baichuan", "F32", config, keys)
    with pytest.raises(ModelError, match="ALiBi"):
        open_model_folder(tmp_path / "model.gguf")
