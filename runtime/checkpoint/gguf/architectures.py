"""What an architecture of llama.cpp is in the words of Hugging Face: config.json from metadata, and tensor names.

One entry of `ARCHITECTURES` each: the `model_type` it stands for, the names of its tensors where they are not Llama's,
and what its converter did to the weights (llama.cpp's conversion/): rows of q and k reordered for rotation in pairs,
norms stored as 1 + w. Knows names and numbers, no bytes. What comes out is a config.json like any other, and is refused
by its family's reader where this program would compute something else. Imports no torch.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from mycli.runtime.checkpoint.safetensors_header import TensorEntry
from mycli.runtime.errors import ModelError
from mycli.runtime.models.config import MAX_LAYERS
from mycli.runtime.utils.json_fields import Fields

_BASE = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_GEMMA_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
ROPE_FREQS, ROPE_LONG, ROPE_SHORT = "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"
CONSUMED = (ROPE_FREQS, ROPE_LONG, ROPE_SHORT)  # tensors that become part of the config
_LAYER = re.compile(r"blk\.(\d{1,4})\.([a-z_]+)\.(weight|bias)")


@dataclass(frozen=True)
class GgufModel:
    """A header as an architecture's entry sees it: `floats` reads a small F32 tensor."""

    metadata: Fields
    tensors: Mapping[str, TensorEntry]
    floats: Callable[[str], Sequence[float]]

    @property
    def architecture(self) -> str:
        """`general.architecture`."""
        return self.metadata.text("general.architecture")

    def integer(self, key: str, default: int | None = None, low: int = 0, high: int = 1 << 31) -> int:
        """An integer under the architecture's name; a list of one value for each layer must hold the same one."""
        return self._uniform(key).integer(f"{self.architecture}.{key}", default, low, high)

    def number(self, key: str, default: float | None = None, low: float = -1e12) -> float:
        """The same for a number."""
        return self.metadata.number(f"{self.architecture}.{key}", default, low)

    def has(self, key: str) -> bool:
        """Whether the architecture's key is there."""
        return self.metadata.has(f"{self.architecture}.{key}")

    def text(self, key: str, default: str) -> str:
        """The same for a short string."""
        return self.metadata.text(f"{self.architecture}.{key}", default)

    def _uniform(self, key: str) -> Fields:
        name = f"{self.architecture}.{key}"
        value = self.metadata.values.get(name)
        if value is None or isinstance(value, int | float | str):
            return self.metadata
        distinct = set(value)
        if len(distinct) != 1:
            raise self.metadata.fail(name, "differs from layer to layer, which is not supported")
        return Fields({name: distinct.pop()}, self.metadata.source)


Config = dict[str, Any]


@dataclass(frozen=True)
class Architecture:
    """How to read one architecture, and how to write it: `paired`, whether rows of q and k were reordered for rotation
    in pairs; `norm_shift`, what was added to norms; `extra`, config fields that only it has."""

    model_type: str
    names: Mapping[str, str] = field(default_factory=dict)
    paired: bool = False
    norm_shift: float = 0.0
    extra: Callable[[GgufModel, Config], Config] = lambda model, config: {}

    @property
    def layer_names(self) -> dict[str, str]:
        """Name in a layer here, by name in a layer there."""
        return {**_BASE, **self.names}

    def renamed(self, name: str) -> str | None:
        """The Hugging Face name of a tensor; None for a name that the architecture has not."""
        outer, _, kind = name.rpartition(".")
        if outer in _OUTER and kind in ("weight", "bias"):
            return f"{_OUTER[outer]}.{kind}"
        found = _LAYER.fullmatch(name)
        if found is None or found[2] not in self.layer_names:
            return None
        return f"model.layers.{int(found[1])}.{self.layer_names[found[2]]}.{found[3]}"

    def stored_name(self, name: str) -> str | None:
        """The inverse of `renamed`; None for a tensor that the architecture has no place for."""
        outer, _, kind = name.rpartition(".")
        for there, here in _OUTER.items():
            if outer == here:
                return f"{there}.{kind}"
        found = re.fullmatch(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)", name)
        there_by_name = {here: there for there, here in _BASE.items()} | {h: t for t, h in self.names.items()}
        if found is None or found[2] not in there_by_name:
            return None
        return f"blk.{found[1]}.{there_by_name[found[2]]}.{found[3]}"

    def is_paired(self, name: str) -> bool:
        """Whether the rows of the tensor of that Hugging Face name stand in another order there."""
        return self.paired and ".self_attn." in name and name.split(".")[-2] in ("q_proj", "k_proj")


def llama3_factors(head_dim: int, theta: float, factor: float, low: float, high: float, original: int) -> list[float]:
    """What divides each rotary frequency of Llama 3.1 and later: 1 for short waves, `factor` for long ones."""
    factors = []
    for index in range(0, head_dim, 2):
        wavelength = 2 * math.pi * theta ** (index / head_dim)
        smooth = (original / wavelength - low) / (high - low)
        factors.append(1 / ((1 - min(max(smooth, 0.0), 1.0)) / factor + min(max(smooth, 0.0), 1.0)))
    return factors


def _llama3_scaling(model: GgufModel, head_dim: int, theta: float) -> Config:
    """The parameters behind stored frequency factors: a file holds the factors, not what they were made from."""
    stored = model.floats(ROPE_FREQS)
    factor = max(stored, default=1.0)
    for original in (1 << power for power in range(3, 24)) if factor > 0 else ():
        made = llama3_factors(head_dim, theta, factor, 1.0, 4.0, original)
        if len(made) == len(stored) and all(map(partial(math.isclose, rel_tol=1e-4), made, stored)):
            scaling = {"factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
            return {"rope_type": "llama3", "original_max_position_embeddings": original, **scaling}
    raise ModelError(
        f"{model.metadata.source}: {ROPE_FREQS} holds frequency factors of an unknown kind",
        "use the repository that holds safetensors files",
    )


def _rope(model: GgufModel, head_dim: int) -> Config:
    theta = model.number("rope.freq_base", 10000.0, low=1e-6)
    rope: Config = {"rope_type": "default", "rope_theta": theta}
    kind = model.text("rope.scaling.type", "none")
    if kind == "linear":
        rope |= {"rope_type": "linear", "factor": model.number("rope.scaling.factor")}
    elif kind == "yarn":
        rope |= {"rope_type": "yarn", "factor": model.number("rope.scaling.factor")}
        rope["original_max_position_embeddings"] = model.integer("rope.scaling.original_context_length")
        for key, name in (
            ("yarn_attn_factor", "attention_factor"),
            ("yarn_beta_fast", "beta_fast"),
            ("yarn_beta_slow", "beta_slow"),
        ):
            if model.has(f"rope.scaling.{key}"):
                rope[name] = model.number(f"rope.scaling.{key}")
    elif kind not in ("none", "longrope"):
        raise model.metadata.fail(f"{model.architecture}.rope.scaling.type", f"{kind!r} is not supported")
    if ROPE_FREQS in model.tensors:
        rope |= _llama3_scaling(model, head_dim, theta)
    if ROPE_LONG in model.tensors:
        rope |= {"rope_type": "longrope", "long_factor": list(model.floats(ROPE_LONG))}
        rope["short_factor"] = list(model.floats(ROPE_SHORT))
    rotated = model.integer("rope.dimension_count", head_dim)
    if rotated != head_dim:
        rope["partial_rotary_factor"] = rotated / head_dim
    return rope


def _has_bias(model: GgufModel, part: str) -> bool:
    return f"blk.0.{part}.bias" in model.tensors


def _biases(model: GgufModel, config: Config) -> Config:
    return {"attention_bias": _has_bias(model, "attn_q"), "mlp_bias": _has_bias(model, "ffn_up")}


def _llama(model: GgufModel, config: Config) -> Config:
    window = _sliding(model, config)
    return {"model_type": "mistral", **window} if window else _biases(model, config)


def _sliding(model: GgufModel, config: Config) -> Config:
    window = model.integer("attention.sliding_window", 0)
    return {"sliding_window": window} if window else {}


def _phi3(model: GgufModel, config: Config) -> Config:
    extra = _sliding(model, config)
    if config["rope_parameters"]["rope_type"] == "longrope":
        extra["original_max_position_embeddings"] = model.integer("rope.scaling.original_context_length")
    return extra


def _gemma_scale(model: GgufModel, config: Config, largest: int) -> Config:
    """What queries are divided by, squared: head_dim, but the width of a head's share of the stream in the largest."""
    share = config["hidden_size"] // config["num_attention_heads"]
    scalar = share if config["num_hidden_layers"] == largest else config["head_dim"]
    return {"query_pre_attn_scalar": scalar, "hidden_activation": "gelu_pytorch_tanh"}


def _gemma2(model: GgufModel, config: Config) -> Config:
    kinds = ["full_attention" if index % 2 else "sliding_attention" for index in range(config["num_hidden_layers"])]
    return {
        **_gemma_scale(model, config, 46),
        **_sliding(model, config),
        "attn_logit_softcapping": model.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": model.number("final_logit_softcapping", 30.0),
        "layer_types": kinds,
    }


def _gemma3(model: GgufModel, config: Config) -> Config:
    kinds = ["sliding_attention" if (i + 1) % 6 else "full_attention" for i in range(config["num_hidden_layers"])]
    local = {"rope_type": "default", "rope_theta": model.number("rope.freq_base_swa", 10000.0)}
    extra = {**_gemma_scale(model, config, 62), **_sliding(model, config), "layer_types": kinds}
    if model.has("final_logit_softcapping"):
        extra["final_logit_softcapping"] = model.number("final_logit_softcapping")
    extra["rope_parameters"] = {"full_attention": config["rope_parameters"], "sliding_attention": local}
    return extra


_OLMO2_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture("llama", paired=True, extra=_llama),
    "qwen2": Architecture("qwen2"),
    "qwen3": Architecture("qwen3", extra=_biases),
    "phi3": Architecture("phi3", {"ffn_up": "mlp.gate_up_proj"}, extra=_phi3),
    "smollm3": Architecture("smollm3", paired=True, extra=_biases),
    "seed_oss": Architecture("seed_oss", {"post_attention_norm": "post_attention_layernorm"}, extra=_biases),
    "olmo2": Architecture("olmo2", _OLMO2_NORMS, extra=_biases),
    "gemma2": Architecture("gemma2", _GEMMA_NORMS, norm_shift=1.0, extra=_gemma2),
    "gemma3": Architecture("gemma3_text", _GEMMA_NORMS, norm_shift=1.0, extra=_gemma3),
}


def find_architecture(metadata: Fields) -> Architecture:
    """The entry of the file's architecture. Raises ModelError for one that is not here."""
    name = metadata.text("general.architecture")
    if name not in ARCHITECTURES:
        raise metadata.fail(
            "general.architecture", f"{name!r} is not supported", f"supported: {', '.join(ARCHITECTURES)}"
        )
    return ARCHITECTURES[name]


def config_json(model: GgufModel) -> Config:
    """The config.json of a file, without what is quantized. Raises ModelError naming the key at fault."""
    entry = find_architecture(model.metadata)
    embedding = model.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise model.metadata.fail("general.architecture", "is given, but there is no matrix token_embd.weight")
    heads, hidden = model.integer("attention.head_count", low=1), model.integer("embedding_length", low=1)
    head_dim = model.integer("attention.key_length", max(1, hidden // heads), low=1)
    if model.integer("attention.value_length", head_dim) != head_dim:
        raise model.metadata.fail(f"{model.architecture}.attention.value_length", "differs from key_length")
    config: Config = {
        "model_type": entry.model_type,
        "hidden_size": hidden,
        "num_hidden_layers": model.integer("block_count", low=1, high=MAX_LAYERS),
        "num_attention_heads": heads,
        "num_key_value_heads": model.integer("attention.head_count_kv", heads, low=1),
        "head_dim": head_dim,
        "intermediate_size": model.integer("feed_forward_length", low=1),
        "vocab_size": embedding.shape[0],
        "max_position_embeddings": model.integer("context_length", low=1),
        "rms_norm_eps": model.number("attention.layer_norm_rms_epsilon"),
        "rope_parameters": _rope(model, head_dim),
        "tie_word_embeddings": "output.weight" not in model.tensors,
        "hidden_act": "silu",
    }
    if "partial_rotary_factor" in config["rope_parameters"]:
        config["partial_rotary_factor"] = config["rope_parameters"]["partial_rotary_factor"]
    if model.integer("expert_count", 0):
        config["num_experts"] = model.integer("expert_count")
    extra = entry.extra(model, config)
    if model.integer("attention.sliding_window", 0) and "sliding_window" not in extra:
        raise model.metadata.fail(f"{model.architecture}.attention.sliding_window", "is not supported here")
    return {**config, **extra}


def renamed_tensors(model: GgufModel) -> Iterator[tuple[str, TensorEntry]]:
    """Hugging Face name and entry of every tensor that is one of the model's. Raises ModelError for any other."""
    entry = find_architecture(model.metadata)
    for name, stored in model.tensors.items():
        if name in CONSUMED:
            continue
        renamed = entry.renamed(name)
        if renamed is None:
            raise ModelError(
                f"{stored.file}: {name} is not a tensor that {model.architecture} has here",
                "the model may be of a kind that is not supported, or the file is damaged",
            )
        yield renamed, stored
