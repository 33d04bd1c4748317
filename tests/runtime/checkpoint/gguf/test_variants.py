"""Test variants of recorded GGUF files that other programs write, or the converter for other models."""

import pytest
import transformers

from mycli.runtime.checkpoint.gguf.architectures import written_architecture
from mycli.runtime.errors import ModelError
from mycli.runtime.models.experts_spec import ExpertsSpec
from tests.support.gguf_facts import FACTS, gguf_folder


@pytest.mark.parametrize(
    ("name", "period", "sliding"),
    [
        ("gemma3-window7-tied", 3, [True, True, False] * 2 + [True]),
        ("gpt_oss-window7-gqa4:2", 3, [True, True, False, True]),
        ("cohere2-window7-tied", 0, [True] * 4),
        ("laguna-heads-by-layer-window7", 2, [False, True, False]),
    ],
)
def test_a_window_pattern_may_be_a_number(name: str, period: int, sliding: list[bool]) -> None:
    """A number is the period of layers without a window, which end a period, and begin one in laguna."""
    facts = FACTS[name]
    key = f"{facts['keys']['general.architecture']}.attention.sliding_window_pattern"
    config = gguf_folder({**facts, "keys": {**facts["keys"], key: period}}).config
    assert [window is not None for window in config.windows] == sliding


@pytest.mark.parametrize(("period", "attention"), [(None, [3]), (3, [2])])
@pytest.mark.parametrize("name", ["qwen3_5-delta", "qwen3_5_moe-8top3", "qwen3_next-8top3"])
def test_files_without_a_list_of_recurrent_layers_have_a_period(
    name: str, period: int | None, attention: list[int]
) -> None:
    """Each fourth layer has attention, unless the file says otherwise."""
    facts = FACTS[name]
    keys = {key: value for key, value in facts["keys"].items() if not key.endswith(("_layers", "_interval"))}
    if period is not None:
        keys[f"{keys['general.architecture']}.full_attention_interval"] = period
    config = gguf_folder({**facts, "keys": keys}).config
    assert [layer.index for layer in config.layer_specs if layer.recurrent is None] == attention


def test_small_thinker_without_windows_rotates_in_all_layers() -> None:
    facts, key = FACTS["smallthinker-layouts-softmax-tied"], "smallthinker.attention.sliding_window"
    for keys in ({**facts["keys"], key: 0}, {name: value for name, value in facts["keys"].items() if name != key}):
        config = gguf_folder({**facts, "keys": keys}).config
        assert not any(config.windows) and all(config.layer_rope(layer) for layer in range(config.layers))
        assert written_architecture(config).metadata(config)[key] == 0


@pytest.mark.parametrize(
    "name", ["exaone4-window7", "gemma3-window7-tied", "laguna-heads-by-layer-window7", "mellum-window7"]
)
def test_without_a_window_transformers_takes_the_config(name: str) -> None:
    """It checks types: in some families the window must be a number."""
    facts = FACTS[name]
    keys = {key: value for key, value in facts["keys"].items() if ".attention.sliding_window" not in key}
    raw = dict(gguf_folder({**facts, "keys": keys}).raw.values)
    config = transformers.AutoConfig.for_model(**raw)
    assert set(config.layer_types) == {"full_attention"}


@pytest.mark.parametrize(("name", "largest"), [("gemma2-window7-tied", 46), ("gemma3-window7-tied", 62)])
def test_queries_of_gemma_are_scaled_by_the_size_of_a_head_except_in_the_27b_model(name: str, largest: int) -> None:
    """As in llama.cpp: there by hidden_size / heads, which is 32 here; a head has 16 values."""
    facts, architecture = FACTS[name], name.partition("-")[0]
    keys = {**facts["keys"], f"{architecture}.attention.head_count": 2}
    assert gguf_folder({**facts, "keys": keys}).config.attention_scale == 16**-0.5
    keys[f"{architecture}.block_count"] = largest
    assert gguf_folder({**facts, "keys": keys}).config.attention_scale == 32**-0.5


@pytest.mark.parametrize("name", ["kimi_linear-8top3", "bailing_hybrid-8top3", "mimo_v2_flash-window7"])
def test_groups_of_experts_are_read(name: str) -> None:
    facts = FACTS[name]
    others = {key: value for key, value in facts["keys"].items() if ".expert_group" not in key}
    names = [f"{others['general.architecture']}.expert_group_{ending}" for ending in ("count", "used_count")]
    for values, groups in (((4, 2), (4, 2)), ((0, 0), (1, 1)), ((), (1, 1))):
        keys = dict(zip(names, values, strict=False))
        config = gguf_folder({**facts, "keys": {**others, **keys}}).config
        routing = next(spec.mlp for spec in config.layer_specs if isinstance(spec.mlp, ExpertsSpec)).routing
        assert (routing.groups, routing.top_groups) == groups


def test_the_head_of_a_reranker_is_not_read() -> None:
    facts = FACTS["qwen3-qk-norm-hd32"]
    answers = {"cls.output.weight": [64, 2]}
    folder = gguf_folder({**facts, "tensors": {**facts["tensors"], **answers}})
    assert set(folder.checked_manifest().tensors) == {name for name, _ in folder.config.tensors()}
    untied = {name: shape for name, shape in facts["tensors"].items() if name != "output.weight"}
    wide = {**untied, **answers, "token_embd.weight": [4096, 97]}
    keys = {**facts["keys"], "qwen3.embedding_length": 4096}
    with pytest.raises(ModelError, match=r"cls\.output\.weight is a head of two tokens"):
        gguf_folder({**facts, "keys": keys, "tensors": wide})
    separate = {**wide, "output.weight": [4096, 97]}
    for tensors in (separate, {name: shape for name, shape in separate.items() if name not in answers}):
        assert not gguf_folder({**facts, "keys": keys, "tensors": tensors}).config.tie_embeddings


def test_gemma_4_has_experts_where_the_file_counts_them() -> None:
    facts = FACTS["gemma4-ple-shared-kv-double"]
    counts = {"expert_count": 8, "expert_used_count": 2, "expert_feed_forward_length": 32}
    keys = {**facts["keys"], **{f"gemma4.{key}": count for key, count in counts.items()}}
    mixture = gguf_folder({**facts, "keys": keys}).config.layer(0).mlp
    assert isinstance(mixture, ExpertsSpec) and (len(mixture.experts), mixture.routing.top_k) == (8, 2)
    assert mixture.experts[0].size == 32
    assert not isinstance(gguf_folder(facts).config.layer(0).mlp, ExpertsSpec)


def test_mobile_llm_is_a_llama_4_without_experts() -> None:
    """Its key of the window is 0: full attention and rotation in every layer, and queries that are not scaled."""
    facts = FACTS["llama4-chunk16-4top1"]
    changes = {"expert_count": 0, "expert_used_count": 0, "interleave_moe_layer_step": 0, "attention.sliding_window": 0}
    keys = {**facts["keys"], **{f"llama4.{key}": value for key, value in changes.items()}}
    dense = {f"blk.{layer}.ffn_{part}.weight": [64, 96] for layer in range(4) for part in ("gate", "up")}
    dense |= {f"blk.{layer}.ffn_down.weight": [96, 64] for layer in range(4)}
    tensors = {name: shape for name, shape in facts["tensors"].items() if "exp" not in name and "gate_inp" not in name}
    folder = gguf_folder({**facts, "keys": keys, "tensors": {**tensors, **dense}})
    assert set(folder.checked_manifest().tensors) == {name for name, _ in folder.config.tensors()}
    assert all(layer.attention.chunk is None for layer in folder.config.layer_specs)
    assert [rope.dim for rope in folder.config.distinct_ropes] == [16]


def test_older_files_of_minicpm_have_the_multipliers_of_the_2b_model() -> None:
    facts = FACTS["minicpm-tied"]
    names = ("embedding_scale", "residual_scale", "logit_scale")
    keys = {key: value for key, value in facts["keys"].items() if not key.endswith(names)}
    config = gguf_folder({**facts, "keys": keys}).config
    assert (config.embedding_scale, config.logit_scale) == (12, 256 / 64)
    assert config.residual_scale == pytest.approx(1.4 / 3**0.5)


@pytest.mark.parametrize(("name", "count"), [("granitemoe_swa-window7-shared", 1), ("bailing_hybrid-8top3", 2)])
def test_some_mixtures_need_no_shared_expert(name: str, count: int) -> None:
    """llama.cpp's converter leaves out the keys of shared experts if a model has none."""
    facts = FACTS[name]
    keys = {key: value for key, value in facts["keys"].items() if "shared" not in key}
    tensors = {name: shape for name, shape in facts["tensors"].items() if "shexp" not in name}
    folder = gguf_folder({**facts, "keys": keys, "tensors": tensors})
    assert len(keys) == len(facts["keys"]) - count and len(tensors) < len(facts["tensors"])
    assert set(folder.checked_manifest().tensors) == {name for name, _ in folder.config.tensors()}


@pytest.mark.parametrize(
    ("norms", "names", "theta"),
    [
        (2, ["ln_attn", "ln_mlp"], 10000.0),
        (1, ["input_layernorm"], 500042.0),  # 11B, whose base the converter does not write
    ],
)
def test_large_falcons_have_groups_of_keys_and_one_or_two_norms(norms: int, names: list[str], theta: float) -> None:
    facts = FACTS["falcon-7b"]
    tensors = {
        name: [64, 128] if name.endswith("attn_qkv.weight") else shape for name, shape in facts["tensors"].items()
    }
    if norms == 2:
        tensors |= {
            name.replace("attn_norm", "attn_norm_2"): shape for name, shape in tensors.items() if "attn_norm" in name
        }
    facts = {**facts, "keys": {**facts["keys"], "falcon.attention.head_count_kv": 2}, "tensors": tensors}
    folder = gguf_folder(facts)
    assert set(folder.checked_manifest().tensors) == {name for name, _ in folder.config.tensors()}
    layer = folder.config.layer(0)
    assert [norm.name and norm.name.rpartition(".")[2] for norm in layer.norms()] == names
    assert [linear.out_features for linear in layer.attention.qkv] == [64, 32, 32]
    assert {rope.theta for rope in folder.config.distinct_ropes} == {theta}
    based = gguf_folder({**facts, "keys": {**facts["keys"], "falcon.rope.freq_base": 25000.0}})
    assert {rope.theta for rope in based.config.distinct_ropes} == {25000.0}
