"""Build hostile and malformed LoRA adapters: a valid adapter with one change, and the expected error.

`ATTACKS` maps a name to the changes of adapter_config.json, the change of the tensors, and a pattern of the message.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Tensors = dict[str, Tensor]
Attack = tuple[dict[str, Any], Callable[[Tensors], object], str]
_Q = "base_model.model.model.layers.0.self_attn.q_proj"
_DOWN = "base_model.model.model.layers.1.mlp.down_proj"
_A, _B = f"{_Q}.lora_A.weight", f"{_Q}.lora_B.weight"


def _nothing(tensors: Tensors) -> None:
    """Change no tensors: only the config is attacked."""


def _put(**parts: Tensor) -> Callable[[Tensors], object]:
    """Replace tensors; names have dots written as two underscores and lack PEFT's prefix."""
    return lambda tensors: tensors.update({f"base_model.model.{k.replace('__', '.')}": v for k, v in parts.items()})


def _rename(old: str, new: str) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({new: tensors.pop(old)})


ATTACKS: dict[str, Attack] = {
    "another-method": ({"peft_type": "LOHA"}, _nothing, r"adapter_config.json: peft_type is LOHA"),
    "no-method": ({"peft_type": None}, _nothing, r"peft_type is missing"),
    "dora-without-norms": ({"use_dora": True}, _nothing, r"self_attn.q_proj has lora_magnitude_vector missing"),
    "dora-of-other-rows": (
        {"use_dora": True},
        lambda tensors: tensors.update({f"{m}.lora_magnitude_vector": torch.ones(4) for m in (_Q, _DOWN)}),
        r"q_proj: \[4\] norms for 128 rows",
    ),
    "dora-without-numbers": (
        {"use_dora": True},
        lambda tensors: tensors.update(
            {f"{m}.lora_magnitude_vector": torch.full((128,), torch.nan) for m in (_Q, _DOWN)}
        ),
        r"lora_magnitude_vector: 128 of 128 values are NaN",
    ),
    "dora-by-its-tensors": ({}, _put(x__lora_magnitude_vector=torch.ones(4)), r"x.lora_magnitude_vector: not part"),
    "a-method-to-come": ({"use_newra": True}, _nothing, r"use_newra is not supported"),
    "activated-by-tokens": ({"alora_invocation_tokens": [1]}, _nothing, r"alora_invocation_tokens"),
    "copied-layers": ({"layer_replication": [[0, 2], [1, 3]]}, _nothing, r"layer_replication"),
    "experts-as-parameters": ({"target_parameters": ["mlp.experts"]}, _nothing, r"target_parameters"),
    "pissa": ({"init_lora_weights": "pissa_niter_4"}, _nothing, r"init_lora_weights 'pissa_niter_4'"),
    "rank-of-text": ({"r": "4"}, _nothing, r"r must be an integer"),
    "rank-of-nothing": ({"r": 0}, _nothing, r"r must be between 1 and"),
    "rank-without-end": ({"r": 1 << 40}, _nothing, r"r must be between 1 and"),
    "another-rank": ({"r": 8}, _nothing, r"A \[4, 128\] and B \[128, 4\] of rank 8 do not fit the weight \[128, 128\]"),
    "alpha-without-end": ({"lora_alpha": 1e300}, _nothing, r"lora_alpha must be between"),
    "expression-that-never-ends": (
        {"alpha_pattern": {"(a+)+$": 1}},
        _nothing,
        r"'\(a\+\)\+\$' is a regular expression",
    ),
    "patterns-without-end": ({"rank_pattern": {f"m{i}": 1 for i in range(10_001)}}, _nothing, r"more than 10000"),
    "pattern-of-text": ({"rank_pattern": {"q_proj": "4"}}, _nothing, r"q_proj must be an integer"),
    "half": ({}, lambda tensors: tensors.pop(_A), r"layers.0.self_attn.q_proj has lora_A missing"),
    "other-half": ({}, lambda tensors: tensors.pop(_B), r"layers.0.self_attn.q_proj has lora_B missing"),
    "no-prefix": (
        {},
        _rename(_A, "model.q_proj.lora_A.weight"),
        r"model.q_proj.lora_A.weight: not a tensor name of PEFT",
    ),
    "no-such-module": (
        {},
        _put(h__0__c__lora_A__weight=torch.ones(4, 8), h__0__c__lora_B__weight=torch.ones(8, 4)),
        r"h.0.c.weight: the model has no such weight",
    ),
    "transposed": ({}, lambda tensors: tensors.update({_A: tensors[_A].T.contiguous()}), r"A \[128, 4\]"),
    "three-dimensions": ({}, lambda tensors: tensors.update({_A: tensors[_A][None]}), r"A \[1, 4, 128\]"),
    "of-a-norm": (
        {},
        _put(model__norm__lora_A__weight=torch.ones(4, 1), model__norm__lora_B__weight=torch.ones(128, 4)),
        r"model.norm: A \[4, 1\] and B \[128, 4\]",
    ),
    "of-the-embedding": (
        {},
        _put(model__embed_tokens__lora_embedding_A=torch.ones(4, 4096)),
        r"model.embed_tokens has lora_A missing",
    ),
    "integers": ({}, lambda tensors: tensors.update({_A: tensors[_A].int()}), r"lora_A.weight is I32"),
    "not-a-number": ({}, lambda tensors: tensors[_B].fill_(torch.nan), r"lora_B.weight: 512 of 512 values are NaN"),
    "too-large-a-sum": (
        {"lora_alpha": 1e6},
        lambda tensors: tensors[_B].fill_(3e38),
        r"q_proj.weight with the adapter",
    ),
    "more-tokens": (
        {},
        _put(lm_head__weight=torch.ones(4097, 128)),
        r"lm_head.weight has shape \[4097, 128\], but the model's tensor has \[4096, 128\]",
    ),
    "whole-and-added": (
        {},
        _put(**{"model__layers__0__self_attn__q_proj__weight": torch.ones(128, 128)}),
        r"q_proj.weight has both a low-rank update and a replacement",
    ),
    "a-name-to-escape-with": ({}, _rename(_A, "../../../etc/passwd"), r"etc/passwd' is empty, too long or holds"),
}
