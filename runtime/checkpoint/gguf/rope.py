"""The rotary embedding of a model as GGUF keys and tensors, read and written.

Follows llama.cpp's conversion/: scaling has keys, except for Llama 3.1 and longrope, whose frequency factors are F32
tensors. Imports no torch.
"""

import itertools
import math
from functools import partial
from typing import Any

from mycli.runtime.checkpoint.gguf.header import GgufModel
from mycli.runtime.errors import ModelError
from mycli.runtime.models.config import ModelConfig
from mycli.runtime.utils.json_fields import Fields

ROPE_FREQS, _ROPE_LONG, _ROPE_SHORT = "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"
_STILL = 1e30  # the divisor of a frequency that does not rotate, in Gemma 4
ROPE_TENSORS = (ROPE_FREQS, _ROPE_LONG, _ROPE_SHORT)  # they become part of the config


def llama3_factors(head_dim: int, theta: float, factor: float, low: float, high: float, original: int) -> list[float]:
    """The divisor of each rotary frequency of Llama 3.1 and later: 1 for short waves, `factor` for long ones."""
    factors = []
    for index in range(0, head_dim, 2):
        wavelength = 2 * math.pi * theta ** (index / head_dim)
        smooth = (original / wavelength - low) / max(high - low, 1e-9)
        factors.append(1 / ((1 - min(max(smooth, 0.0), 1.0)) / factor + min(max(smooth, 0.0), 1.0)))
    return factors


def rope_parameters(model: GgufModel, head_dim: int) -> dict[str, Any]:
    """Return `rope_parameters` of config.json. Raises ModelError for a scaling that is not supported."""
    theta = model.number("rope.freq_base", 10000.0, low=1e-6)
    # Written out even where whole heads rotate: without the key some families rotate half of each (Solar Open as
    # glm4moe).
    partial_rotary = model.integer("rope.dimension_count", head_dim) / head_dim
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": partial_rotary}
    # Files of 2023 have a factor without a type, under the older name; 0 stands for none.
    kind, factor = model.text("rope.scaling.type", "linear"), model.number("rope.scale_linear", 0.0)
    factor = model.number("rope.scaling.factor", factor) or 1.0
    if kind == "linear":
        rope |= {"rope_type": "linear", "factor": factor} if factor != 1.0 else {}
    elif kind == "yarn":
        context = model.integer("rope.scaling.original_context_length", model.integer("context_length", low=1))
        rope |= {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": context}
        for key in ("beta_fast", "beta_slow"):
            if model.has(f"rope.scaling.yarn_{key}"):
                rope[key] = model.number(f"rope.scaling.yarn_{key}")
        # The converter writes both attention_factor and attn_factor (Rnj-1) as this key, which llama.cpp does not read.
        # The latter is a further factor, 1 in all published configs, that transformers ignores.
        attention_factor = model.number("rope.scaling.yarn_attn_factor", 1.0)
        if attention_factor != 1.0:
            rope["attention_factor"] = attention_factor
    elif kind not in ("none", "longrope"):
        raise model.metadata.fail(model.key("rope.scaling.type"), f"{kind!r} is not supported")
    if ROPE_FREQS in model.tensors:
        rope |= _read_llama3(model, head_dim, theta)
    if _ROPE_LONG in model.tensors:
        rope |= {"rope_type": "longrope", "long_factor": list(model.floats(_ROPE_LONG))}
        rope["short_factor"] = list(model.floats(_ROPE_SHORT))
        # Of a file without these keys llama.cpp takes the whole context and does not multiply.
        context = model.integer("context_length", low=1)
        rope["original_max_position_embeddings"] = model.integer("rope.scaling.original_context_length", context)
        rope["attention_factor"] = model.number("rope.scaling.attn_factor", 1.0)
    return rope


def _read_llama3(model: GgufModel, head_dim: int, theta: float) -> dict[str, Any]:
    # A file holds the factors, not the parameters that they were computed from. All published models have factors 1
    # and 4, or Llama 4 Scout 1 and 1, for the low and high frequencies and a power of two as original context, so those
    # are tried.
    stored = model.floats(ROPE_FREQS)
    rotating = sum(value == 1.0 for value in stored)
    if rotating and all(value == 1.0 for value in stored[:rotating]) and all(v >= _STILL for v in stored[rotating:]):
        return {"rope_type": "proportional", "partial_rotary_factor": rotating / len(stored)}
    factor = max(stored, default=1.0)
    tried = itertools.product((4.0, 1.0), (1 << power for power in range(3, 24)))
    for high, original in tried if factor > 0 else ():
        expected = llama3_factors(head_dim, theta, factor, 1.0, high, original)
        if len(expected) == len(stored) and all(map(partial(math.isclose, rel_tol=1e-4), expected, stored)):
            scaling = {"factor": factor, "low_freq_factor": 1.0, "high_freq_factor": high}
            return {"rope_type": "llama3", "original_max_position_embeddings": original, **scaling}
    raise ModelError(
        f"{model.metadata.source}: {ROPE_FREQS} holds frequency factors that are not Llama 3's",
        "use the repository that holds safetensors files",
    )


def rope_keys(config: ModelConfig) -> dict[str, Any]:
    """Return the `rope.*` keys of a model. Raises ModelError for a scaling that llama.cpp does not compute."""
    rope = config.rope_scaling
    keys: dict[str, Any] = {
        "rope.dimension_count": config.rotary_dim or config.head_dim,
        "rope.freq_base": float(config.rope_theta),
    }
    if rope.kind in ("default", "llama3", "proportional"):  # the latter two are a tensor of factors
        return keys
    if rope.kind == "longrope":  # its frequencies are two tensors of factors
        original = {"rope.scaling.original_context_length": rope.original_context}
        return {**keys, **original, "rope.scaling.attn_factor": float(rope.attention_factor)}
    if rope.kind not in ("linear", "yarn"):
        raise ModelError(f"config.json: rope_type {rope.kind!r} cannot be written as GGUF", "export to safetensors")
    keys |= {"rope.scaling.type": rope.kind, "rope.scaling.factor": float(rope.factor)}
    if rope.kind == "yarn":
        keys["rope.scaling.original_context_length"] = rope.original_context
        keys["rope.scaling.yarn_beta_fast"] = float(rope.beta_fast)
        keys["rope.scaling.yarn_beta_slow"] = float(rope.beta_slow)
    return keys


def sliding_rope_parameters(model: GgufModel, full: dict[str, Any]) -> dict[str, Any]:
    """Return `rope_parameters` by layer type: layers with a window have a theta of their own and no scaling."""
    sliding = {
        "rope_type": "default",
        "rope_theta": model.number("rope.freq_base_swa", full["rope_theta"], low=1e-6),
        "partial_rotary_factor": full["partial_rotary_factor"],
    }
    return {"full_attention": full, "sliding_attention": sliding}


def sliding_rope_keys(config: ModelConfig) -> dict[str, Any]:
    """Return the keys that `sliding_rope_parameters` reads, and those of the layers without a window."""
    ropes = {layer.attention.window is not None: layer.attention.rope for layer in config.layer_specs}
    full, sliding = (ropes.get(slides) or config.distinct_ropes[0] for slides in (False, True))
    return {
        "rope.dimension_count": full.dim,
        "rope.freq_base": float(full.theta),
        "rope.freq_base_swa": float(sliding.theta),
    }


def rope_factors(config: ModelConfig) -> dict[str, list[float]]:
    """Return the values of the tensors of frequency factors by name; most models have none."""
    rope = config.rope_scaling
    if rope.kind == "longrope":
        return {_ROPE_LONG: list(rope.long_factors), _ROPE_SHORT: list(rope.short_factors)}
    if rope.kind == "proportional":
        pairs = next(spec.dim for spec in config.distinct_ropes if spec.scaling == rope) // 2
        rotating = int(rope.partial_factor * pairs)
        return {ROPE_FREQS: [1.0] * rotating + [_STILL] * (pairs - rotating)}
    if rope.kind != "llama3":
        return {}
    factors = llama3_factors(
        config.head_dim,
        config.rope_theta,
        rope.factor,
        rope.low_freq_factor,
        rope.high_freq_factor,
        rope.original_context,
    )
    return {ROPE_FREQS: factors}


def position_sections(config: ModelConfig, images: Fields | None = None) -> list[int]:
    """Return `rope.dimension_sections`: the pairs rotated by time, height and width. A text has one position for all.

    images: what config.json says about images; without `mrope_section` the pairs are shared out equally.
    """
    pairs = (config.rotary_dim or config.head_dim) // 2
    if images is None or not images.has("mrope_section"):
        # Qwen 3.5's 11, 11, 10 of 32 pairs. llama.cpp fails on sections wider than the rotated part of a head.
        return [(pairs + 2) // 3, (pairs + 1) // 3, pairs // 3, 0]
    sections = images.array("mrope_section", int)
    if len(sections) != 3 or min(sections) < 0 or sum(sections) != pairs:
        raise images.fail("mrope_section", f"= {sections}, expected three numbers that add up to {pairs}")
    return [*sections, 0]
