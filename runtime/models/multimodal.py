"""The parts of a folder that holds more than a text model: their configs, and the names that their tensors have there.

Everybody else is handed a text model, as if the folder held nothing else; or the head that predicts beside it. Knows
which keys of the outer config concern the text, and the prefixes of transformers 5 and of before. Does not know
families, files, or what the rest is for.
"""

from dataclasses import dataclass
from typing import Any

from mycli.runtime.utils.json_fields import Fields

# Of the outer config: the text model that its section describes where that does not say, and how transformers calls
# that model alone.
TEXT_PARTS: dict[str, str] = {
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
    "gemma4_unified": "gemma4_unified_text",
    "mistral3": "mistral",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
}
_ALONE = {
    "gemma3_text": "Gemma3ForCausalLM",
    "gemma4_text": "Gemma4ForCausalLM",
    "gemma4_unified_text": "Gemma4UnifiedForCausalLM",
    "mistral": "MistralForCausalLM",
    "ministral3": "Ministral3ForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
}
_OUTER = (
    "dtype",
    "torch_dtype",
    "eos_token_id",
    "bos_token_id",
    "tie_word_embeddings",
    "quantization_config",
)
# As stored, and as the text model alone calls it; the first that fits.
_PREFIXES = (
    ("model.language_model.", "model."),
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("lm_head.", "lm_head."),
)


@dataclass(frozen=True)
class TextPart:
    """`config`: that of the text model; `whole`: the `model_type` of what it is a part of, None where it is all."""

    config: Fields
    outer_type: str | None = None

    @classmethod
    def from_config(cls, raw: Fields) -> "TextPart":
        """In a parsed config.json. What the outer config says of the text counts before its section."""
        whole = raw.text("model_type", "")
        if whole not in TEXT_PARTS or not raw.has("text_config"):
            return cls(raw)
        section = raw.object("text_config")
        outer = {key: raw.values[key] for key in _OUTER if raw.has(key)}
        kind = section.text("model_type", TEXT_PARTS[whole])
        values = {**section.values, **outer, "model_type": kind}
        if kind in _ALONE:
            values["architectures"] = [_ALONE[kind]]
        if "quantization_config" in values:
            values["quantization_config"] = _renamed(values["quantization_config"])
        return cls(Fields(values, raw.source), whole)

    def local_name(self, stored: str) -> str | None:
        """What the text model calls a tensor of the folder; None for what is not of the text."""
        if self.outer_type is None:
            return stored
        for prefix, alone in _PREFIXES:
            if stored.startswith(prefix):
                return alone + stored.removeprefix(prefix)
        return None


@dataclass(frozen=True)
class MtpPart:
    """The head that predicts one token further, stored beside the model: as a model of its own it has other names."""

    outer_type: str | None = None

    def local_name(self, stored: str) -> str | None:
        """As `TextPart.name`."""
        if not stored.startswith("mtp."):
            return None
        own = stored.removeprefix("mtp.")
        return f"model.{own}" if own.startswith(("layers.", "norm.")) else own

    def stored_name(self, name: str) -> str:
        """How a folder calls what the head calls `name`."""
        return f"mtp.{name.removeprefix('model.')}"


MTP_PART = MtpPart()


def _renamed(value: Any) -> Any:
    """A part of a `quantization_config` in which names of linears, and patterns for them, are those of the text model.

    JSON of a stranger, nested no deeper than its parser allows.
    """
    if isinstance(value, dict):
        return {_renamed(key): _renamed(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_renamed(each) for each in value]
    if isinstance(value, str):
        for prefix, alone in _PREFIXES:
            value = value.replace(prefix, alone).replace(prefix.replace(".", r"\."), alone.replace(".", r"\."))
    return value
