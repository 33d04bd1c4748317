"""A GGUF file as llama.cpp's converter would write it: metadata, tokenizer and tensors of one model in one file.

Without a variant every tensor keeps what it is: packed integers become Q4_0, Q4_1 or Q8_0 blocks of the same values,
dense ones stay what they are. Norms and biases are F32, which holds them exactly. Follows llama.cpp's conversion/ for
keys, names and the order of rows (`runtime.checkpoint.gguf.architectures`).
"""

import math
from collections import Counter
from typing import Any

import torch
from torch import Tensor

from mycli.quant.export import Exported, ExportRequest, Rounded, without_predictor, would_round
from mycli.quant.export import _ggml_blocks as blocks
from mycli.quant.export._gguf_tokenizer import tokenizer_metadata
from mycli.quant.export._weights import Weights, exact_values, squared_error
from mycli.quant.progress import ReportProgress
from mycli.runtime.checkpoint.gguf.architectures import (
    ARCHITECTURES,
    ROPE_FREQS,
    Architecture,
    llama3_factors,
)
from mycli.runtime.checkpoint.gguf.blocks import dequantize_blocks
from mycli.runtime.checkpoint.gguf.checkpoint import pairs_order
from mycli.runtime.checkpoint.gguf.files import SUFFIX
from mycli.runtime.checkpoint.gguf.types import TYPES_BY_NAME
from mycli.runtime.checkpoint.gguf.writer import GgufWriter
from mycli.runtime.device.placement import dtype_info, torch_dtype
from mycli.runtime.errors import ModelError, UsageError
from mycli.runtime.models.config import ModelConfig
from mycli.runtime.models.part_spec import Shape

VARIANTS = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_k")
_FILE_TYPES = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q4_K": 14, "BF16": 32}
_WRITTEN = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "olmo2": "olmo2", "phi3": "phi3"}
_ROUNDING = {"Q4_0": blocks.round_q4_0, "Q8_0": blocks.round_q8_0, "Q4_K": blocks.round_q4_k}
_VALUES = 1 << 22  # rounded at a time


def export(request: ExportRequest, progress: ReportProgress) -> Exported:
    """Write the file.

    Raises ModelError naming what llama.cpp has no place for, or what would have to be rounded, UsageError for a target
    that is no file.
    """
    if request.target.name in ("", ".."):
        raise UsageError(f"{request.target}: a folder, and GGUF is one file", "name the file to write")
    config, weights = request.folder.config, Weights(request.folder)
    name, architecture = _architecture(config)
    kinds = {tensor: _kind(request, weights, tensor, shape) for tensor, shape in config.tensors()}
    factors = _rope_factors(config)
    metadata = _metadata(request, name, _most(kinds, config))
    plan: list[tuple[str, str, Shape]] = [(ROPE_FREQS, "F32", (len(factors),))] if factors else []
    plan += [(_stored_name(architecture, tensor), kinds[tensor], shape) for tensor, shape in config.tensors()]
    rounded: list[Rounded] = []
    target = request.target
    if target.suffix != SUFFIX:  # by which such a file is known for a model
        target = target.with_name(target.name + SUFFIX)
    with GgufWriter(target, metadata, plan, overwrite=request.overwrite) as writer:
        if factors:
            writer.write(ROPE_FREQS, torch.tensor(factors).numpy().data)
        for done, (tensor, _) in enumerate(config.tensors(), 1):
            data, error = _encode(request, weights, tensor, kinds[tensor], architecture.norm_shift)
            if error:
                rounded.append(Rounded(tensor, kinds[tensor], error))
            if architecture.is_paired(tensor):
                data = data[pairs_order(len(data), config.heads if ".q_proj." in tensor else config.kv_heads)]
            writer.write(_stored_name(architecture, tensor), data.contiguous().numpy().reshape(-1).data)
            progress("exporting", done, len(kinds))
        writer.finish()
    return Exported(writer.target, writer.nbytes, Counter(kinds.values()), rounded, without_predictor(request.folder))


def _architecture(config: ModelConfig) -> tuple[str, Architecture]:
    name = _WRITTEN.get(config.model_type)
    if name is None:
        hint = f"written: {', '.join(_WRITTEN)}; llama.cpp's own converter may know the model"
        raise ModelError(f"models of type {config.model_type} are not written as GGUF", hint)
    windows = {window for window in config.windows if window is not None}
    if windows and (name != "phi3" or len(windows) > 1 or None in config.windows):
        raise ModelError("a sliding window, which llama.cpp does not read for this architecture", "")
    return name, ARCHITECTURES[name]


def _stored_name(architecture: Architecture, name: str) -> str:
    stored = architecture.stored_name(name)
    if stored is None:
        raise ModelError(f"{name}: llama.cpp has no place for it", "")
    return stored


def _most(kinds: dict[str, str], config: ModelConfig) -> str:
    """The type of most values."""
    sizes: Counter[str] = Counter()
    for name, shape in config.tensors():
        sizes[kinds[name]] += math.prod(shape)
    return sizes.most_common(1)[0][0]


def _metadata(request: ExportRequest, name: str, kind: str) -> dict[str, Any]:
    config, folder = request.folder.config, request.folder
    values: dict[str, Any] = {
        "general.architecture": name,
        "general.name": request.source.label,
        "general.file_type": _FILE_TYPES[kind],
        "general.quantization_version": 2,
        f"{name}.context_length": config.max_context,
        f"{name}.embedding_length": config.hidden_size,
        f"{name}.block_count": config.layers,
        f"{name}.feed_forward_length": config.intermediate_size,
        f"{name}.attention.head_count": config.heads,
        f"{name}.attention.head_count_kv": config.kv_heads,
        f"{name}.attention.key_length": config.head_dim,
        f"{name}.attention.value_length": config.head_dim,
        f"{name}.attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        f"{name}.vocab_size": config.vocab_size,
        f"{name}.rope.dimension_count": config.head_dim,
        f"{name}.rope.freq_base": float(config.rope_theta),
        **_rope_metadata(config, name),
    }
    if name == "phi3":
        values["phi3.attention.sliding_window"] = next(iter(config.windows), None) or 0
        values["phi3.rope.scaling.original_context_length"] = config.max_context
    raw, settings = folder.tokenizer_json(), folder.tokenizer_settings()
    values |= tokenizer_metadata(raw, settings, config.vocab_size)
    defaults, _ = folder.generation
    for key, value in (("temp", defaults.temperature), ("top_p", defaults.top_p), ("min_p", defaults.min_p)):
        if value is not None:
            values[f"general.sampling.{key}"] = float(value)
    if defaults.top_k is not None:
        values["general.sampling.top_k"] = defaults.top_k
    ends = [end for end in (*defaults.eos, *config.eos) if end != values.get("tokenizer.ggml.eos_token_id")]
    if ends:
        values["tokenizer.ggml.eot_token_id"] = ends[0]
    template = folder.chat_template()
    if template is not None:
        values["tokenizer.chat_template"] = template.source()
    return values


def _rope_metadata(config: ModelConfig, name: str) -> dict[str, Any]:
    rope = config.rope_scaling
    if rope.kind in ("default", "llama3"):
        return {}
    if rope.kind not in ("linear", "yarn"):
        raise ModelError(f"{rope.kind} rope, which llama.cpp does not compute", "")
    values: dict[str, Any] = {f"{name}.rope.scaling.type": rope.kind, f"{name}.rope.scaling.factor": float(rope.factor)}
    if rope.kind == "yarn":
        values[f"{name}.rope.scaling.original_context_length"] = rope.original_context
        values[f"{name}.rope.scaling.yarn_beta_fast"] = float(rope.beta_fast)
        values[f"{name}.rope.scaling.yarn_beta_slow"] = float(rope.beta_slow)
    return values


def _rope_factors(config: ModelConfig) -> list[float]:
    rope = config.rope_scaling
    if rope.kind != "llama3":
        return []
    return llama3_factors(
        config.head_dim,
        config.rope_theta,
        rope.factor,
        rope.low_freq_factor,
        rope.high_freq_factor,
        rope.original_context,
    )


def _kind(request: ExportRequest, weights: Weights, name: str, shape: Shape) -> str:
    """The ggml type of a tensor, by what is asked for and what it is."""
    if len(shape) == 1:
        return "F32"
    wanted, packing = request.variant.upper(), weights.packing(name)
    if wanted in ("F32", "F16", "BF16"):
        return wanted
    linear = name in weights.linears and name != "lm_head.weight"
    if packing is None and not (wanted and (linear or request.requantize)):
        return dtype_info(weights.checkpoint.dtype(name)).safetensors_name
    if packing is not None and not wanted:
        if packing.offsets:
            return "Q4_1" if packing.bits <= 4 else "Q8_0"
        return "Q4_0" if packing.bits <= 4 else "Q8_0"
    wanted = wanted if linear else "Q8_0"
    if shape[1] % TYPES_BY_NAME[wanted].block:
        wanted = "Q8_0" if shape[1] % blocks.GROUP == 0 else "F16"
    return wanted


def _encode(request: ExportRequest, weights: Weights, name: str, kind: str, norm_shift: float) -> tuple[Tensor, float]:
    """A tensor in its type, uint8 [rows, bytes], and the relative squared error where it is not exact."""
    plain = TYPES_BY_NAME[kind].dtype
    if plain is None and weights.packing(name) is not None and name in weights.linears:
        packed = weights.packed(name)
        found = blocks.from_packed(packed, kind)
        if found is not None:
            data, same = found
            if same:
                return data, 0.0
            if not request.requantize:
                raise would_round(name, f"its scales are not float16, which {kind} needs")
            return data, squared_error(exact_values(packed), dequantize_blocks(data, kind))
    values = weights.dense(name)
    if norm_shift and name.endswith("norm.weight"):
        values = values.float() + norm_shift
    if plain is not None:
        cast = values.to(torch_dtype(plain))
        data = cast.view(len(cast), -1).view(torch.uint8)
        if bool((cast.to(torch.float32) == values.to(torch.float32)).all()):
            return data, 0.0
        if not request.requantize:
            raise would_round(name, f"{dtype_info(values.dtype).short} values that {kind} does not hold exactly")
        return data, squared_error(values, cast)
    if not request.requantize:
        what = weights.packing(name)
        stored = what.name if what is not None else dtype_info(values.dtype).short
        raise would_round(name, f"{stored} weights, which {kind} does not hold exactly")
    return _round(values, kind)


def _round(values: Tensor, kind: str) -> tuple[Tensor, float]:
    """Values [N, K] rounded to blocks, a part of the rows at a time."""
    block = TYPES_BY_NAME[kind].block
    step = max(1, _VALUES // values.shape[1])
    parts, lost, total = [], 0.0, 0.0
    for start in range(0, len(values), step):
        part = values[start : start + step].float()
        data = _ROUNDING[kind](part.reshape(-1, block)).view(len(part), -1)
        lost += (part.double() - dequantize_blocks(data, kind).double()).square().sum().item()
        total += part.double().square().sum().item()
        parts.append(data)
    return torch.cat(parts), lost / total if total else 0.0
