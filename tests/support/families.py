"""Builds small random models with transformers: configurations of every family and kind of layer."""

import json
from copy import deepcopy
from functools import reduce
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.pytorch_utils import Conv1D

from mycli.runtime.checkpoint.model_folder import ModelFolder
from mycli.runtime.layers.transformer import Transformer
from mycli.runtime.models.experts_spec import ExpertsSpec
from tests.support.bailing import publish_bailing, publish_deepseek, publish_sarvam, without_shared_gates
from tests.support.dense_families import DENSE
from tests.support.exaone import publish_exaone
from tests.support.expert_families import EXPERTS
from tests.support.family_parts import MULTIPLIERS, SMALL
from tests.support.latent_families import LATENT
from tests.support.more_expert_families import MORE_EXPERTS
from tests.support.muse_glimmer import MuseGlimmerText
from tests.support.mxfp4 import save_mxfp4
from tests.support.norm_families import NORMS
from tests.support.pruned_layers import prune
from tests.support.published_names import normalize_head, publish_baichuan, publish_maincoder, publish_pangu
from tests.support.recurrent_families import RECURRENT
from tests.support.smallthinker import SMALLTHINKERS, publish_smallthinker, restructure

TOKENS = 40
# Only the last case of each of these families runs by default, the others with -m slow.
LATER = {**NORMS, **MORE_EXPERTS, **SMALLTHINKERS}
CASES = {**DENSE, **EXPERTS, **LATENT, **RECURRENT, **LATER}
# Families that compute no logits: test_encoders.py and tests of the server compare their states and vectors.
EMBEDDING = {
    *("bert", "eurobert", "gte", "jina_embeddings_v3", "llama_bidirec", "modernbert", "mpnet", "new", "nomic_bert"),
    *("roberta", "xlm-roberta"),
}
# Published under a model_type that transformers does not know, with the architecture of one that it does.
ALIASES = {
    "PanguEmbedded": "llama",
    "baichuan": "llama",
    "bailing_moe": "glm4_moe",
    "deepseek": "qwen2_moe",
    "exaone": "llama",
    "kimi_k2": "deepseek_v3",
    "maincoder": "hunyuan_v1_dense",
    "mimo": "qwen2",
    "minicpm": "granite",
    "nemotron-nas": "llama",
    "sarvam_mla": "deepseek_v3",
    "sarvam_moe": "glm4_moe",
    "smallthinker": "mixtral",
    "telechat3": "llama",
}
# What gives files of these the names of published ones, and returns their config.
PUBLISHED = {
    "PanguEmbedded": publish_pangu,
    "baichuan": publish_baichuan,
    "bailing_moe": publish_bailing,
    "deepseek": publish_deepseek,
    "exaone": publish_exaone,
    "maincoder": publish_maincoder,
    "sarvam_mla": publish_sarvam,
    "sarvam_moe": publish_bailing,
    "smallthinker": publish_smallthinker,
}
# Keys that the reference needs and the published config lacks.
REFERENCE_KEYS = {"minicpm": MULTIPLIERS.keys()}
# Text model classes that transformers registers only among those for images, or does not have.
UNMAPPED: dict[str, Any] = {"mistral4": transformers.Mistral4ForCausalLM, "muse_glimmer_text": MuseGlimmerText}
QUICK = tuple(
    {case for case in CASES if case not in LATER} | set({kind: case for case, (kind, _) in LATER.items()}.values())
)


def enliven(model: transformers.PreTrainedModel) -> None:
    """Randomize weights, biases, norms and scalars, so that a part omitted or applied twice changes the output."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            spread = 0.3 if parameter.ndim == 1 else 2.0 / parameter.shape[-1] ** 0.5
            centre = 1.0 if "norm" in name else 0.0
            parameter.copy_(torch.randn_like(parameter) * spread + centre)
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.copy_(torch.rand_like(buffer) + 0.5)
            if name.endswith("bias") and buffer.is_floating_point():  # correction bias of expert routing
                buffer.copy_(torch.randn_like(buffer) * 0.3)


def reference_config(model_type: str, changes: dict[str, Any]) -> transformers.PreTrainedConfig:
    """Return transformers' config of a small model, which `make` saves with the model."""
    # transformers writes into rope_parameters
    return transformers.AutoConfig.for_model(ALIASES.get(model_type, model_type), **deepcopy({**SMALL, **changes}))


def make(folder: Path, model_type: str, changes: dict[str, Any]) -> transformers.PreTrainedModel:
    """Save a random model to `folder` and return its fp32 reference."""
    torch.manual_seed(0)
    config = reference_config(model_type, changes)
    loader = class_of(model_type)
    create = loader.from_config if loader is transformers.AutoModelForCausalLM else loader._from_config
    reference = create(config, attn_implementation="eager").float().eval()
    if model_type == "nemotron-nas":
        prune(reference)
    if model_type == "smallthinker":
        restructure(reference)
    enliven(reference)
    if model_type == "deepseek":
        without_shared_gates(reference)
    if model_type == "gpt_oss":
        save_mxfp4(reference, folder)
    else:
        reference.save_pretrained(folder)
    if model_type == "baichuan":
        normalize_head(reference)
    if model_type in ALIASES:
        saved = json.loads((folder / "config.json").read_text())
        saved = {key: value for key, value in saved.items() if key not in REFERENCE_KEYS.get(model_type, ())}
        if model_type in PUBLISHED:
            saved = PUBLISHED[model_type](folder / "model.safetensors", saved)
        (folder / "config.json").write_text(json.dumps({**saved, "model_type": model_type}))
    return reference


def stored_name(model_type: str, name: str) -> str:
    """Return the checkpoint name of a module of transformers' model, which some families convert."""
    shared = {"hy_v3": ".shared_mlp.", "laguna": ".shared_expert."}.get(model_type, ".shared_experts.")
    name = name.replace(".shared_experts.", shared) if model_type != "nemotron_h" else name
    if model_type == "gpt_neox":
        return name.replace("gpt_neox.layers.", "model.layers.")
    if model_type == "gpt2":
        return reduce(lambda part, names: part.replace(*names), _GPT2_NAMES, name)
    if model_type in ("falcon", "gpt_bigcode", "gpt_neo"):
        return name.replace("transformer.h.", "model.layers.")
    if name.startswith("backbone."):
        return f"model.{name.removeprefix('backbone.')}"
    if model_type in ("kimi_linear", "bailing_hybrid"):
        name = name.replace(".forget_gate.", ".")
    if model_type == "kimi_linear":
        return name.replace(".mlp.shared_experts.", ".block_sparse_moe.shared_experts.")
    if model_type == "bailing_hybrid":
        return name.replace(".self_attn.", ".attention.").replace(".o_proj", ".dense")
    if model_type == "hy_v3" and name.endswith(".mlp.gate"):
        return f"{name.removesuffix('.gate')}.router.gate"
    return name.replace(".mlp.router", ".block_sparse_moe.gate") if model_type == "phimoe" else name


_GPT2_NAMES = (
    *(("transformer.h.", "model.layers."), (".c_attn", ".qkv_proj"), (".c_fc", ".up_proj")),
    *((".attn.c_proj", ".attn.o_proj"), (".mlp.c_proj", ".mlp.down_proj")),
)


def linears_of(reference: transformers.PreTrainedModel) -> dict[str, torch.nn.Module]:
    """Return the linears of transformers' model by the checkpoint name of a module."""
    kinds = (torch.nn.Linear, Conv1D)
    modules = {name: module for name, module in reference.named_modules() if isinstance(module, kinds)}
    return {stored_name(reference.config.model_type, name): module for name, module in modules.items()}


_GROUPED = ".query_key_value"


def separated(found: dict[str, Tensor], groups: int | None) -> dict[str, Tensor]:
    """Return weights or inputs by linear with those of q, k and v in place of GPT-NeoX's one linear.

    groups: of queries, keys and values, which follow one another in the rows of a weight; None for inputs.
    """
    result = {}
    for name, values in found.items():
        if not name.endswith(_GROUPED):
            result[name] = values
            continue
        parts = [values] * 3 if groups is None else values.unflatten(0, (groups, 3, -1)).unbind(1)
        for part, each in zip("qkv", parts, strict=True):
            result[name.replace(_GROUPED, f".{part}_proj")] = each if groups is None else each.flatten(0, 1)
    return result


def grouped(stored: dict[str, Tensor], groups: int) -> dict[str, Tensor]:
    """Return the tensors of a file with q, k and v of each head in one, as GPT-NeoX's files have them."""
    result = dict(stored)
    for name in [name for name in stored if ".q_proj." in name]:
        parts = [result.pop(name.replace("q_proj", f"{part}_proj")).unflatten(0, (groups, -1)) for part in "qkv"]
        result[name.replace(".q_proj", _GROUPED)] = torch.stack(parts, dim=1).flatten(0, 2)
    return result


def class_of(model_type: str) -> Any:
    return UNMAPPED.get(model_type, transformers.AutoModelForCausalLM)


def packed_weights(model: Transformer) -> dict[str, Tensor]:
    """Return the weights of all linears of the blocks by name, dequantized where they are packed."""
    found: dict[str, Tensor] = {}
    for block in model.layers():
        for linear in block.products.values():
            parts = torch.split(linear.weight(), [spec.out_features for spec in linear.specs])
            found |= {spec.name: part for spec, part in zip(linear.specs, parts, strict=True)}
    return found


def experts_of(folder: ModelFolder) -> dict[str, dict[int, tuple[str, ...]]]:
    """Return the names of gate, up and down (or fused gate_up and down) of each expert, by layer number."""
    mixtures = {spec.index: spec.mlp for spec in folder.config.layer_specs if isinstance(spec.mlp, ExpertsSpec)}
    return {
        str(index): {place: (*(each.name for each in one.linears),) for place, one in enumerate(mixture.experts)}
        for index, mixture in mixtures.items()
    }


def weights_of(
    reference: transformers.PreTrainedModel, names: dict[str, dict[int, tuple[str, ...]]]
) -> dict[str, Tensor]:
    """Return the weights of all linears as transformers read them, by name; the experts of a layer are one tensor."""
    modules = dict(reference.named_modules())
    found = {
        name: module.weight.T if isinstance(module, Conv1D) else module.weight
        for name, module in linears_of(reference).items()
    }
    for name, module in modules.items():
        for expert, linears in names[name.split(".")[2]].items() if name.endswith(".experts") else ():
            if isinstance(up := getattr(module, "up_proj", None), Tensor):  # no gate
                found |= zip(linears, (up[expert], module.down_proj[expert]), strict=True)
                continue
            gate_up, down = module.gate_up_proj[expert], module.down_proj[expert]
            parts = (gate_up.T, down.T) if len(linears) == 2 else (*gate_up.chunk(2), down)
            found |= zip(linears, parts, strict=True)
    return (
        separated(found, reference.config.num_attention_heads) if reference.config.model_type == "gpt_neox" else found
    )
