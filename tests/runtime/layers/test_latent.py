"""Test latent attention: the kernel against its reference, absorbed against expanded products, published FP8 blocks."""

import json
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mycli.runtime.cache.batch import Batch, Chunk
from mycli.runtime.cache.kv_cache import PACKED, KVCache, Stored
from mycli.runtime.checkpoint.open_folder import open_model_folder
from mycli.runtime.device.placement import Placement
from mycli.runtime.engine.loading.loader import load_model
from mycli.runtime.errors import Declined
from mycli.runtime.kernels import reference_attention
from mycli.runtime.kernels.cpu.latent import native_latent_attention
from mycli.runtime.kernels.paged import Ragged
from mycli.runtime.kernels.registry import prepare_product
from mycli.runtime.layers.attention import PagedAttention, PromptAttention
from mycli.runtime.layers.latent import LatentAttention
from mycli.runtime.layers.layer_part import PassContext
from mycli.runtime.layers.rope import Rope
from mycli.runtime.models.latent_spec import LatentAttentionSpec
from mycli.runtime.quantization.packed_weight import PackedWeight, pack
from mycli.runtime.quantization.scheme import Packing
from tests.support.engines import whole
from tests.support.families import CASES, make
from tests.support.family_parts import SMALL
from tests.support.grids import chosen
from tests.support.published import published

FP32 = Placement(torch.device("cpu"), torch.float32)
CACHES = (torch.float32, torch.bfloat16, torch.int8, PACKED)
# heads, rank, rope_dim: below and above the rows per key head at which threads split rows instead of positions
SHAPES = ((4, 32, 16), (40, 64, 32), (16, 512, 64))


@pytest.mark.parametrize(
    ("cache", "shape"),
    [
        *chosen(
            [(cache, shape) for cache in CACHES for shape in SHAPES], quick=[(cache, SHAPES[1]) for cache in CACHES]
        ),
        *((cache, (5, 20, 6)) for cache in CACHES if cache != PACKED),
    ],
    ids=str,
)
def test_kernel_equals_the_reference(cache: torch.dtype, shape: tuple[int, int, int]) -> None:
    """The three sequences in scattered blocks are a token, a prompt from its start, and drafts after a long prefix."""
    heads, rank, rope_dim = shape
    torch.manual_seed(0)
    lengths, counts, size = (300, 20, 77), (1, 20, 3), 16
    blocks = torch.randperm(32).int()
    table = torch.zeros(3, 19, dtype=torch.int32)
    table[0], table[1, :2], table[2, :5] = blocks[:19], blocks[19:21], blocks[21:26]
    starts = torch.tensor([0, 1, 21, 24], dtype=torch.int32)
    ragged = Ragged(starts, torch.tensor(lengths, dtype=torch.int32), table)
    latents = Stored.of(torch.randn(32, 1, size, rank), cache)
    rotated = Stored.of(torch.randn(32, 1, size, rope_dim) * 5, cache)
    query, rotated_query = torch.randn(sum(counts), heads, rank), torch.randn(sum(counts), heads, rope_dim)
    arguments = (query, rotated_query, latents, rotated, ragged, rank**-0.5)
    found, expected = native_latent_attention(*arguments), reference_attention.attend_latent(*arguments)
    if isinstance(found, Declined):
        pytest.skip(found.code)
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize(
    "case", ["deepseek_v3-groups-yarn", "mistral4-beyond", "minicpm3-longrope-odd-sizes-biases-untied"]
)
def test_absorbed_and_expanded_products_agree(case: str, tmp_path: Path) -> None:
    make(tmp_path, *CASES[case])
    model = load_model(open_model_folder(tmp_path), FP32).model
    tokens = torch.randint(0, SMALL["vocab_size"], (1, 24), generator=torch.Generator().manual_seed(1))
    rope = Rope(model.config, 24, model.device, model.dtype)
    stream = torch.nn.functional.embedding(tokens, model.embedding) * model.config.embedding_scale
    context = PassContext(rope.tables(0, 24), PromptAttention())
    for block in model.layers():
        stream = block(stream, context)
    expected = model.head(model.norm(stream)) * model.config.logit_scale
    assert (whole(model, tokens) - expected).abs().max() <= 2e-5 * expected.abs().max()


@pytest.mark.parametrize(("case", "queries"), [("deepseek_v3-groups-yarn", 1), ("kimi_linear-8top3", 2)])
def test_the_memory_model_counts_the_operands_of_a_pass(case: str, queries: int, tmp_path: Path) -> None:
    """Besides those of products: queries before or after their rotation, queries and contexts in latent space."""
    make(tmp_path, *CASES[case])
    config = open_model_folder(tmp_path).config
    layer, spec = next((index, spec.latent) for index, spec in enumerate(config.layer_specs) if spec.latent is not None)
    part, chunks = LatentAttention(spec, layer), [Chunk([0] * 5, 0, (0,), 0)]
    for linear in part.products:
        linear.replace(torch.zeros(linear.out_features, linear.in_features))
    for norm in filter(None, (part.q_norm, part.kv_norm)):
        norm.weight = torch.ones(norm.spec.size)
    attention = PagedAttention(
        Batch.of(chunks, 16, FP32.device), KVCache(config, 1, 16, FP32.device, torch.float32), portable=False
    )
    steps = part.inner(
        torch.zeros(1, 5, config.hidden_size),
        PassContext(Rope(config, 16, FP32.device, torch.float32).rows(chunks), attention),
    )
    counted, output = -config.hidden_size, None
    with suppress(StopIteration):
        while True:
            linear, x = steps.send(output)
            output = linear(x)
            counted += x.shape[-1] + output.shape[-1]
    assert spec.forward_values() == counted + queries * spec.heads * spec.head_dim + 2 * spec.heads * spec.rank


def test_packed_keys_and_values_are_absorbed_exactly(tmp_path: Path) -> None:
    """Regression: with fp32 activations they were rounded to fp16, the dtype of a GGUF file's scales."""
    make(tmp_path, *CASES["minicpm3-tied"])
    spec = open_model_folder(tmp_path).config.layer(0).mixer
    assert isinstance(spec, LatentAttentionSpec)
    rows, columns = spec.kv_b.out_features, spec.kv_b.in_features
    generator = torch.Generator().manual_seed(2)
    codes = torch.randint(0, 256, (rows, columns), dtype=torch.uint8, generator=generator)
    scales = torch.rand(rows, columns // 32, generator=generator).half()
    part = LatentAttention(spec, 0)
    part.kv_norm.weight = torch.ones(spec.rank)
    part.kv_b.replace(prepare_product(PackedWeight(pack(codes, 8), scales, Packing(8, 32), columns), torch.float32))
    expected = (codes.float() - 128) * scales.float().repeat_interleave(32, dim=1)
    assert torch.equal(part.absorbed.dequantize(), expected) and part.absorbed.nbytes == expected.nbytes


def test_blocks_of_fp8_as_published(tmp_path: Path) -> None:
    """The rows of kv_a_proj_with_mqa do not fill the blocks; the logits equal those of the decoded weights."""
    make(tmp_path, *CASES["deepseek_v3-groups-yarn"])
    dense, side = load_file(tmp_path / "model.safetensors"), 32
    packed = {}
    for name, weight in list(dense.items()):
        if not name.endswith("_proj.weight") and "kv_a_proj" not in name:
            packed[name] = weight
            continue
        rows, columns = (-(-size // side) for size in weight.shape)
        padded = torch.zeros(rows * side, columns * side)
        padded[: weight.shape[0], : weight.shape[1]] = weight
        squares = padded.view(rows, side, columns, side)
        scales = squares.abs().amax((1, 3)) / 448 + 1e-9
        wide = scales[:, None, :, None].expand(squares.shape).reshape(padded.shape)
        codes = (padded / wide).to(torch.float8_e4m3fn)
        packed[name] = codes[: weight.shape[0], : weight.shape[1]].contiguous()
        packed[f"{name}_scale_inv"] = scales
        dense[name] = (codes.float() * wide)[: weight.shape[0], : weight.shape[1]].contiguous()
    save_file(dense, tmp_path / "model.safetensors")
    tokens = torch.randint(0, SMALL["vocab_size"], (2, 20), generator=torch.Generator().manual_seed(1))
    expected = whole(load_model(open_model_folder(tmp_path), FP32).model, tokens)
    save_file(packed, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [side, side]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    folder = open_model_folder(tmp_path)
    assert "model.layers.0.self_attn.kv_b_proj" in folder.packings
    found = whole(load_model(folder, FP32).model, tokens)
    assert (found - expected).abs().max() <= 2e-3 * expected.abs().max()  # packed products round activations


def test_the_memory_model_counts_the_values_of_a_backward_pass() -> None:
    """DeepSeek-V3: two inputs, queries of 192 values and expanded keys and values of 128 in each of 128 heads."""
    spec = next(layer.latent for layer in published("DeepSeek-V3").layer_specs if layer.latent is not None)
    assert spec.training_values() == 2 * (1536 + 576) + 128 * (6 * 192 + 4 * (128 + 128) + 3 * 128)
