"""Finds the text model in a multimodal folder, and its MTP head: configs and names of tensors.

Other code sees a plain text model, as if the folder contained nothing else.
"""

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import Any

from mycli.runtime.utils.json_fields import Fields

# model_type of the outer config -> model_type of its text section where that has none.
TEXT_PARTS: dict[str, str] = {
    "NemotronH_Nano_Omni_Reasoning_V3": "nemotron_h",
    "NemotronH_Nano_VL_V2": "nemotron_h",
    "aya_vision": "cohere2",
    "cohere2_vision": "cohere2",
    "deepseek_vl": "llama",
    "exaone4_5": "exaone4",
    "fast_vlm": "qwen2",
    "gemma3": "gemma3_text",
    "gemma3n": "gemma3n_text",
    "gemma4": "gemma4_text",
    "gemma4_unified": "gemma4_unified_text",
    "glm46v": "glm4v_text",
    "glm4v": "glm4v_text",
    "glm4v_moe": "glm4v_moe_text",
    "got_ocr2": "qwen2",
    "idefics2": "mistral",
    "idefics3": "llama",
    "internvl": "qwen2",
    "internvl_chat": "qwen2",
    "janus": "llama",
    "kimi_k25": "deepseek_v3",
    "kimi_vl": "deepseek_v3",
    "lfm2_vl": "lfm2",
    "lfm3_vl": "lfm3",
    "lighton_ocr": "qwen3",
    "llama4": "llama4_text",
    "llava": "llama",
    "llava_next": "llama",
    "llava_next_video": "llama",
    "llava_onevision": "qwen2",
    "minicpmv4_6": "qwen3_5_text",
    "minicpmv4_7": "qwen3_5_text",
    "mistral3": "mistral",
    "muse_glimmer": "muse_glimmer_text",
    "nemotron_h_omni": "nemotron_h",
    "ovis2": "qwen2",
    "qwen2_5_omni": "qwen2_5_omni_text",
    "qwen2_5_omni_thinker": "qwen2_5_omni_text",
    "qwen2_5_vl": "qwen2_5_vl_text",
    "qwen2_audio": "qwen2",
    "qwen2_vl": "qwen2_vl_text",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
    "qwen3_omni_moe": "qwen3_omni_moe_text",
    "qwen3_omni_moe_thinker": "qwen3_omni_moe_text",
    "qwen3_vl": "qwen3_vl_text",
    "qwen3_vl_moe": "qwen3_vl_moe_text",
    "smolvlm": "llama",
    "video_llama_3": "qwen2",
    "video_llava": "llama",
    "vipllava": "llama",
    "voxtral": "llama",
}
# The key under which a text model keeps what only a file for images needs: its outer type, its positions of images.
MULTIMODAL = "multimodal"
# The key, set from the files, of models that have gate and up apart: transformers joins those of two families' experts
# and of Granite's MLP, llm-compressor and mlx-lm take them apart.
SEPARATE_GATE = "separate_gate_up"
_EXPERT_GATE = re.compile(r"\.(experts|switch_mlp)\.([0-9]+\.)?gate_proj\.")
_SEPARATE: dict[Any, re.Pattern[str]] = {
    "gpt_oss": _EXPERT_GATE,
    "llama4_text": _EXPERT_GATE,
    "granitemoehybrid": re.compile(r"\.mlp\.gate_proj\."),
}
_SECTIONS = ("text_config", "llm_config")  # the latter in internvl_chat and Nemotron as published
# Omni models: this part of the config has the section, and its tensors the prefix `thinker.`.
_THINKER = "thinker_config"
# Published before the text model had a section of its own, or converted to MLX without one: its keys are those of the
# outer config.
_FLAT = ("muse_glimmer", "qwen2_vl", "qwen2_5_vl")
# Text models that differ from a plain family only in name or in M-RoPE, which rotates text as plain rope does: the
# three positions of a token that is no image or video are equal.
FAMILIES = {
    "exaone4_5_text": "exaone4",  # in the first files
    "glm4v_moe_text": "glm4_moe",
    "glm4v_text": "glm4",
    "qwen2_5_omni_text": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen2_vl_text": "qwen2",
    "qwen3_omni_moe_text": "qwen3_moe",
    "qwen3_vl_moe_text": "qwen3_moe",
    "qwen3_vl_text": "qwen3",
}
# transformers 4 wrote only those keys of a section that differ from the defaults of its class.
_QWEN_VL = {
    "hidden_size": 8192,
    "intermediate_size": 29568,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 152064,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1000000.0,
}
_QWEN = {
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
}
_LLAMA = {
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "vocab_size": 32000,
}
_MISTRAL = {**_LLAMA, "intermediate_size": 14336, "num_key_value_heads": 8, "max_position_embeddings": 131072}
_QWEN3_VL = {"max_position_embeddings": 128000, "rope_theta": 500000.0}
# By the type of the section, or of the outer config where that has defaults for its section.
CLASS_DEFAULTS: dict[str, dict[str, Any]] = {
    "glm4v_text": {"partial_rotary_factor": 1.0, "rms_norm_eps": 1e-5, "num_key_value_heads": 2},
    "glm4v_moe_text": {"attention_bias": True, "num_key_value_heads": 8},
    "llama": _LLAMA,
    "idefics2": {**_MISTRAL, "sliding_window": 4096},  # not in the published file, and its base model has it
    "mistral": _MISTRAL,
    "qwen2": _QWEN,
    "qwen3": {**_QWEN, "head_dim": 128},
    "qwen2_vl_text": _QWEN_VL,
    "qwen2_5_vl_text": _QWEN_VL,
    "qwen2_5_omni_text": {"rope_theta": 1000000.0, "num_key_value_heads": 4},
    "qwen3_omni_moe_text": {"rope_theta": 1000000.0, "num_key_value_heads": 4, "norm_topk_prob": True},
    "qwen3_vl_text": {**_QWEN, **_QWEN3_VL, "head_dim": 128},
    "qwen3_vl_moe_text": {
        **_QWEN3_VL,
        "num_key_value_heads": 16,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408,
    },
    "voxtral": {
        **_LLAMA,
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_hidden_layers": 30,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 131072,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e8,
    },
}
# model_type of the text model -> the class that transformers loads it with on its own.
_ARCHITECTURES = {
    "cohere2": "Cohere2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "exaone4": "Exaone4ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "gemma3n_text": "Gemma3nForCausalLM",
    "gemma4_text": "Gemma4ForCausalLM",
    "gemma4_unified_text": "Gemma4UnifiedForCausalLM",
    "glm4": "Glm4ForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
    "kimi_k2": "DeepseekV3ForCausalLM",
    "lfm2": "Lfm2ForCausalLM",
    "lfm3": "Lfm3ForCausalLM",
    "llama": "LlamaForCausalLM",
    "llama4_text": "Llama4ForCausalLM",
    "mistral": "MistralForCausalLM",
    "ministral3": "Ministral3ForCausalLM",
    "nemotron_h": "NemotronHForCausalLM",
    "mistral4": "Mistral4ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
}
# Keys of the outer config that count before the text_config.
_OUTER = (
    "dtype",
    "torch_dtype",
    "eos_token_id",
    "bos_token_id",
    "quantization_config",
    "quantization",  # MLX
)
_TIE = "tie_word_embeddings"
# As transformers 5 ties heads: by the outer config, whose class has a default, unless listed further down.
_TIED_BY_DEFAULT = (
    "aya_vision",
    "cohere2_vision",
    "deepseek_vl",
    "gemma3",
    "gemma3n",
    "gemma4",
    "gemma4_unified",
    "got_ocr2",
    "internvl",
    "janus",
    "kimi_k25",
    "lfm2_vl",
    "lfm3_vl",
    "lighton_ocr",
    "mistral3",
    "ovis2",
)
_TIED_BY_EITHER = (
    *("fast_vlm", "glm4v", "glm4v_moe", "llava", "llava_next_video", "llava_onevision", "qwen2_5_vl", "qwen2_vl"),
    "video_llama_3",
)
_TIED_BY_SECTION = ("internvl_chat", "kimi_vl", "llama4")  # which hold a whole causal model, head included
_NEVER_TIED = (  # by transformers 4, as their sections say
    "NemotronH_Nano_Omni_Reasoning_V3",
    "NemotronH_Nano_VL_V2",
    "nemotron_h_omni",
    "qwen2_audio",
    "voxtral",
)
# Prefix in the folder -> prefix in the text model alone, for transformers 5 and older versions; the first match counts.
_TEXT_PREFIXES = (
    ("model.language_model.", "model."),
    ("language_model.model.", "model."),
    ("language_model.backbone.", "backbone."),
    ("language_model.lm_head.", "lm_head."),
    ("model.text_model.", "model."),
    ("lm_head.", "lm_head."),
    # Qwen 2 VL and 2.5 VL as published have no prefix for the text model.
    ("model.embed_tokens.", "model.embed_tokens."),
    ("model.layers.", "model.layers."),
    ("model.norm.", "model.norm."),
)
_PREFIXES = (*((f"thinker.{prefix}", text_prefix) for prefix, text_prefix in _TEXT_PREFIXES), *_TEXT_PREFIXES)


@dataclass(frozen=True)
class TextPart:
    """The text model of a folder.

    outer_type: `model_type` of the multimodal model, None for a plain text model.
    head_by_files: the outer config does not say whether the head is tied; it is unless the files hold one.
    """

    config: Fields
    outer_type: str | None = None
    head_by_files: bool = False

    @property
    def depends_on_files(self) -> bool:
        """Return whether `with_tensors` may change the config."""
        return self.head_by_files or self._gate is not None

    @classmethod
    def from_config(cls, raw: Fields) -> "TextPart":
        """Return the text model of a parsed config.json."""
        outer_type = raw.text("model_type", "")
        if outer_type in TEXT_PARTS and raw.has(_THINKER):
            outer = {key: raw.values[key] for key in _OUTER if raw.has(key)}
            raw = Fields({**raw.object(_THINKER).values, **outer, "model_type": outer_type}, raw.source)
        key = next((name for name in _SECTIONS if raw.has(name)), None)
        if outer_type not in TEXT_PARTS or (key is None and outer_type not in _FLAT):
            return cls(raw)
        section = Fields(_without_sections(raw), raw.source) if key is None else raw.object(key)
        outer = {key: raw.values[key] for key in _OUTER if raw.has(key)}
        tie, head_by_files = _tie(raw, section, outer_type)
        stored = section.text("model_type", TEXT_PARTS[outer_type])
        model_type = FAMILIES.get(stored, stored)
        values = {
            **CLASS_DEFAULTS.get(outer_type, CLASS_DEFAULTS.get(stored, {})),
            **section.values,
            **outer,
            **tie,
            "model_type": model_type,
        }
        if outer_type == "lfm2_vl":  # its text config alone would read the head's tie from this key
            values.pop("tie_embedding", None)
        if stored in FAMILIES:
            ropes = {name: values[name] for name in ("rope_parameters", "rope_scaling") if name in values}
            values |= {name: _plain_rope(rope) for name, rope in ropes.items()}
            values[MULTIMODAL] = {"model_type": outer_type, **_image_positions(raw, ropes.values())}
        if stored == "qwen3_vl_moe_text":  # transformers normalizes the weights whatever the config says
            values["norm_topk_prob"] = True
        values.pop("architectures", None)
        if model_type in _ARCHITECTURES:
            values["architectures"] = [_ARCHITECTURES[model_type]]
        values |= {key: _renamed(values[key]) for key in ("quantization_config", "quantization") if key in values}
        return cls(Fields(values, raw.source), outer_type, head_by_files)

    def with_tensors(self, names: Collection[str]) -> "TextPart":
        """Return this part with what the tensors in the files decide: a tied head, and gate and up apart."""
        if not self.depends_on_files:
            return self
        values = {key: value for key, value in self.config.values.items() if key != SEPARATE_GATE}
        if self.head_by_files:
            values[_TIE] = not any((self.local_name(name) or "").startswith("lm_head.") for name in names)
        if self._gate is not None and any(self._gate.search(name) for name in names):
            values[SEPARATE_GATE] = True
        return replace(self, config=Fields(values, self.config.source))

    @property
    def _gate(self) -> re.Pattern[str] | None:
        return _SEPARATE.get(self.config.values.get("model_type"))

    def local_name(self, stored: str) -> str | None:
        """Return the text model's name of a tensor of the folder; None for tensors of other parts."""
        if self.outer_type is None:
            return stored
        for prefix, text_prefix in _PREFIXES:
            if stored.startswith(prefix):
                return text_prefix + stored.removeprefix(prefix)
        return None


@dataclass(frozen=True)
class MtpPart:
    """The multi-token prediction head of a folder, read as a model of its own: `mtp.` becomes `model.`."""

    outer_type: str | None = None

    def local_name(self, stored: str) -> str | None:
        if not stored.startswith("mtp."):
            return None
        name = stored.removeprefix("mtp.")
        return f"model.{name}" if name.startswith(("layers.", "norm.")) else name

    def stored_name(self, name: str) -> str:
        """Return the folder's name of the head's tensor `name`."""
        return f"mtp.{name.removeprefix('model.')}"


MTP_PART = MtpPart()


def _tie(raw: Fields, section: Fields, outer_type: str) -> tuple[dict[str, Any], bool]:
    """Return the text config's value for tying the head, {} for its own, and whether the files decide."""
    stated, section_ties = raw.values.get(_TIE), section.values.get(_TIE) is True
    if stated is None and _TIE in raw.values:
        return {_TIE: None}, False  # refused where the config is read
    if outer_type == "lfm2_vl":
        stated = raw.values.get("tie_embedding", stated)
    if outer_type in _TIED_BY_SECTION or (outer_type in _TIED_BY_EITHER and stated in (None, False)):
        return {}, False
    if stated is not None and outer_type not in _NEVER_TIED:
        return {_TIE: stated}, False
    # transformers 5 reads the default of the outer class, and unties a stored head that differs; transformers 4 reads
    # the section. Without files, which hold no head if it is tied, the section or its family's default counts.
    by_files = outer_type in _TIED_BY_DEFAULT or section_ties
    return ({} if by_files else {_TIE: False}), by_files


def _without_sections(raw: Fields) -> dict[str, Any]:
    return {key: value for key, value in raw.values.items() if not key.endswith("_config") and key != "model_type"}


def _plain_rope(rope: Any) -> Any:
    if not isinstance(rope, dict):
        return rope  # refused, with the name of the field, where the config is read
    plain = {key: value for key, value in rope.items() if not key.startswith("mrope_")}
    return {key: "default" if value == "mrope" else value for key, value in plain.items()}


def _renamed(value: Any) -> Any:
    """Return a part of a `quantization_config` with the text model's names in names and patterns of linears."""
    # Recursion is safe on a stranger's JSON: the parser limits its nesting.
    if isinstance(value, dict):
        return {_renamed(key): _renamed(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_renamed(item) for item in value]
    if isinstance(value, str):
        for prefix, text_prefix in _PREFIXES:
            if text_prefix == "lm_head.":  # a linear itself, whose name may end there
                prefix, text_prefix = prefix[:-1], text_prefix[:-1]
            for dot in (".", r"\.", "[.]"):
                value = value.replace(prefix.replace(".", dot), text_prefix.replace(".", dot))
        if value.startswith("re:"):  # such as re:.*language_model.*_proj$
            value = re.sub(r"(model(\.|\\\.|\[\.\]))?language_model", "model", value)
    return value


def _image_positions(raw: Fields, ropes: Iterable[Any]) -> dict[str, Any]:
    # As stored: the values are checked where they are written to a file.
    sections = [rope["mrope_section"] for rope in ropes if isinstance(rope, dict) and "mrope_section" in rope]
    vision = raw.values.get("vision_config")
    deepstack = vision.get("deepstack_visual_indexes") if isinstance(vision, dict) else None
    return {
        **({"mrope_section": sections[0]} if sections else {}),
        **({"deepstack_layers": len(deepstack)} if isinstance(deepstack, list) else {}),
    }
