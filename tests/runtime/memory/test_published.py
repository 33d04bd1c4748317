"""Test counts of published models: parameters, weights, bytes read per token, caches and states."""

import math
from dataclasses import replace

import pytest

from mycli.runtime.memory.cache_shape import SHARED_BLOCK
from mycli.runtime.memory.ceiling import bytes_per_step
from mycli.runtime.memory.estimate import cache_bytes, state_bytes
from mycli.runtime.memory.plan import CACHE_BLOCK
from mycli.runtime.memory.weights import embedding_bytes, weight_bytes
from mycli.runtime.models.config import ModelConfig
from mycli.runtime.models.registry import families
from mycli.runtime.quantization.scheme import Packing
from tests.support.families import EMBEDDING
from tests.support.published import PUBLISHED, plan, published


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_parameter_counts(name: str) -> None:
    found, told = published(name).parameters(), PUBLISHED[name]
    assert found == told["parameters"] if "parameters" in told else found == pytest.approx(told["about"], rel=0.02)


@pytest.mark.parametrize("name", [name for name, told in PUBLISHED.items() if "active" in told])
def test_published_active_parameters(name: str) -> None:
    """The active parameters are as published, and a token reads no more than these plus an embedding row."""
    config, told = published(name), PUBLISHED[name]["active"]
    tables = 0 if config.tie_embeddings else config.vocab_size * config.hidden_size
    counted = config.active_parameters() - (0 if PUBLISHED[name].get("embeddings", True) else tables)
    assert counted == pytest.approx(told, rel=0.03)
    read = 2 * (config.active_parameters() - tables) + _beside(config) + 2 * state_bytes(config)
    assert bytes_per_step(plan(name), 0) == read


def test_experts_read_by_a_batch() -> None:
    """The two tokens choose 8 of 128 experts each, 15.5 on average; with infinitely many tokens all are read."""
    one, two, many = (plan("Qwen3-30B-A3B", batch=batch) for batch in (1, 2, 1 << 20))
    expert = 48 * 3 * 2048 * 768 * 2
    assert bytes_per_step(two, 0) - bytes_per_step(one, 0) == pytest.approx(7.5 * expert)
    assert bytes_per_step(many, 0) == pytest.approx(2 * (30532122624 - 151936 * 2048))


@pytest.mark.parametrize("packing", [Packing(4, 128), Packing(8, None)], ids=lambda packing: packing.name)
def test_memory_of_experts_is_that_of_all_of_them(packing: Packing) -> None:
    """The bytes are counted linear by linear with dense router and norms, independent of the experts a token uses."""
    model = plan("OLMoE-1B-7B", packing)
    linears = [linear for linear in model.config.linears() if linear.name != "lm_head"]
    assert len(linears) == 16 * (4 + 64 * 3)
    dense = 16 * (64 * 2048 + 4 * 2048) + 2048
    packed = sum(packing.bytes(each.out_features, each.in_features) for each in linears)
    assert weight_bytes(model) == packed + 2 * dense


# Families without a published configuration recorded here.
UNPUBLISHED = {
    "PanguEmbedded",
    "baichuan",
    "bailing_moe",
    "cohere2_moe",
    "deepseek",
    "diffllama",
    "doge",
    "exaone",
    "flex_olmo",
    "flint",
    "granite_swa",
    "granitemoe_swa",
    "granitemoeshared",
    "hy_v3",
    "hyperclovax",
    "jais2",
    "kolibri1",
    "laguna",
    "lfm3",
    "mellum",
    "ministral",
    "muse_glimmer_text",
    "nanochat",
    "nemotron-nas",
    "olmo_hybrid",
    "sarvam_mla",
    "sarvam_moe",
    "telechat3",
}


def test_every_family_has_a_published_model() -> None:
    assert {published(name).model_type for name in PUBLISHED} == set(families()) - UNPUBLISHED - EMBEDDING


@pytest.mark.parametrize(
    "name, layers, of_each",
    [
        ("gemma-2-2b", 26, 2 * 4 * 256 * 2),
        ("gemma-3-4b", 34, 2 * 4 * 256 * 2),
        ("gemma-3-1b", 26, 2 * 1 * 256 * 2),
        ("SmolLM3-3B", 36, 2 * 4 * 128 * 2),
        ("GLM-4-9B-0414", 40, 2 * 2 * 128 * 2),
        ("Command-R7B", 32, 2 * 8 * 128 * 2),
        ("ERNIE-4.5-0.3B", 18, 2 * 2 * 128 * 2),
        ("Phi-4-mini", 32, 2 * 8 * 128 * 2),
        ("AFM-4.5B", 36, 2 * 4 * 128 * 2),
        ("Ministral-3-3B", 26, 2 * 8 * 128 * 2),
        ("Ministral-3-8B", 34, 2 * 8 * 128 * 2),
        ("Ministral-3-14B", 40, 2 * 8 * 128 * 2),
        ("Hunyuan-0.5B", 24, 2 * 8 * 128 * 2),
        ("Hunyuan-7B", 32, 2 * 8 * 128 * 2),
        ("CWM-32B", 64, 2 * 8 * 128 * 2),
        ("Qwen3-30B-A3B", 48, 2 * 4 * 128 * 2),
        ("gpt-oss-20b", 24, 2 * 8 * 64 * 2),
        ("GLM-4.5-Air", 46, 2 * 8 * 128 * 2),
        ("ERNIE-4.5-21B-A3B", 28, 2 * 4 * 128 * 2),
        ("Hunyuan-A13B", 32, 2 * 8 * 128 * 2),
        ("MiniMax-M2", 62, 2 * 8 * 128 * 2),
        ("dots.llm1", 62, 2 * 32 * 128 * 2),
        ("Solar-Open-100B", 48, 2 * 8 * 128 * 2),
        ("Command-R", 40, 2 * 64 * 128 * 2),
        ("GLM-4-9B", 40, 2 * 2 * 128 * 2),
        ("helium-1-preview-2b", 24, 2 * 20 * 128 * 2),
        ("DeepSeek-V2-Lite", 27, (512 + 64) * 2),
        ("DeepSeek-V3", 61, (512 + 64) * 2),  # 70,272 bytes, as published
        ("GLM-4.7-Flash", 47, (512 + 64) * 2),
        ("MiniCPM3-4B", 62, (256 + 32) * 2),
    ],
)
def test_the_cache_of_a_token(name: str, layers: int, of_each: int) -> None:
    assert cache_bytes(plan(name, context=CACHE_BLOCK)) == CACHE_BLOCK * layers * of_each


def test_a_packed_weight_of_latents_is_decoded_at_load() -> None:
    packed = plan("DeepSeek-V2-Lite", Packing(4, 64))
    dense = {name: packing for name, packing in packed.packings.items() if not name.endswith(".kv_b_proj")}
    assert len(packed.packings) - len(dense) == 27
    assert weight_bytes(packed) == weight_bytes(replace(packed, packings=dense))


def test_the_cache_of_layers_that_differ() -> None:
    """The layers with full attention have longer heads, fewer in 31B; layers with shared keys store nothing."""
    small = 12 * 2 * 1 * 256 + 3 * 2 * 1 * 512  # 15 of 35 layers store keys and values, every fifth with full attention
    middle = 20 * 2 * 2 * 256 + 4 * 2 * 2 * 512  # 24 of 42 layers, every sixth with full attention
    large = 50 * 2 * 16 * 256 + 10 * 2 * 4 * 512
    many = 25 * 2 * 8 * 256 + 5 * 2 * 2 * 512
    unified = 40 * 2 * 8 * 256 + 8 * 2 * 1 * 512
    for name, values in (
        ("gemma-4-E2B", small),
        ("gemma-4-E4B", middle),
        ("gemma-4-12B", unified),
        ("gemma-4-26B-A4B", many),
        ("gemma-4-31B", large),
    ):
        assert cache_bytes(plan(name, context=CACHE_BLOCK)) == CACHE_BLOCK * values * 2


def test_what_is_told_beside_is_read_by_rows() -> None:
    """The per-layer embedding table has half of E2B's 4.6 billion parameters, and a token reads one row of it."""
    model = plan("gemma-4-E2B")
    table = 262144 * 35 * 256
    assert embedding_bytes(model) > 2 * table
    assert bytes_per_step(model, 0) == pytest.approx(2 * (4.63e9 - table), rel=0.01)
    assert model.config.parameters() - table == pytest.approx(2.3e9, rel=0.02), "effective parameters, as published"
    larger = published("gemma-4-E4B")
    assert larger.parameters() - 262144 * 42 * 256 == pytest.approx(4.5e9, rel=0.035), "likewise, to two digits"


@pytest.mark.parametrize("name", PUBLISHED)
def test_dense_weights_are_every_parameter_once(name: str) -> None:
    model = plan(name)
    found = weight_bytes(model) + embedding_bytes(model)
    assert found == 2 * model.config.parameters() + _beside(model.config)


def _beside(config: ModelConfig) -> int:
    """Return the bytes of a bf16 model beyond two per parameter: gains and other fp32 tensors, gains of one."""
    specs = config.layer_specs
    sums = [norm for spec in specs for norm in spec.norms()] + [config.norm()]
    sums_in_fp32 = 2 * sum(norm.elements for norm in sums if norm.fp32_gain)
    parts = [part for spec in specs for part in spec.parts]
    every = [norm for part in parts for norm in (part.norm, part.output_norm, *part.inner_norms()) if norm is not None]
    gains_of_one = 2 * sum(norm.size for norm in (*every, config.norm()) if norm.name is None)
    recurrent = [spec.recurrent for spec in specs if spec.recurrent is not None]
    return sums_in_fp32 + gains_of_one + 2 * sum(math.prod(shape) for spec in recurrent for _, shape in spec.tensors())


@pytest.mark.parametrize(
    "name, state",
    [
        ("LFM2-1.2B", 10 * 2 * 2048),
        ("LFM2-8B-A1B", 18 * 2 * 2048),
        ("Qwen3.5-9B", 24 * (32 * 128 * 128 + 3 * 8192)),
        ("Qwen3.5-27B", 48 * (48 * 128 * 128 + 3 * 10240)),
        ("Qwen3.5-35B-A3B", 30 * (32 * 128 * 128 + 3 * 8192)),
        ("Qwen3-Next-80B-A3B", 36 * (32 * 128 * 128 + 3 * 8192)),
    ],
)
def test_the_states_of_sequences(name: str, state: int) -> None:
    """The states are fp32 and independent of the context; two per sequence plus one, read and written once per step."""
    short, long = (plan(name, context=context) for context in (SHARED_BLOCK, 10 * SHARED_BLOCK))
    assert state_bytes(short.config) == 4 * state
    for sequences in (1, 4):
        grown = [cache_bytes(replace(one, running=sequences)) for one in (short, long)]
        assert (grown[1] - grown[0]) % 9 == 0
        assert grown[0] - (grown[1] - grown[0]) // 9 == (2 * sequences + 1) * 4 * state
    told = 2 * (long.config.vocab_size * long.config.hidden_size) * (not long.config.tie_embeddings)
    idle = 2 * (long.config.parameters() - long.config.active_parameters())
    assert bytes_per_step(long, 0) == weight_bytes(long) + embedding_bytes(long) - told - idle + 2 * 4 * state
