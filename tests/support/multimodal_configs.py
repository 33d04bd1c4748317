"""Configs of multimodal models: those of `multimodal_families`, and wrappers whose models are not built."""

from typing import Any

from tests.support.family_parts import GEMMA4, IDS
from tests.support.multimodal_families import FOLDERS, QWEN_VISION, SIGLIP
from tests.support.recurrent_families import DELTA


def sections(others: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in others.items() if key != "tie_word_embeddings"}


_LLAMA4_VISION = {"model_type": "llama4_vision_model", **SIGLIP}
# id -> (outer type, text type, differences of the text config from SMALL, other sections)
CONFIGS: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    **{
        name: (outer, inner, text, {"vision_config": vision, **sections(others)})
        for name, (outer, inner, text, vision, others) in FOLDERS.items()
    },
    "qwen3_5": (
        "qwen3_5",
        "qwen3_5_text",
        {**IDS, **DELTA},
        {"vision_config": {"model_type": "qwen3_5", **QWEN_VISION}},
    ),
    "llama4": ("llama4", "llama4_text", {**IDS, "head_dim": 16}, {"vision_config": _LLAMA4_VISION}),
    "gemma4_unified": ("gemma4_unified", "gemma4_unified_text", GEMMA4, {}),
    "qwen2_audio": ("qwen2_audio", "qwen2", IDS, {}),
    "voxtral": ("voxtral", "llama", IDS, {}),
}
# transformers has no class of those as published by others, and builds gemma3n and perception_lm with other packages
# only; Omni models hold a thinker.
UNTESTED = {
    "NemotronH_Nano_Omni_Reasoning_V3",
    "NemotronH_Nano_VL_V2",
    "ernie4_5_moe_vl",
    "internlm2",
    "internvl_chat",
    "gemma3n",
    "kimi_vl",
    "minicpmo",
    "minicpmv",
    "ovis",
    "ovis2_5",
    "perception_lm",
    "qwen2_5_omni",
    "qwen3_omni_moe",
    "vlm",
}
