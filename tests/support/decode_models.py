"""Builds models of packed weights for the fused pass, each paired with an equal dense model. Needs Triton."""

from dataclasses import dataclass, field, replace
from typing import Any

import torch

from mycli.runtime.checkpoint.model_folder import ModelFolder
from mycli.runtime.kernels.triton.product.matmul import TritonMatmul
from mycli.runtime.kernels.triton.product.tiles import Chip
from mycli.runtime.layers.block import Attention
from mycli.runtime.layers.feed_forward import Experts
from mycli.runtime.layers.linear import Linear
from mycli.runtime.layers.norm import RMSNorm
from mycli.runtime.layers.transformer import Transformer
from mycli.runtime.models.config import ModelConfig
from mycli.runtime.models.experts import ExpertNames, MoeLayers
from mycli.runtime.models.experts_spec import RoutingSpec
from mycli.runtime.models.multimodal import SEPARATE_GATE
from mycli.runtime.quantization.codes import code_table
from mycli.runtime.quantization.packed_weight import PackedWeight, dequantize, pack
from mycli.runtime.quantization.scheme import Codes, Packing
from mycli.runtime.utils.json_fields import Fields
from tests.support.prefix_model import CONFIG as TINY
from tests.support.published import PUBLISHED
from tests.support.random_tensors import generator

CONFIG = replace(
    TINY,
    hidden_size=128,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=32,
    intermediate_size=160,
    vocab_size=72,
    max_context=256,
    tie_embeddings=False,
    dtype="float16",
)

CAPACITY = 128


# Seven heads, a head size used nowhere else, and widths that are not powers of two.
SEVEN = {"layers": 1, "hidden_size": 224, "heads": 7, "kv_heads": 1, "head_dim": 64, "intermediate_size": 352}


# Changes that shrink a published configuration to the size of CONFIG.
SMALL = {
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 160,
    "vocab_size": 72,
    "max_position_embeddings": 256,
    "torch_dtype": "float16",
    "tie_word_embeddings": False,
}


@dataclass(frozen=True)
class Case:
    changes: dict[str, Any] = field(default_factory=dict)
    bits: int = 4
    group: int = 32
    packed_head: bool = False
    sequences: int = 1
    new: int = 1
    int8: bool = False
    int4: bool = False
    bias: bool = False
    experts: MoeLayers | None = None
    block: int = CAPACITY  # size of a cache block
    family: str = ""  # a published model, whose configuration `changes` shrinks
    padding: int = 0  # rows of padding after the new tokens of each sequence
    dense: str = ""  # linears with this in their name have 16 bits
    eight: str = ""  # linears with this in their name have 8 bits
    codes: Codes = "int"  # a table of `bits` bits

    def __str__(self) -> str:
        options = self.family or "-".join(f"{key}{value}" for key, value in self.changes.items())
        if self.experts is not None:
            options += f"{self.experts.routing.top_k}of{self.experts.count}-{self.experts.routing.scoring}"
        options += f"-blocks{self.block}" * (self.block < CAPACITY)
        flags = "-head" * self.packed_head + "-int8kv" * self.int8 + "-int4kv" * self.int4 + "-bias" * self.bias
        flags += f"-padded{self.padding}" * (self.padding > 0) + f"-dense-{self.dense}" * bool(self.dense)
        flags += f"-eight-{self.eight}" * bool(self.eight)
        group = "" if self.group == 32 else f"-g{self.group}"
        kind = f"int{self.bits}" if self.codes == "int" else self.codes
        return f"{kind}{group}-{self.sequences}x{self.new}{flags}-{options}"


def packed(rows: int, columns: int, packing: Packing, generator: torch.Generator) -> PackedWeight:
    codes = torch.randint(0, 1 << packing.bits, (rows, columns), generator=generator).to(torch.uint8)
    largest = float(code_table(packing).abs().max())
    scales = torch.rand(rows, packing.groups(columns), generator=generator) * columns**-0.5 * 4 / largest + 1e-3
    return PackedWeight(pack(codes, packing.bits), scales.half(), packing, columns)


def config_of(case: Case) -> ModelConfig:
    if case.family:
        raw = PUBLISHED[case.family]["config"]
        small = {**raw.get("text_config", raw), **SMALL, **case.changes}
        return ModelFolder.from_config(Fields(small, "config.json")).config
    config = replace(CONFIG, **case.changes)
    return config if case.experts is None else replace(config, build_layer=case.experts)


def models(case: Case, device: str = "cpu", chip: Chip | None = None) -> tuple[Transformer, Transformer]:
    """Return two models of the same weights, with Triton products and dense ones; routers are dense in both."""
    config = config_of(case)
    drawing = generator()
    fused, plain = Transformer(config), Transformer(config)
    embedding = torch.randn(config.vocab_size, config.hidden_size, generator=drawing).half().to(device)
    for model in (fused, plain):
        model.embedding = embedding
    mixtures = [module for module in fused.modules() if isinstance(module, Experts)]
    kept = [linear for mixture in mixtures for linear in mixture.unquantized]
    for (_, ours), (_, theirs) in zip(fused.named_modules(), plain.named_modules(), strict=True):
        if isinstance(ours, RMSNorm) and isinstance(theirs, RMSNorm):
            gain = 1 + 0.2 * torch.randn(ours.weight.shape, generator=drawing)
            ours.weight = theirs.weight = (gain if ours.spec.fp32_gain else gain.half()).to(device)
        elif isinstance(ours, Linear) and isinstance(theirs, Linear):
            bits = 8 if case.eight and case.eight in ours.specs[0].name else case.bits
            packing = Packing(bits, case.group, codes=case.codes)
            weight = packed(ours.out_features, ours.in_features, packing, drawing)
            weight = replace(weight, packed=weight.packed.to(device), scales=weight.scales.to(device))
            theirs.replace(dequantize(weight))
            ours.replace(TritonMatmul(weight, chip or Chip((9, 0), 4)))
            dense = case.dense and case.dense in ours.specs[0].name
            if dense or ours in kept or (ours is fused.head and not case.packed_head):
                ours.replace(theirs.weight())
            if any(spec.bias for spec in ours.specs) or (case.bias and ours.specs[0].name.endswith("q_proj")):
                ours.bias = theirs.bias = torch.randn(ours.out_features, generator=drawing).half().to(device)
        elif isinstance(ours, Attention) and isinstance(theirs, Attention) and ours.spec.sinks is not None:
            ours.sinks = theirs.sinks = torch.randn(ours.spec.heads, generator=drawing).to(device)
        elif isinstance(ours, Experts) and isinstance(theirs, Experts) and ours.spec.correction_bias is not None:
            drawn = torch.rand(len(ours.spec.experts), generator=drawing).to(device)
            ours.correction = theirs.correction = drawn
    return fused, plain


CASES = [
    Case(),
    Case(packed_head=True, new=3),
    Case({"qk_norm": True, "heads": 6, "kv_heads": 1}, bits=3),
    Case({"tie_embeddings": True, "hidden_size": 96}, bits=8, bias=True, sequences=2),
    Case({"windows": (20, None), "kv_heads": 4}, new=4, sequences=2),
    Case(int8=True, new=2),
    Case(SEVEN, bias=True, int8=True, new=5),
    Case({"layers": 1}, packed_head=True, new=4, sequences=3, block=64),
    Case({**SEVEN, "layers": 2}, int4=True, new=2, sequences=2),
    Case({"layers": 1}, bits=8, group=16, packed_head=True, new=2),
]
# Further variants of passes over many rows: several blocks of rows, and many tokens that attend separately.
WIDE = [
    Case({"layers": 1}, bits=3, sequences=33),
    Case(SEVEN, bias=True, int8=True, new=20),
    Case({"layers": 1}, group=16, packed_head=True, new=12),
    Case({"layers": 1, "windows": (40,)}, bits=8, packed_head=True, new=16, sequences=4),
]
# Codes of GGUF's IQ4_NL and IQ2_XS.
TABLES = [
    Case({"layers": 1}, codes="iq4", packed_head=True, new=2),
    Case({"layers": 1}, codes="iq2", bits=3, group=16, sequences=9),
]
# One layer as large as in Llama-3.1-8B and in Qwen3-30B-A3B.
_QWEN_30B = {"layers": 1, "hidden_size": 2048, "heads": 32, "kv_heads": 4, "head_dim": 128, "qk_norm": True}
PUBLISHED_SIZES = [
    Case(
        {"layers": 1, "hidden_size": 4096, "heads": 32, "kv_heads": 8, "head_dim": 128, "intermediate_size": 14336},
        group=128,
    ),
    Case(_QWEN_30B, group=128, experts=MoeLayers(128, RoutingSpec(8, normalize=True), 768)),
]
# Prompts that are padded to a number of tokens for which there is a graph; padding reaches beyond the cache.
PADDED = [
    Case({"layers": 1, "windows": (40,)}, new=5, sequences=2, padding=3, block=64),
    Case({**SEVEN, "layers": 2}, int8=True, new=3, padding=61),
    Case({"num_hidden_layers": 1}, family="OLMo-2-7B", new=9, padding=7),
]
# MoE layers, also with a dense layer between them; few rows per expert and many; all experts chosen; shared experts,
# gated and ungated, whose operand has tiles of fewer rows than the pass.
_CORRECTED = ExpertNames(correction_bias="correction")
_UNGATED = ExpertNames(correction_bias="correction", shared_gate=None)
MIXED = [
    Case({"layers": 1}, experts=MoeLayers(6, RoutingSpec(2, normalize=True), 96)),
    Case(
        {"qk_norm": True},
        bits=8,
        packed_head=True,
        new=3,
        experts=MoeLayers(5, RoutingSpec(3, False, "sigmoid", scale=1.5), 160, _CORRECTED, frozenset({0}), shared=64),
    ),
    Case(
        {"layers": 1},
        packed_head=True,
        sequences=3,
        new=8,
        experts=MoeLayers(6, RoutingSpec(2, True, "sigmoid", epsilon=0.1), 64, _UNGATED, shared=96),
    ),
    Case({"hidden_size": 96}, bits=3, sequences=32, new=2, experts=MoeLayers(3, RoutingSpec(3, False), 64)),
    # Shared experts, or all products down, in another packing than the other products.
    Case({"layers": 1}, new=2, eight="shared_expert.", experts=MoeLayers(5, RoutingSpec(2, True), 64, shared=96)),
    Case({"layers": 1}, sequences=9, dense="shared_expert.", experts=MoeLayers(5, RoutingSpec(2, True), 64, shared=96)),
    Case({"layers": 1}, new=2, eight="down_proj", experts=MoeLayers(5, RoutingSpec(2, True), 64, shared=96)),
]
# Norms after parts and with 1 + w, softcaps, GELU, scaled embeddings and scores; sliding windows with separate rotary
# embeddings; interleaved and partial rotary embeddings; layers without them; norms over all heads and no norm before
# parts; norms after rotation; multipliers; queries scaled by position; biases.
_GEMMA3 = {"sliding_window": 40, "layer_types": ["sliding_attention", "full_attention"]}
_GRANITE = {"residual_multiplier": 0.22, "logits_scaling": 8.0, "embedding_multiplier": 12.0}
_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}
_BETA = {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.4}
_GEMMA4 = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 40, "global_head_dim": 64}
_GRANITE_EXPERTS = {"num_local_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 96}
_SINKS = {"model_type": "granite_swa", "sliding_window": 40, "layer_rope_theta": [0, 10000.0], "num_hidden_layers": 2}
_OSS = {"num_local_experts": 6, "num_experts_per_tok": 2, "sliding_window": 40, "intermediate_size": 96}
FAMILIES = [
    Case({"num_hidden_layers": 1, "query_pre_attn_scalar": 20}, family="gemma-2-2b", packed_head=True, new=2),
    Case(_GEMMA3, family="gemma-3-1b", int8=True),
    Case({**_GEMMA4, "num_global_key_value_heads": 1}, family="gemma-4-12B", new=2),
    Case({"attention_bias": True}, family="GLM-4-9B-0414", new=3),
    Case({"num_hidden_layers": 1, "use_bias": True}, family="ERNIE-4.5-0.3B", sequences=2),
    Case({"no_rope_layers": [1, 0]}, family="SmolLM3-3B", packed_head=True),
    Case({"num_hidden_layers": 1}, family="OLMo-2-7B", packed_head=True, new=2),
    Case({"num_hidden_layers": 1}, family="OLMo-2-7B", sequences=9),
    Case(family="Hunyuan-0.5B", int8=True),
    Case({**_GRANITE, "attention_multiplier": 0.125}, family="granite-3.3-2b", packed_head=True),
    Case({**_GRANITE, **_GRANITE_EXPERTS, "num_hidden_layers": 1}, family="granite-3.0-1b-a400m"),
    Case({"num_experts": 6, "num_experts_per_tok": 2, "num_hidden_layers": 1}, family="OLMoE-1B-7B"),
    Case(_SINKS, family="granite-3.3-2b"),
    Case({"rope_parameters": {**_YARN, **_BETA}}, family="Ministral-3-3B"),
    Case(_OSS, family="gpt-oss-20b", new=2, dense="self_attn"),
    Case({"num_hidden_layers": 1}, family="OLMo-2-7B", sequences=9, dense="mlp"),
    Case({**_OSS, SEPARATE_GATE: True, "num_hidden_layers": 1}, family="gpt-oss-20b", sequences=9),
]
