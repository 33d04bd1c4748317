"""Test folding of input scales: the block's output is unchanged, with grouped queries and biases."""

import pytest
import torch
from torch import Tensor

from mycli.quant.layer_streaming import restore
from mycli.quant.rounding.grid import Grid, dequantize_codes
from mycli.quant.solvers import rtn
from mycli.quant.transforms.awq import RATIOS, choose_scale, fold
from mycli.runtime.device.placement import torch_dtype
from mycli.runtime.layers.attention import PromptAttention
from mycli.runtime.layers.block import Block
from mycli.runtime.layers.layer_part import PassContext
from mycli.runtime.layers.linear import Linear
from mycli.runtime.layers.norm import RMSNorm
from mycli.runtime.layers.rope import Rope
from mycli.runtime.models.config import ModelConfig
from mycli.runtime.models.part_spec import OutputRows
from mycli.runtime.models.registry import parse_config
from mycli.runtime.quantization.scheme import Packing
from mycli.runtime.utils.json_fields import Fields
from tests.support.rounding import problem

TOKENS = 12


PRODUCTS = ("qkv", "o", "gate_up", "down")
DOWN = OutputRows("gate_up", 64, 1, 1, 64)
QUERY_HEADS = OutputRows("qkv", 48, 2, 2, 8)


def config(model_type: str) -> ModelConfig:
    raw = {
        "model_type": model_type,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": 64,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-6,
        "torch_dtype": "bfloat16",
    }
    return parse_config(Fields(raw, "config.json"))


def block(model_type: str, seed: int = 0) -> Block:
    made, generator = Block(config(model_type).layer(0)), torch.Generator().manual_seed(seed)
    for module in made.modules():
        if isinstance(module, RMSNorm):
            module.weight = 1 + 0.3 * torch.randn(module.weight.shape, generator=generator)
            if module.spec.bias:
                module.bias = torch.randn(module.weight.shape, generator=generator)
        elif isinstance(module, Linear):
            weight = torch.randn(module.out_features, module.in_features, generator=generator) / 4
            module.replace(weight)
            if module.specs[0].bias:
                module.bias = torch.randn(module.out_features, generator=generator)
    return made


@torch.no_grad()
def run(layer: Block) -> Tensor:
    x = torch.randn(2, TOKENS, 32, generator=torch.Generator().manual_seed(5))
    like = config("llama")  # heads and rotary embedding are the same in all
    rope = Rope(like, TOKENS, torch.device("cpu"), torch.float32)
    return layer(x, PassContext(rope.tables(0, TOKENS), PromptAttention()))


def scale_for(layer: Block, product: str) -> Tensor:
    linear = layer.products[product]
    scale = torch.rand(linear.in_features, generator=torch.Generator().manual_seed(7)) * 4 + 0.25
    if product == "o":
        return scale.view(2, 2, 8)[:, :1].expand(2, 2, 8).reshape(-1)
    return scale


@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize(
    "model_type", ["llama", "qwen2", "qwen3", "phi3"], ids=["grouped", "biases", "qk-norm", "fused"]
)
def test_the_block_computes_what_it_did(model_type: str, product: str) -> None:
    before, after = block(model_type), block(model_type)
    weight = after.products[product].weight()
    changed, _ = fold(after, product, scale_for(after, product), lambda _: torch.float32)
    assert not torch.allclose(after.products[product].weight(), weight)
    assert torch.allclose(run(after), run(before), rtol=1e-4, atol=1e-4)
    expected = {"qkv": "input_layernorm.weight", "gate_up": "post_attention_layernorm.weight"}
    if product == "o" and model_type == "qwen2":
        expected["o"] = "self_attn.v_proj.bias"
    assert set(changed) == ({f"model.layers.0.{expected[product]}"} if product in expected else set())


def test_the_bias_of_a_norm_is_divided_with_its_gain() -> None:
    before, after, changed = block("starcoder2"), block("starcoder2"), list[str]()
    for product in ("qkv", "gate_up"):
        changed += fold(after, product, scale_for(after, product), lambda _: torch.float32)[0]
    assert torch.allclose(run(after), run(before), rtol=1e-4, atol=1e-4)
    norms = ("input_layernorm", "post_attention_layernorm")
    assert sorted(changed) == [f"model.layers.0.{norm}.{part}" for norm in norms for part in ("bias", "weight")]


@pytest.mark.parametrize("model_type", ["llama", "gemma"])
def test_a_gain_is_divided_by_the_scale_except_where_none_is_left(model_type: str) -> None:
    """In fp16 the fourth gain becomes zero; gains of 1, before and after, are divided as others."""
    before, after = block(model_type), block(model_type)
    scale = scale_for(after, "qkv")
    for norm in (before.mixer.norm, after.mixer.norm):
        assert norm is not None
        norm.weight[3:6] = torch.tensor([3e-8 if model_type == "llama" else 0.0, 1.0, float(scale[5])])
    scale[3] = 4.0
    _, used = fold(after, "qkv", scale, lambda _: torch.float16)
    assert used[3] == 1 and torch.allclose(used[4:], scale[4:], rtol=2e-2)
    assert torch.allclose(run(after), run(before), rtol=1e-4, atol=1e-4)


def test_columns_follow_a_gain_as_it_is_stored() -> None:
    """bf16 holds 8 bits of the divided gain; the weights absorb the rounding, so that nothing is lost."""
    before, after = block("llama"), block("llama")
    norms = before.mixer.norm, after.mixer.norm
    assert norms[0] is not None and norms[1] is not None
    norms[0].weight[3] = norms[1].weight[3] = 0
    changed, used = fold(after, "qkv", scale_for(after, "qkv"), lambda _: torch.bfloat16)
    gain = changed["model.layers.0.input_layernorm.weight"]
    assert gain.dtype == torch.bfloat16 and torch.equal(gain.float(), norms[1].weight)
    assert torch.equal(after.products["qkv"].weight(), before.products["qkv"].weight() * used)
    assert torch.allclose(run(after), run(before), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("model_type", ["qwen2", "gemma"])
def test_what_was_stored_makes_the_same_block_again(model_type: str) -> None:
    folded, again = block(model_type), block(model_type)
    changed: dict[str, Tensor] = {}
    for product in PRODUCTS:
        changed |= fold(folded, product, scale_for(folded, product), lambda _: torch.float32)[0]
    restore(again, changed)
    for product in PRODUCTS:
        again.products[product].replace(folded.products[product].weight())
    assert torch.equal(run(again), run(folded))


def test_the_scale_lowers_the_error_of_rounding() -> None:
    weight, hessian = problem(48, 64)
    grid = Grid(Packing(3, 32), torch_dtype("bfloat16"), "mse")
    scale = choose_scale(weight, grid, hessian, DOWN)
    assert scale is not None

    def error(scale: Tensor) -> float:
        scaled = rtn.solve(weight * scale, grid, hessian / scale / scale.unsqueeze(1)).quantized
        lost = dequantize_codes(scaled, grid) / scale - weight
        return float((lost @ hessian * lost).sum())

    assert error(scale) < 0.95 * error(torch.ones(64))
    powers = [hessian.diagonal().sqrt().pow(ratio) for ratio in RATIOS]
    candidates = [power / (power.max() * power.min()).sqrt() for power in powers]
    assert error(scale) == pytest.approx(min(map(error, candidates)), rel=1e-5)
    assert float(scale.max() * scale.min()) == pytest.approx(1, abs=1e-5), "weights keep their size"
    small = choose_scale(weight, grid, hessian * 2**-30, DOWN)
    assert small is not None and torch.allclose(small, scale), "only the relation of inputs counts"


def test_query_heads_of_one_kv_head_get_one_scale() -> None:
    weight, hessian = problem(48, 32)
    scale = choose_scale(weight, Grid(Packing(3, 32), torch.bfloat16), hessian, QUERY_HEADS)
    assert scale is not None
    heads = scale.view(2, 2, 8)
    assert torch.equal(heads[:, 0], heads[:, 1]) and not torch.equal(heads[0], heads[1])


def test_inputs_that_are_never_used_break_nothing() -> None:
    weight, hessian = problem(16, 64)
    hessian[5] = hessian[:, 5] = 0
    grid = Grid(Packing(4, 32), torch.bfloat16)
    scale = choose_scale(weight, grid, hessian, DOWN)
    assert scale is None or bool(torch.isfinite(scale).all() and (scale > 0).all())
    assert choose_scale(weight, grid, torch.zeros_like(hessian), DOWN) is None
