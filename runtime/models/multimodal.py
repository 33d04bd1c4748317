"""Finds the text model in a multimodal folder, and its MTP head: configs and names of tensors.

Other code sees a plain text model, as if the folder contained nothing else.
"""

from dataclasses import dataclass
from typing import Any

from mycli.runtime.utils.json_fields import Fields

# model_type of the outer config -> model_type of its text_config where that has none.
TEXT_PARTS: dict[str, str] = {
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
    "gemma4_unified": "gemma4_unified_text",
    "llama4": "llama4_text",
    "mistral3": "mistral",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
}
# model_type of the text model -> the class that transformers loads it with on its own.
_ARCHITECTURES = {
    "gemma3_text": "Gemma3ForCausalLM",
    "gemma4_text": "Gemma4ForCausalLM",
    "gemma4_unified_text": "Gemma4UnifiedForCausalLM",
    "llama4_text": "Llama4ForCausalLM",
    "mistral": "MistralForCausalLM",
    "ministral3": "Ministral3ForCausalLM",
    "mistral4": "Mistral4ForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
}
# Keys of the outer config that count before the text_config.
_OUTER = (
    "dtype",
    "torch_dtype",
    "eos_token_id",
    "bos_token_id",
    "tie_word_embeddings",
    "quantization_config",
)
# Prefix in the folder -> prefix in the text model alone, for transformers 5 and older versions; the first match counts.
_PREFIXES = (
    ("model.language_model.", "model."),
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("lm_head.", "lm_head."),
)


@dataclass(frozen=True)
class TextPart:
    """The text model of a folder. outer_type: `model_type` of the multimodal model, None for a plain text model."""

    config: Fields
    outer_type: str | None = None

    @classmethod
    def from_config(cls, raw: Fields) -> "TextPart":
        """Return the text model of a parsed config.json."""
        outer_type = raw.text("model_type", "")
        if outer_type not in TEXT_PARTS or not raw.has("text_config"):
            return cls(raw)
        section = raw.object("text_config")
        outer = {key: raw.values[key] for key in _OUTER if raw.has(key)}
        model_type = section.text("model_type", TEXT_PARTS[outer_type])
        values = {**section.values, **outer, "model_type": model_type}
        if model_type in _ARCHITECTURES:
            values["architectures"] = [_ARCHITECTURES[model_type]]
        if "quantization_config" in values:
            values["quantization_config"] = _renamed(values["quantization_config"])
        return cls(Fields(values, raw.source), outer_type)

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


def _renamed(value: Any) -> Any:
    """Return a part of a `quantization_config` with the text model's names in names and patterns of linears."""
    # Recursion is safe on a stranger's JSON: the parser limits its nesting.
    if isinstance(value, dict):
        return {_renamed(key): _renamed(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_renamed(item) for item in value]
    if isinstance(value, str):
        for prefix, text_prefix in _PREFIXES:
            value = value.replace(prefix, text_prefix)
            value = value.replace(prefix.replace(".", r"\."), text_prefix.replace(".", r"\."))
    return value
