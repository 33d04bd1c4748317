"""Test what a pass holds next to weights and cache: values of a layer, masks, copied keys, and shares of GPUs."""

from dataclasses import replace
from typing import Any

import pytest

from mycli.runtime.memory.estimate import activation_bytes, estimate, rank_bytes
from mycli.runtime.memory.workspace import mask_bytes, pass_values
from mycli.runtime.quantization.scheme import Packing
from tests.support.published import plan, published


def test_a_layer_of_attention_alone_holds_what_it_projects_and_rotates() -> None:
    """The model has 4,096 values of queries and of hidden states, 1,024 of keys and of values."""
    layer = replace(published("Llama-3.1-8B").layer_specs[0], mlp=None)
    projected, rotated = 4096 + 2 * 1024, 4096 + 1024
    assert pass_values(layer) == 2 * 4096 + projected + rotated + 4096 + 4096


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("Mixtral-8x7B", 2 * 8 + 2 * 3 * 14336 + 4096),
        ("GLM-4.5-Air", 2 * 128 + 8 * (1408 + 4096) + 2 * 4096),  # the sums, and the output of the shared expert
        ("Qwen1.5-MoE-A2.7B", 2 * 60 + 4 * 5632 + 2048),  # the shared expert has more values
        ("Llama-4-Scout", 2 * 16 + 4 * 8192 + 5120),
    ],
)
def test_layers_of_experts_hold_the_larger_of_the_chosen_and_the_shared(name: str, values: int) -> None:
    config = published(name)
    assert pass_values(config.layer_specs[-1]) == 2 * config.hidden_size + values


def test_parallel_streams_and_inputs_of_each_layer_are_held() -> None:
    """The model has four streams, as they enter and as predicted, and twice in fp32, and 256 inputs of 30 layers."""
    model = plan("gemma-3n-E2B")
    values = 2 * 2048 + 6 * 4 * 2048 + 4 * 8192 + 2048
    assert pass_values(model.config.layer_specs[-1]) == values
    assert activation_bytes(model) == 512 * (values + 30 * 256) * 2


@pytest.mark.parametrize(
    ("name", "changes", "token"),
    [
        ("Llama-3.1-8B", {}, 2 * 8 * 128 * 2),
        ("Llama-3.1-8B", {"gpu": True}, 0),
        ("Llama-3.1-8B", {"gpu": True, "dtype": "float32"}, 2 * 8 * 128 * 4),
        ("DeepSeek-V2-Lite", {"gpu": True}, (512 + 64) * 2),
        ("Qwen3.5-9B", {"gpu": True}, 0),
        ("Mamba-Codestral-7B", {}, 0),
    ],
)
def test_keys_of_several_sequences_are_gathered_where_no_kernel_reads_them(
    name: str, changes: dict[str, Any], token: int
) -> None:
    """The keys are those of a layer at a time, in whole blocks: 1,000 tokens are 63 blocks of 16."""
    several = plan(name, context=1000, batch=2, **changes)
    assert estimate(several).workspace.cache == token * 1008
    assert estimate(replace(several, batch=1)).workspace.cache == 0


def test_on_a_gpu_a_kernel_reads_int4_of_the_head_sizes_that_it_has() -> None:
    model = plan("Llama-3.1-8B", context=1008, gpu=True, kv="int4")
    odd = replace(model, config=replace(model.config, head_dim=96))
    assert (estimate(model).workspace.cache, estimate(odd).workspace.cache) == (0, 2 * 8 * 96 * 2 * 1008)


def test_masks_of_windows_and_capped_scores_on_a_cpu() -> None:
    """The masks are of the context and of the window, a mask is copied in bf16; scores of two heads are in fp32."""
    assert mask_bytes(plan("gemma-2-9b", context=8192)) == 512 * 8192 * (2 + 2 + 2 * 3 * 4)


def test_masks_of_windows_and_scores_with_sinks_on_a_gpu_without_the_kernel() -> None:
    """The model has a window of 128 tokens with keys and values for 64 heads, and scores of 8 heads of a KV head."""
    model, keys = replace(plan("gpt-oss-20b", context=8192, gpu=True), dtype="float32"), 128 + 2047
    windows = 2048 * keys * (1 + 4) + 2 * 64 * 64 * keys * 4
    assert mask_bytes(model) == windows + 2048 * 8192 * (3 * 4 * 8 + 1)


def test_of_layers_that_differ_the_largest_decides() -> None:
    """Nemotron-H has layers of attention, of states and of an MLP; in Gemma 4 every fifth layer has longer keys."""
    assert activation_bytes(plan("Nemotron-H-8B")) == 512 * (2 * 4096 + 4 * 21504 + 4096) * 2
    assert estimate(plan("gemma-4-E2B", context=1024, kv="int8")).workspace.cache == 2 * 512 * 1024 * 2


@pytest.mark.parametrize(("name", "weights"), [("Llama-3.1-8B", 1 << 24), ("SmolLM2-135M", 2 * 1536 * 576)])
def test_a_cpu_decodes_tables_of_floats_in_parts(name: str, weights: int) -> None:
    nf4 = plan(name, Packing(4, 64, codes="nf4"))
    assert estimate(nf4).workspace.dequantization == 2 * weights
    one_layer = {name: packing for name, packing in nf4.packings.items() if ".layers.3." in name}
    integers = plan(name, Packing(4, 64))
    mixed = replace(integers, packings={**integers.packings, **one_layer})
    assert estimate(mixed).workspace.dequantization == 2 * weights


@pytest.mark.parametrize(("name", "rotations"), [("Llama-3.1-8B", 128), ("gemma-3-4b", 2 * 256)])
def test_each_rotation_has_a_table_of_the_context(name: str, rotations: int) -> None:
    assert estimate(plan(name, context=1000)).workspace.rope == 1000 * rotations * 2


def test_gpus_share_weights_and_the_cache_by_heads() -> None:
    """The 8 KV heads are held twice by 16 GPUs; every GPU has whole buffers."""
    draft = plan("Llama-3.2-1B")
    model = plan("Llama-3.1-8B", context=1024, batch=2)
    parts = [estimate(part) for part in (model, replace(draft, context=1024, batch=2))]
    for ranks, cache in ((2, 2), (8, 8), (16, 8)):
        shares = [(part.weights + part.embeddings) // ranks + part.cache // cache for part in parts]
        whole = parts[0].workspace.total + parts[0].runtime
        assert rank_bytes(model, ranks) == shares[0] + whole
        assert rank_bytes(replace(model, draft=draft), ranks) == sum(shares) + whole
