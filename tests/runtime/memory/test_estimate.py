"""Test memory and bandwidth predictions against published figures, and against each other."""

import subprocess
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mycli.runtime.checkpoint.open_folder import open_model_folder
from mycli.runtime.engine.loading.loader import load_model
from mycli.runtime.memory.ceiling import bytes_per_step, tokens_per_second
from mycli.runtime.memory.estimate import (
    CPU_KEPT,
    cache_bytes,
    estimate,
    longest_context,
)
from mycli.runtime.memory.fit import PackingScheme
from mycli.runtime.memory.plan import CACHE_BLOCK, MemoryPlan
from mycli.runtime.memory.weights import embedding_bytes, head_bytes, weight_bytes
from mycli.runtime.memory.workspace import dense_cache_bytes, mask_bytes, pass_values
from mycli.runtime.models.config import ModelConfig
from mycli.runtime.models.layer_spec import LayerSpec
from mycli.runtime.models.part_spec import RopeScaling
from mycli.runtime.quantization.scheme import Codes, Packing
from mycli.runtime.utils.dtypes import PromptCopy
from mycli.runtime.utils.units import GIB, human_bytes
from tests.support.embedding_models import encoder
from tests.support.families import CASES, make
from tests.support.models import CPU
from tests.support.published import plan, published

INT4 = Packing(4, 128)


@pytest.mark.parametrize("bits, gigabytes", [(16, 140), (8, 70), (4, 35)])
def test_70b_at_16_8_4_bits(bits: int, gigabytes: float) -> None:
    packing = Packing(bits, None) if bits < 16 else None
    model = plan("Llama-3.1-70B", packing, packing)
    # The rule of thumb counts every parameter at `bits`; the embedding table stays at 16.
    table = 2 * model.config.vocab_size * model.config.hidden_size
    total = weight_bytes(model) + embedding_bytes(model) - table * (1 - bits / 16)
    assert total / 1e9 == pytest.approx(gigabytes, rel=0.01)


def test_7b_cache_is_one_gib_at_2048() -> None:
    assert cache_bytes(plan("Llama-2-7B", context=2048)) == GIB


def test_175b_cache_is_nine_gib_at_2048() -> None:
    gpt3 = ModelConfig(
        "llama", 12288, 96, 96, 96, 128, 49152, 50257, 2048, 1e-5, 10000.0, RopeScaling(), False, "float16"
    )
    assert cache_bytes(MemoryPlan(gpt3, context=2048)) == 9 * GIB


def test_grouped_queries_make_the_cache_smaller() -> None:
    assert cache_bytes(plan("Llama-3.1-8B", context=1024)) == 128 * 1024 * 1024  # 128 KiB per token


@pytest.mark.parametrize("context", [1, 15, 16, 17, 8192])
def test_cache_is_whole_blocks(context: int) -> None:
    one = cache_bytes(plan("Llama-3.1-8B", context=CACHE_BLOCK))
    assert cache_bytes(plan("Llama-3.1-8B", context=context)) == one * -(-context // CACHE_BLOCK)


def test_int8_cache_is_codes_and_a_scale_for_each_vector() -> None:
    model = replace(plan("Llama-3.1-8B", context=1024), kv="int8")
    assert cache_bytes(model) == 2 * 32 * 8 * 1024 * (128 + 4)
    assert bytes_per_step(model, 100) - bytes_per_step(model, 0) == 2 * 32 * 8 * 100 * (128 + 4)
    wide = replace(model, dtype="float32", kv="bf16")
    assert cache_bytes(wide) == 2 * 32 * 8 * 1024 * 128 * 2
    assert estimate(wide).workspace.cache == 2 * 8 * 1024 * 128 * 4
    assert estimate(model).workspace.cache == 2 * 8 * 1024 * 128 * 2
    assert estimate(replace(model, kv="bf16")).workspace.cache == 0


def test_int4_cache_is_half_a_byte_a_value_and_a_scale_of_two_for_every_32() -> None:
    model = replace(plan("Llama-3.1-8B", context=1024), kv="int4")
    assert cache_bytes(model) == 2 * 32 * 8 * 1024 * (64 + 4 * 2)
    assert bytes_per_step(model, 100) - bytes_per_step(model, 0) == 2 * 32 * 8 * 100 * (64 + 4 * 2)
    assert estimate(model).workspace.cache == 2 * 8 * 1024 * 128 * 2


def test_packed_linear_is_codes_and_scales() -> None:
    dense, packed = plan("Llama-3.1-8B"), plan("Llama-3.1-8B", INT4)
    linears = 6_979_321_856  # weights in the linears of all blocks
    assert weight_bytes(dense) - weight_bytes(packed) == linears * (16 - 4.125) / 8


def test_three_bits_round_up_to_words() -> None:
    config = replace(published("SmolLM2-135M"), layers=1, hidden_size=48, intermediate_size=48, heads=3, head_dim=16)
    row = 4 * 5 + 2  # 48 codes of 3 bits are 144 bits: five words; one scale
    rows = 48 + 48 + 48 + 48 + 3 * 48  # q k v o, gate up down
    norms = 3 * 48 * 2
    assert weight_bytes(MemoryPlan(config, PackingScheme(Packing(3, None)).packings(config))) == rows * row + norms


def test_on_a_cpu_packed_rows_fill_blocks_of_16() -> None:
    config, packing = replace(published("Qwen2.5-7B"), vocab_size=50257), Packing(4, 128)
    model = MemoryPlan(config, {"lm_head": packing})
    assert head_bytes(model) == packing.bytes(50272, config.hidden_size)
    assert head_bytes(replace(model, gpu=True)) == packing.bytes(50257, config.hidden_size)


@pytest.mark.parametrize("case", ["olmo-clip", "nanochat-tied-biases-low-cap", "gpt2-tied"])
def test_dense_weights_are_those_in_memory(case: str, tmp_path: Path) -> None:
    """Norms without a tensor have gains of one in memory."""
    make(tmp_path, *CASES[case])
    folder = open_model_folder(tmp_path)
    plan = MemoryPlan(folder.config)
    assert weight_bytes(plan) + embedding_bytes(plan) == load_model(folder, CPU).model.nbytes


def test_tied_head_is_held_once_and_packed_head_beside_the_table() -> None:
    config = published("Qwen2.5-0.5B")
    assert embedding_bytes(MemoryPlan(config)) == 2 * config.vocab_size * config.hidden_size
    config = published("Qwen2.5-7B")
    table = config.vocab_size * config.hidden_size
    assert embedding_bytes(plan("Qwen2.5-7B", head=Packing(8, None))) == 3 * table + 2 * config.vocab_size


@pytest.mark.parametrize(
    "packing, head, depth, expected",
    [
        (INT4, INT4, 0, 1111),
        (INT4, INT4, 2048, 1039),
        (INT4, INT4, 8192, 870),
        (INT4, INT4, 32768, 527),
        (INT4, Packing(8, None), 0, 1043),
        (INT4, None, 0, 925),
        (Packing(4, 64), Packing(4, 64), 0, 1079),
        (Packing(3, 128), Packing(3, 128), 0, 1467),
        (None, None, 0, 286),
    ],
    ids=str,
)
def test_ceiling_of_8b_at_h200_copy_bandwidth(
    packing: Packing | None, head: Packing | None, depth: int, expected: int
) -> None:
    assert tokens_per_second(plan("Llama-3.1-8B", packing, head), depth, 4300) == pytest.approx(expected, rel=2e-3)


def test_a_batch_shares_the_reading_of_weights_not_of_the_cache() -> None:
    one, four = plan("Llama-3.1-8B"), plan("Llama-3.1-8B", batch=4)
    assert tokens_per_second(four, 0, 1000) == pytest.approx(4 * tokens_per_second(one, 0, 1000))
    assert bytes_per_step(four, 100) - bytes_per_step(four, 0) == 4 * (
        bytes_per_step(one, 100) - bytes_per_step(one, 0)
    )


def test_chunked_attention_bounds_what_is_read() -> None:
    """Llama 4 Scout: 36 of 48 layers read at most 8192 tokens, the others all."""
    model = plan("Llama-4-Scout", context=131072)
    token = 2 * 8 * 128 * 2
    read = bytes_per_step(model, 131072) - bytes_per_step(model, 0)
    assert read == token * (36 * 8192 + 12 * 131072)
    assert bytes_per_step(model, 100) - bytes_per_step(model, 0) == token * 48 * 100


def test_of_a_table_of_positions_a_row_of_each_sequence_is_read() -> None:
    for batch in (1, 4):
        model = plan("starcoder", INT4, batch=batch)
        outside = bytes_per_step(model, 0) - weight_bytes(model) - head_bytes(model)
        assert outside == 2 * batch * 6144


def test_of_per_layer_inputs_a_row_of_each_sequence_is_read_and_the_projections_whole() -> None:
    """Gemma 3n E2B: 30 layers of 256 inputs, a projection to them, and six square ones of its parallel streams."""
    for batch in (1, 4):
        model = plan("gemma-3n-E2B", INT4, batch=batch)
        projections = 30 * 256 * 2048 + 6 * 2048 * 2048
        outside = bytes_per_step(model, 0) - weight_bytes(model) - head_bytes(model)
        assert outside == 2 * (batch * 30 * 256 + projections)


def test_only_a_chunk_that_is_not_the_first_needs_a_mask() -> None:
    assert mask_bytes(plan("Llama-3.1-8B", context=512)) == 0
    assert mask_bytes(plan("Llama-3.1-8B", context=8192)) == 512 * 8192 * 3


def test_on_a_gpu_a_kernel_reads_the_cache_without_masks_and_scores() -> None:
    for name in ("Llama-3.1-8B", "Mistral-7B-v0.1", "gemma-2-9b"):
        for kv, batch in product(("auto", "int8", "int4"), (1, 4)):
            long = replace(plan(name, context=32768, gpu=True), kv=kv, batch=batch)
            assert mask_bytes(long) == dense_cache_bytes(long) == 0


def test_on_a_gpu_only_windows_and_written_scores_need_a_mask_without_the_kernel() -> None:
    """The mask covers the keys of a 2,048-token chunk; heads are repeated because torch's masked kernel needs that."""

    def exact(name: str, context: int) -> MemoryPlan:
        return replace(plan(name, context=context, gpu=True), dtype="float32")

    for context in (2048, 8192, 131072):
        assert mask_bytes(exact("Llama-3.1-8B", context)) == 0
    windowed, keys = exact("Mistral-7B-v0.1", 32768), 4096 + 2047
    assert mask_bytes(windowed) == 2048 * keys * (1 + 4) + 2 * 32 * 128 * keys * 4
    assert mask_bytes(replace(windowed, context=4096)) == 0, "the window is as long"
    capped = exact("gemma-2-9b", 8192)
    both = 2048 * (4096 + 2047) * 5 + 2 * 16 * 256 * (4096 + 2047) * 4
    assert mask_bytes(capped) == both + 2048 * 8192 * (3 * 4 * 2 + 1)


def test_latent_attention_on_a_gpu_writes_out_the_scores_of_one_head() -> None:
    assert mask_bytes(plan("DeepSeek-V2-Lite", context=8192, gpu=True)) == 2048 * 8192 * (5 * 4 + 1)


def test_capped_scores_are_those_of_the_layer_with_the_most_query_heads_per_kv_head() -> None:
    base = plan("Llama-3.1-8B", context=512)

    def build(config: ModelConfig, index: int) -> LayerSpec:
        layer = base.config.layer(index)
        attention = replace(layer.attention, softcap=30.0, heads=32 if index % 2 else 8)
        return replace(layer, mixer=attention)

    capped = replace(base, config=replace(base.config, build_layer=build))
    assert mask_bytes(capped) == 512 * 512 * 3 * 4 * 4


def test_workspace_counts_the_largest_product_once() -> None:
    result = estimate(plan("Llama-3.1-8B", INT4, gpu=True))
    assert result.workspace.dequantization == 2 * 14336 * 4096 * 2  # gate and up, as one matrix of bf16
    assert estimate(plan("Llama-3.1-8B", INT4)).workspace.dequantization == 0  # the CPU supports them directly
    assert estimate(plan("Llama-3.1-8B")).workspace.dequantization == 0
    small = estimate(plan("Qwen2.5-0.5B")).workspace
    assert small.allocator == small.activations == 512 * (2 * 896 + 4 * 4864 + 896) * 2
    assert estimate(plan("Llama-3.1-8B")).workspace.allocator == CPU_KEPT and result.workspace.allocator == 0
    assert result.workspace.activations == 2048 * (2 * 4096 + 4 * 14336 + 4096) * 2


def test_a_gpu_holds_codes_of_6_bits_in_bytes() -> None:
    six, eight = (plan("Llama-3.1-8B", Packing(bits, 32, offsets=True)) for bits in (6, 8))
    assert estimate(six).weights < estimate(eight).weights
    assert estimate(replace(six, gpu=True)).weights == estimate(replace(eight, gpu=True)).weights
    steps = [bytes_per_step(replace(each, gpu=True), 0) for each in (six, eight)]
    assert steps[0] == steps[1] > bytes_per_step(six, 0), "a decoding step reads them too"
    odd = plan("Llama-3.1-8B", Packing(6, 8), gpu=True)  # not supported by its kernels
    assert estimate(odd).weights == estimate(replace(odd, gpu=False)).weights
    drafts = [estimate(replace(six, gpu=True, draft=draft)).draft for draft in (six, eight)]
    assert drafts[0] == drafts[1], "a draft's too"


@pytest.mark.parametrize("codes, bits, group", [("iq4", 4, 32), ("iq3_s", 4, 32), ("iq2", 3, 16)])
def test_a_gpu_holds_tables_of_integers_in_half_bytes(codes: Codes, bits: int, group: int) -> None:
    """IQ4_XS takes 5 bits a weight there and IQ2_XS 6, scales of 32 bits among them; as int8 it was 9 and 10."""
    table = Packing(bits, group, codes=codes, scale_dtype="float32", byte_scales="super_blocks")
    found = plan("Llama-3.1-8B", table, gpu=True)
    four = plan("Llama-3.1-8B", Packing(4, group, scale_dtype="float32"), gpu=True)
    assert estimate(found).weights == estimate(four).weights
    assert bytes_per_step(found, 0) == bytes_per_step(four, 0)


@pytest.mark.parametrize("bits, group, offsets", [(6, 16, False), (4, 32, True)], ids=["Q6_K", "Q4_K"])
def test_a_gpu_holds_scales_of_super_blocks_whole(bits: int, group: int, offsets: bool) -> None:
    """The scales take a word each, next to codes in bytes or half bytes."""
    whole = Packing(bits, group, offsets=offsets, scale_dtype="float32")
    kept, plain = (plan("Llama-3.1-8B", replace(whole, byte_scales=one)) for one in ("super_blocks", None))
    assert estimate(replace(kept, gpu=True)).weights == estimate(replace(plain, gpu=True)).weights
    assert estimate(kept).weights < estimate(plain).weights


def test_a_gpu_holds_queries_keys_and_values_of_two_packings_in_one() -> None:
    """Values in Q6_K and queries and keys in Q4_K (Q4_K_M) are one product of 8 bits in groups of 16."""
    four = plan("Llama-3.1-8B", Packing(4, 32, offsets=True, scale_dtype="float32"), gpu=True)
    six = {f"model.layers.{layer}.self_attn.v_proj": Packing(6, 16, scale_dtype="float32") for layer in range(3)}
    mixed = replace(four, packings={**four.packings, **six})
    rows, before = (32 + 8 + 8) * 128, 4096 // 2 + 8 * (4096 // 32)
    assert estimate(mixed).weights - estimate(four).weights == 3 * rows * (4096 + 8 * (4096 // 16) - before)


def test_a_copy_for_prompts_is_the_packed_blocks_once_more_and_no_decoding_step_reads_it() -> None:
    packed = plan("Llama-3.1-8B", INT4, gpu=True)
    less, dense = estimate(packed), plan("Llama-3.1-8B")
    outputs = 32 * (4096 + 2 * 1024 + 4096 + 2 * 14336 + 4096)  # each has a scale in 8 bits
    kinds: dict[PromptCopy, int] = {"16bit": 2 * 6_979_321_856, "fp8": 6_979_321_856 + 4 * outputs}
    for kind, copies in kinds.items():
        copied = replace(packed, prompt_copy=kind)
        more = estimate(copied)
        assert more.weights - less.weights == copies  # of the linears of the blocks
        assert more.embeddings == less.embeddings
        assert bytes_per_step(copied, 100) == bytes_per_step(packed, 100)
        assert estimate(replace(dense, prompt_copy=kind)).weights == estimate(dense).weights
        rounded = 2048 * 14336 + 8 * (1 << 22)  # the widest rows in 8 bits, and a piece while it is rounded
        assert more.workspace.dequantization == (rounded if kind == "fp8" else 0)


def test_products_of_other_sizes_have_no_8_bit_copy() -> None:
    """`down_proj` has 14,344 inputs, which is not a multiple of 16: passes of many rows decode its weights."""
    config = replace(plan("Llama-3.1-8B").config, intermediate_size=14344)
    names = [spec.name for layer in range(32) for group in config.layer(layer).products().values() for spec in group]
    packed = MemoryPlan(config, dict.fromkeys(names, Packing(4, None)), gpu=True, prompt_copy="fp8")
    less = estimate(replace(packed, prompt_copy="none"))
    outputs = 2 * 4096 + 2 * 1024 + 2 * 14344  # of all products but the last
    assert estimate(packed).weights - less.weights == 32 * outputs * (4096 + 4)
    assert estimate(packed).workspace.dequantization == 2 * 4096 * 14344


def test_every_sequence_that_shares_the_cache_has_logits() -> None:
    eight = plan("Llama-2-7B", batch=8)
    shared = estimate(replace(eight, running=32)).workspace.logits
    assert shared == 4 * estimate(eight).workspace.logits == 32 * 32000 * (2 + 5 * 4)


def test_parts_add_up_and_the_runtime_differs_by_target() -> None:
    result = estimate(plan("Llama-3.1-8B", INT4))
    parts = (result.weights, result.embeddings, result.cache, result.draft, result.workspace.total, result.runtime)
    assert result.total == sum(parts) == result.needed + result.runtime
    assert estimate(plan("Llama-3.1-8B", INT4, gpu=True)).runtime != result.runtime


def test_a_draft_brings_its_weights_and_a_cache_of_the_same_context() -> None:
    target = plan("Llama-3.1-8B", context=4096, batch=2)
    draft = plan("Llama-3.2-1B")
    with_draft = estimate(replace(target, draft=draft))
    of_its_own = replace(draft, context=4096, batch=2)
    assert with_draft.draft == 2 * 1_235_814_400 + cache_bytes(of_its_own)
    assert with_draft.total == estimate(target).total + with_draft.draft


def test_fp32_doubles_what_is_dense() -> None:
    half, full = estimate(plan("Qwen2.5-0.5B")), estimate(plan("Qwen2.5-0.5B", dtype="float32"))
    assert (full.weights, full.embeddings, full.cache) == (2 * half.weights, 2 * half.embeddings, 2 * half.cache)


@given(st.integers(min_value=1 << 20, max_value=64 * GIB), st.sampled_from(["Llama-3.1-8B", "Qwen2.5-0.5B"]))
def test_longest_context_fits_and_one_block_more_does_not(free: int, name: str) -> None:
    model = plan(name, INT4)
    longest = longest_context(model, free)
    if longest:
        assert estimate(replace(model, context=longest)).total <= free
    if longest < model.config.max_context:
        assert estimate(replace(model, context=longest + CACHE_BLOCK + 1)).total > free


def test_a_process_that_runs_already_has_its_own_memory_behind_it() -> None:
    model = plan("Llama-3.1-8B", INT4)
    free = estimate(replace(model, context=4096)).needed
    assert longest_context(model, free, started=True) == 4096
    assert longest_context(model, free) < 4096


def test_memory_has_its_unit() -> None:
    assert human_bytes(5.125 * GIB) == "5.12 GiB" and human_bytes(11.5e6) == "11 MiB"


def test_estimate_does_not_import_torch() -> None:
    code = "import sys, mycli.runtime.memory.fit, mycli.runtime.diagnostics.vllm_tp; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_part_that_waits_for_another_is_in_memory() -> None:
    layer = published("Llama-3.1-8B").layer_specs[0]
    assert pass_values(replace(layer, parallel=True)) - pass_values(layer) == 4096


def test_layers_with_attention_and_a_state_space_hold_the_larger_of_the_two(tmp_path: Path) -> None:
    make(tmp_path, *CASES["falcon_h1-multipliers"])
    layer = open_model_folder(tmp_path).config.layer_specs[0]
    assert layer.state_space is not None
    hidden, values = layer.state_space.out.out_features, layer.state_space.forward_values()
    assert pass_values(layer) == 2 * hidden + hidden + values + hidden


def test_layers_without_attention_hold_the_values_of_their_part() -> None:
    config = published("Nemotron-H-8B")
    hidden, layers = config.hidden_size, config.layer_specs
    expected = {
        layer.index: 2 * hidden + layer.recurrent.forward_values() for layer in layers if layer.recurrent is not None
    }
    expected |= {layer.index: 2 * hidden + 4 * layer.dense_mlp.size + hidden for layer in layers if layer.mixer is None}
    assert len(expected) == 24 + 24
    assert {index: pass_values(layers[index]) for index in expected} == expected


@pytest.mark.parametrize(("context", "rows"), [(4096, 4096), (64, 512)])
def test_texts_that_are_read_whole(context: int, rows: int, tmp_path: Path) -> None:
    """A text longer than a chunk is one pass, and several shorter ones are another.

    A window has a mask of all pairs of tokens, and distances in 4 bytes; biases of 4 heads are in fp32, and computed
    from five tensors of distances in 8 bytes.
    """
    pairs, square = rows * context, context**2
    masks = {"bert": 0, "mpnet": 4 * pairs * 4 + 5 * 8 * square, "modernbert": pairs + 4 * square}
    for model_type, expected in masks.items():
        shape = {"local_attention": 8} if model_type == "modernbert" else {}
        folder = encoder(tmp_path / model_type, model_type, max_position_embeddings=4098, **shape)
        plan = MemoryPlan(open_model_folder(folder).config, context=context, dtype="float32")
        assert (mask_bytes(plan), plan.rows) == (expected, rows)
