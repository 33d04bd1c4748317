"""Builds random models in memory, of any declared family, packed as `quantize` packs, for speed measurements."""

from typing import Any

import torch

from mycli.runtime.kernels.cpu.matmul import CpuMatmul, gather_codes
from mycli.runtime.kernels.registry import prepare_product
from mycli.runtime.layers.block import Attention
from mycli.runtime.layers.layer_part import LayerPart
from mycli.runtime.layers.linear import Linear
from mycli.runtime.layers.norm import RMSNorm
from mycli.runtime.layers.recurrent import Convolution, DeltaNet, Mamba
from mycli.runtime.layers.transformer import Transformer
from mycli.runtime.models.config import ModelConfig
from mycli.runtime.quantization.packed_weight import PackedWeight
from mycli.runtime.quantization.scheme import Packing

PACKING = Packing(4, 128)
MXFP4 = Packing(4, 32, layout="mxfp4", codes="e2m1", scale_dtype="bfloat16")


def mixture_fields(layers: int, hidden: int, experts: int, size: int) -> dict[str, Any]:
    """Return the config.json of a qwen3_moe with 8 active experts per token, for speed measurements."""
    return {
        "model_type": "qwen3_moe",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 64,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "intermediate_size": 4 * hidden,
        "moe_intermediate_size": size,
        "num_experts": experts,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "vocab_size": 4096,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
    }


def packings(config: ModelConfig) -> dict[str, Packing]:
    """Return the packings that `random_model` uses: int4 in groups of 128, but the experts of gpt_oss as published."""
    published = config.model_type == "gpt_oss"
    return {spec.name: MXFP4 if published and ".experts." in spec.name else PACKING for spec in config.linears()}


def packed(linear: Linear, packing: Packing, generator: torch.Generator) -> PackedWeight:
    """Return random codes, with scales that keep the outputs as large as the inputs."""
    rows, columns = linear.out_features, linear.in_features
    codes = torch.randint(-(2**31), 2**31 - 1, (rows, columns // 8), dtype=torch.int64, generator=generator).int()
    scales = (torch.rand(rows, packing.groups(columns), generator=generator) + 0.5) * 0.3 / columns**0.5
    return PackedWeight(codes, scales.bfloat16(), packing, columns)


def _fill(module: torch.nn.Module, generator: torch.Generator) -> None:
    """Randomize the weights that are neither packed nor norms."""
    if isinstance(module, Convolution):
        module.weight = torch.randn(module.weight.shape, generator=generator)
    elif isinstance(module, Mamba):
        module.rate, module.dt_bias, module.skip = (sign * torch.rand(module.spec.heads) for sign in (-1, 1, 1))
    elif isinstance(module, DeltaNet):
        module.rate, module.dt_bias = -torch.rand(module.rate.shape, generator=generator), torch.rand(module.rate.shape)
    elif isinstance(module, Attention) and module.spec.sinks is not None:
        module.sinks = torch.zeros(module.spec.heads)
    for linear in module.unquantized if isinstance(module, LayerPart) else ():
        dense = torch.randn(linear.out_features, linear.in_features, generator=generator)
        linear.replace((dense / linear.in_features**0.5).bfloat16())


def random_model(config: ModelConfig) -> Transformer:
    """Return a bf16 model with products as in `packings` and a tied embedding."""
    model, generator, schemes = Transformer(config), torch.Generator().manual_seed(0), packings(config)
    for module in model.modules():
        if isinstance(module, RMSNorm):
            dtype = torch.float32 if module.spec.fp32_gain else torch.bfloat16
            module.weight = torch.ones(module.weight.shape, dtype=dtype)
        if isinstance(module, Linear) and module.specs[0].bias:
            module.bias = torch.zeros(module.out_features, dtype=torch.bfloat16)
        _fill(module, generator)
    for block in model.layers():
        for linear in block.products.values():
            linear.replace(prepare_product(packed(linear, schemes[linear.specs[0].name], generator), torch.bfloat16))
        matmuls = [matmul for linear in block.products.values() for matmul in linear.matmuls]
        gather_codes([each for each in matmuls if isinstance(each, CpuMatmul) and each.small])  # as after loading
        if block.spec.layer_scalar is not None:
            (block.per_layer or block.mlp).scalar = torch.ones(1, dtype=torch.bfloat16)
    if model.per_layer is not None:
        for name in ("table", "projection"):
            shape = getattr(model.per_layer, name).shape
            setattr(model.per_layer, name, torch.randn(shape, generator=generator).bfloat16())
    model.embedding = torch.randn(config.vocab_size, config.hidden_size, generator=generator).bfloat16()
    model.head.replace(model.embedding)
    return model
