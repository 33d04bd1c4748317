"""Writes folders of small random models of every family that has portable bits."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.support.families import CASES, make
from tests.support.family_parts import SMALL
from tests.support.native_parts import HEAD, WIDE
from tests.support.packed_folder import write_packed

_EXPERTS = {"n_routed_experts": 32}
_ROPE = {"qk_rope_head_dim": 32, "q_lora_rank": 64, "max_position_embeddings": 1024}
_LATENT = {**_ROPE, "q_lora_rank": None, "kv_lora_rank": 64, "qk_nope_head_dim": 32, "v_head_dim": 32}
# Sizes for which native code runs all parts, where `WIDE` is not enough.
_SIZES: Mapping[str, Mapping[str, Any]] = {
    "deepseek_v2-groups-odd-sizes-biases-tied": {**_LATENT, **_EXPERTS, "mlp_bias": False},
    "deepseek_v3-groups-yarn": {**_ROPE, **_EXPERTS},
    "minicpm3-tied": _ROPE,
    "youtu-odd-sizes-half-split-biases-untied": _LATENT,
    "mistral4-beyond": {**_ROPE, **_EXPERTS},
    "granitemoehybrid-8top3": {"mamba_n_heads": 8, "num_local_experts": 32, "shared_intermediate_size": 64},
    "bamba-2-groups": {"mamba_n_heads": 8, "num_attention_heads": 2, "num_key_value_heads": 1},
    "mamba2-2-groups": {"hidden_size": 64},
    "nemotron_h-every-kind": _EXPERTS,
    "jamba-8top3": {"mamba_dt_rank": 32, "num_experts": 32},
    "falcon_mamba-tied": {"time_step_rank": 32, "intermediate_size": 128},
    "falcon_h1-multipliers": {"mamba_d_ssm": 128, "mamba_d_head": 32},
    "kimi_linear-8top3": {"qk_rope_head_dim": 32, "num_local_experts": 32},
    "bailing_hybrid-8top3": {"qk_rope_head_dim": 32, "num_experts": 32},
    "gemma4-ple-shared-kv-double": {"head_dim": 32, "global_head_dim": 64},
    "glm4-half-turned": {"head_dim": 64},
    **dict.fromkeys(("llama-biases", "olmo2-mha-tied-biases", "granite-multipliers", "lfm2-tied"), {}),
}
PACKED = "packed"  # a Llama of packed blocks and a dense head


def write_family(folder: Path, case: str) -> Path:
    """Write the model of a case of `families.CASES`, or `PACKED`, of whole vectors where its shapes allow them."""
    if case == PACKED:
        fields = {**SMALL, **WIDE, "model_type": "llama", "vocab_size": 512, "rms_norm_eps": 1e-6}
        return write_packed(folder, fields, {"q_proj": 8, "down": 3, "": 4})
    kind, changes = CASES[case]
    make(folder, kind, {**WIDE, **changes, **_SIZES.get(case, HEAD)})
    return folder
