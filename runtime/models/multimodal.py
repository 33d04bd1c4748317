"""Finds the text model in a multimodal folder, and its MTP head: configs and names of tensors.

Other code sees a plain text model, as if the folder contained nothing else.
"""

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

from mycli.runtime.models.multimodal_types import (
    ARCHITECTURES,
    CLASS_DEFAULTS,
    FAMILIES,
    NEVER_TIED,
    TEXT_PARTS,
    TEXT_VERSIONS,
    TIED_BY_DEFAULT,
    TIED_BY_EITHER,
    TIED_BY_SECTION,
)
from mycli.runtime.utils.json_fields import Fields

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
_FLAT = (
    *("ernie4_5_moe_vl", "hunyuan_vl", "internlm2", "minicpmo", "minicpmv", "muse_glimmer", "paddleocr_vl"),
    *("qwen2_vl", "qwen2_5_vl"),
)
# Keys of ERNIE 4.5 VL with a value for text and one for images.
_ERNIE_PAIRS = ("moe_num_experts", "moe_intermediate_size", "moe_layer_start_index", "moe_layer_end_index")
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
_NORM_HEAD = "norm_head"
_BAICHUAN_1_TOKENS = 64000
_BAICHUAN_1_CLASS = "BaiChuanForCausalLM"  # with a capital C, in the 7B model alone
# Prefix in the folder -> prefix in the text model alone, for transformers 5 and older versions; the first match counts.
_TEXT_PREFIXES = (
    ("model.language_model.model.", "model."),  # HyperCLOVA X as published holds a whole causal model
    ("model.language_model.lm_head.", "lm_head."),
    ("model.language_model.", "model."),
    ("language_model.model.", "model."),
    ("language_model.backbone.", "backbone."),
    ("language_model.lm_head.", "lm_head."),
    ("language_model.output.", "lm_head."),  # InternLM 2
    ("model.text_model.", "model."),
    ("llm.model.", "model."),
    ("llm.lm_head.", "lm_head."),
    ("lm_head.", "lm_head."),
    ("output.", "lm_head."),
    # Qwen 2 VL and 2.5 VL as published have no prefix for the text model.
    ("model.embed_tokens.", "model.embed_tokens."),
    ("model.tok_embeddings.", "model.embed_tokens."),
    ("model.layers.", "model.layers."),
    ("model.norm.", "model.norm."),
)
# Text models whose attention reads no window in transformers, unlike that of their families.
_FULL_ATTENTION = ("qwen3_omni_moe_text", "qwen3_vl_moe_text", "qwen3_vl_text")
_PREFIXES = (*((f"thinker.{prefix}", text_prefix) for prefix, text_prefix in _TEXT_PREFIXES), *_TEXT_PREFIXES)


@dataclass(frozen=True)
class TextPart:
    """The text model of a folder.

    outer_type: `model_type` of the multimodal model, None for a plain text model.
    head_by_files: the outer config does not say whether the head is tied; it is unless the files hold one.
    norm_head: each column (Ling 1) or row (Baichuan 2) of the stored head has still to be divided by its norm.
    """

    config: Fields
    outer_type: str | None = None
    head_by_files: bool = False
    norm_head: Literal["columns", "rows"] | None = None

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
            # Read with the division done, so that copies, which may quantize the head, do not ask for it.
            norm_head = _norm_head(outer_type, raw)
            return cls(Fields({**raw.values, _NORM_HEAD: False}, raw.source) if norm_head else raw, norm_head=norm_head)
        section = Fields(_without_sections(raw), raw.source) if key is None else raw.object(key)
        outer = {key: raw.values[key] for key in _OUTER if raw.has(key)}
        tie, head_by_files = _tie(raw, section, outer_type)
        stored = section.text("model_type", _flat_type(section, outer_type))
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
        _correct(values, stored)
        values.pop("architectures", None)
        values.pop("auto_map", None)  # code for the whole model, with which transformers would read a copy
        if model_type in ARCHITECTURES:
            values["architectures"] = [ARCHITECTURES[model_type]]
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


def _correct(values: dict[str, Any], stored: str) -> None:
    """Set what the classes of a text model read from other keys, or ignore."""
    if stored == "glm_ocr_text":  # has no biases, whatever the config says
        values["attention_bias"] = False
    if stored == "internlm2":
        values["attention_bias"] = values.pop("bias", True)
    if stored == "ernie4_5_vl_moe_text":
        pairs = {key: values[key] for key in _ERNIE_PAIRS if isinstance(values.get(key), list)}
        values |= {key: pair[0] for key, pair in pairs.items() if pair}
    if stored in _FULL_ATTENTION:
        values["use_sliding_window"] = False
        values.pop("layer_types", None)
    if stored == "qwen3_vl_moe_text":  # transformers normalizes the weights whatever the config says
        values["norm_topk_prob"] = True
        if not {"num_experts", "num_local_experts"} & values.keys():
            values["num_experts"] = 60


def _norm_head(model_type: str, raw: Fields) -> Literal["columns", "rows"] | None:
    """Return what of the stored head is to be divided by its norm."""
    if model_type == "bailing_moe":
        return "columns" if raw.values.get(_NORM_HEAD) is True and raw.values.get(_TIE) is not True else None
    # Baichuan 1 has a class of its own and a smaller vocabulary, which finetunes change; copies of Baichuan 2 say that
    # their heads are divided.
    first = raw.values.get("vocab_size") == _BAICHUAN_1_TOKENS or raw.values.get("architectures") == [_BAICHUAN_1_CLASS]
    second = model_type == "baichuan" and not first
    return "rows" if second and raw.values.get(_NORM_HEAD) is not False else None


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
    by_either = outer_type in TIED_BY_EITHER and (stated is False or outer_type not in TIED_BY_DEFAULT)
    if outer_type in TIED_BY_SECTION or (by_either and stated is not True):
        return {}, False
    if stated is not None and outer_type not in NEVER_TIED:
        return {_TIE: stated}, False
    # transformers 5 reads the default of the outer class, and unties a stored head that differs; transformers 4 reads
    # the section. Without files, which hold no head if it is tied, the section or its family's default counts.
    by_files = outer_type in TIED_BY_DEFAULT or section_ties
    return ({} if by_files else {_TIE: False}), by_files


def _flat_type(section: Fields, outer_type: str) -> str:
    """Return the type of a section that does not say it."""
    if not section.has("version") or outer_type not in ("minicpmo", "minicpmv"):
        # The first MiniCPM-V has the multipliers of MiniCPM.
        return "minicpm" if outer_type == "minicpmv" and section.has("scale_emb") else TEXT_PARTS[outer_type]
    return TEXT_VERSIONS.get(str(section.values["version"]), outer_type)


def _without_sections(raw: Fields) -> dict[str, Any]:
    return {key: value for key, value in raw.values.items() if not key.endswith("_config") and key != "model_type"}


def _plain_rope(rope: Any) -> Any:
    if not isinstance(rope, dict):
        return rope  # refused, with the name of the field, where the config is read
    plain = {key: value for key, value in rope.items() if not key.startswith(("mrope_", "xdrope_"))}
    # xdrope (Hunyuan) has axes, too; its frequencies are those of Hunyuan's "dynamic".
    names = {"mrope": "default", "xdrope": "dynamic"}
    return {key: names.get(value, value) if isinstance(value, str) else value for key, value in plain.items()}


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
