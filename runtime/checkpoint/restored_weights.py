"""Restores the weights of a declaration where files have others, and lists what files join. Imports no torch.

mlx-lm exchanges the last axes of convolutions [channels, 1, taps], adds to the gains of Qwen 3 Next and 3.5 what the
family adds, and has kv_b of latent attention as two stacks of one matrix per head, keys (transposed) and values, each
quantized on its own. transformers in memory has the convolutions of queries, keys and values as one. InternLM 2,
GPT-NeoX and large Falcons store the rows of queries, keys and values of each key head one after the other, GTE the rows
of up before those of gate. GPT-2 stores the transposes of weights.
ERNIE 4.5 VL stores those of routers, and experts for images behind those for text.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod

from mycli.runtime.checkpoint.formats import ExpectedTensor, Headers, mlx
from mycli.runtime.checkpoint.safetensors_header import TensorEntry, damaged
from mycli.runtime.models.config import ModelConfig
from mycli.runtime.models.experts_spec import ExpertsSpec
from mycli.runtime.models.latent_spec import LatentAttentionSpec
from mycli.runtime.models.part_spec import AttentionSpec, LinearSpec, MlpSpec, Shape
from mycli.runtime.models.recurrent_spec import ConvolutionSpec, DeltaNetSpec, KimiDeltaSpec
from mycli.runtime.quantization.scheme import Packing
from mycli.runtime.utils.dtypes import BY_NAME, BY_SAFETENSORS_NAME, SAFETENSORS_FLOATS
from mycli.runtime.utils.json_fields import Fields

_KEYS, _VALUES = "embed_q", "unembed_out"
# Its multipliers are in the weights, but its config still has them.
_SCALED = "falcon_h1"
_UP_FIRST = ("gte", "new")
_WITH_IMAGES = "ernie4_5_moe"  # if it is the text part of ERNIE 4.5 VL
_IMAGE_BLOCK = ".mlp.vision_moe."  # of transformers in memory
# The tensors that hold queries, keys and values of one key head after the other; a `llama` is then an InternLM 2.
_GROUPED = {"llama": "wqkv", "gpt_neox": "query_key_value", "falcon": "query_key_value"}


@dataclass(frozen=True)
class JoinedTensor:
    """A tensor of the family's files with the rows of `parts`, which take turns `groups` times.

    transposed: of shape [n, in_features, out_features], from n matrices, or [in_features, out_features].
    """

    name: str
    shape: Shape
    parts: tuple[str, ...]
    groups: int = 1
    transposed: bool = False


def joined_tensors(config: ModelConfig) -> Iterator[JoinedTensor]:
    """Yield the tensors in which the family's files have several of the declaration's, by the declaration's names."""
    shapes = dict(config.tensors())
    for layer in config.layer_specs:
        if isinstance(layer.mlp, ExpertsSpec):
            yield from _stacked_experts(layer.mlp, shapes)
    yield from joined_linears(config)


def joined_linears(config: ModelConfig) -> Iterator[JoinedTensor]:
    """Yield the tensors in which the family's files have several linears that are not experts, or their transposes."""
    for linear in config.linears():
        if (name := linear.transposed_as) is not None:
            shape = (linear.in_features, linear.out_features)
            yield JoinedTensor(f"{name}.weight", shape, (f"{linear.name}.weight",), transposed=True)
            if linear.bias:
                yield JoinedTensor(f"{name}.bias", (linear.out_features,), (f"{linear.name}.bias",))
    for layer in config.layer_specs if config.model_type in _UP_FIRST else ():
        gate, up = layer.dense_mlp.gate_up
        shape = (2 * up.out_features, up.in_features)
        yield JoinedTensor(_up_gate(layer.dense_mlp), shape, (f"{up.name}.weight", f"{gate.name}.weight"))
    for attention in config.attentions if config.model_type in _GROUPED.keys() - {"llama"} else ():
        if isinstance(attention, AttentionSpec) and len(attention.qkv) == 3:
            name, first = _grouped_name(attention, config.model_type), attention.qkv[0]
            rows = sum(linear.out_features for linear in attention.qkv)
            for ending in ("weight", "bias") if first.bias else ("weight",):
                columns = (first.in_features,) if ending == "weight" else ()
                parts = tuple(f"{linear.name}.{ending}" for linear in attention.qkv)
                yield JoinedTensor(f"{name}.{ending}", (rows, *columns), parts, groups=attention.kv_heads)


def _stacked_experts(spec: ExpertsSpec, shapes: Mapping[str, Shape]) -> Iterator[JoinedTensor]:
    count = len(spec.experts)
    for stack in spec.stacks:
        if stack.published and shapes.keys() >= {*stack.parts}:
            rows, *columns = shapes[stack.parts[0]]
            matrix = (len(stack.parts) // count * rows, *columns)
            shape = (count, *(matrix[::-1] if stack.transposed else matrix))
            yield JoinedTensor(stack.name, shape, stack.parts, transposed=stack.transposed)


def restore_entries(tensors: Headers, config: ModelConfig, settings: Fields) -> Headers:
    """Return the model's tensors by their own names and shapes; `settings`: `quantization` of config.json.

    Raises ModelError for halves of kv_b that do not have its shape.
    """
    result = dict(tensors)
    if any(_is_mlx_convolution(entry) for entry in tensors.values()) and config.model_type != _SCALED:
        _restore_convolutions(result, config)
    for spec in latent_specs(config) if any(f".{_KEYS}." in name for name in tensors) else ():
        if f"{_block(spec)}.{_KEYS}.weight" in result:
            _join_halves(result, spec, config, settings)
    for layer in config.layer_specs:
        if isinstance(layer.mixer, DeltaNetSpec | KimiDeltaSpec) and layer.mixer.convolution.parts:
            _split_convolution(result, layer.mixer.convolution)
    for linear in config.linears():
        if linear.transposed_as is not None:
            _restore_transposed(result, linear.name, linear.transposed_as)
    if config.model_type == _WITH_IMAGES:
        result = _without_image_experts(result, config)
    if config.model_type in _UP_FIRST:
        for layer in config.layer_specs:
            _split_up_gate(result, layer.dense_mlp)
    if config.model_type in _GROUPED:
        for attention in config.attentions:
            if isinstance(attention, AttentionSpec) and len(attention.qkv) == 3:
                _split_groups(result, attention, _grouped_name(attention, config.model_type))
    return result


def _restore_transposed(tensors: dict[str, TensorEntry], linear: str, stored: str) -> None:
    weight, bias = (tensors.pop(f"{stored}.{ending}", None) for ending in ("weight", "bias"))
    if weight is not None:
        name = f"{linear}.weight"
        tensors[name] = replace(weight, name=name, shape=weight.shape[::-1], transposed=True)
    if bias is not None:
        tensors[f"{linear}.bias"] = replace(bias, name=f"{linear}.bias")


def _without_image_experts(tensors: dict[str, TensorEntry], config: ModelConfig) -> dict[str, TensorEntry]:
    text_experts: dict[str, int] = {}  # by the block of the layer
    for layer in config.layer_specs:
        spec = layer.mlp
        if not isinstance(spec, ExpertsSpec) or tensors.pop(f"{spec.router.name}.weight_1", None) is None:
            continue
        text_experts[spec.router.name.rpartition(".")[0]] = len(spec.experts)
        _restore_transposed(tensors, spec.router.name, spec.router.name)
        name, shape = spec.correction_bias or ("", ())
        bias = tensors.get(name)
        if bias is not None and bias.shape == (2, len(spec.experts)):
            tensors[name] = replace(bias, shape=shape, nbytes=bias.nbytes // 2)  # the first row is that of text
    return {name: entry for name, entry in tensors.items() if not _is_for_images(name, text_experts)}


def _is_for_images(name: str, text_experts: Mapping[str, int]) -> bool:
    block, _, rest = name.partition(".experts.")
    number = rest.partition(".")[0]
    is_expert = block in text_experts and number.isdecimal() and len(number) < 6
    return _IMAGE_BLOCK in name or (is_expert and int(number) >= text_experts[block])


def _is_mlx_convolution(entry: TensorEntry) -> bool:
    return len(entry.shape) == 3 and entry.shape[2] == 1 < entry.shape[1]


def _restore_convolutions(tensors: dict[str, TensorEntry], config: ModelConfig) -> None:
    shapes = dict(config.tensors())
    convolutions: dict[str, Shape] = {
        name: (entry.shape[0], 1, entry.shape[1])
        for name, entry in tensors.items()
        if _is_mlx_convolution(entry) and shapes.get(name) == (entry.shape[0], 1, entry.shape[1])
    }
    for name, shape in convolutions.items():
        tensors[name] = replace(tensors[name], shape=shape)  # the bytes are the same
    norms = (*config.norms(), *(norm for layer in config.layer_specs for norm in layer.norms()))
    for norm in norms if convolutions else ():
        name = f"{norm.name}.weight"
        if norm.offset and name in tensors:
            tensors[name] = replace(tensors[name], added=norm.offset)


def _split_convolution(tensors: dict[str, TensorEntry], spec: ConvolutionSpec) -> None:
    joined = tensors.get(f"{spec.name}.weight")
    if joined is None or joined.shape != (spec.channels, 1, spec.taps):
        return
    del tensors[joined.name]
    offset = joined.offset
    for name, shape in spec.weights():
        nbytes = joined.nbytes // spec.channels * shape[0]
        tensors[name] = replace(joined, name=name, shape=shape, offset=offset, nbytes=nbytes)
        offset += nbytes


def _up_gate(spec: MlpSpec) -> str:
    return f"{spec.gate_up[0].name.rpartition('.')[0]}.up_gate_proj.weight"


def _grouped_name(spec: AttentionSpec, model_type: str) -> str:
    return f"{spec.qkv[0].name.rpartition('.')[0]}.{_GROUPED[model_type]}"


def _split_up_gate(tensors: dict[str, TensorEntry], spec: MlpSpec) -> None:
    gate, up = spec.gate_up
    joined = tensors.get(_up_gate(spec))
    if joined is None or joined.shape != (2 * spec.size, up.in_features):
        return
    del tensors[joined.name]
    nbytes = joined.nbytes // 2
    for index, linear in enumerate((up, gate)):
        name, offset = f"{linear.name}.weight", joined.offset + index * nbytes
        shape = (spec.size, up.in_features)
        tensors[name] = replace(joined, name=name, shape=shape, offset=offset, nbytes=nbytes)


def _split_groups(tensors: dict[str, TensorEntry], spec: AttentionSpec, stored: str) -> None:
    # Rows are output features in all layouts but GPTQ's and AWQ's, which stay refused as tensors of another model.
    heads = (spec.heads // spec.kv_heads, 1, 1)  # of a group: queries, keys, values
    for part in ("weight", "bias", "scales", "biases"):
        joined = tensors.get(f"{stored}.{part}")
        if joined is None or joined.shape[0] != spec.kv_heads * sum(heads) * spec.head_dim:
            continue
        del tensors[joined.name]
        head_bytes, start = joined.nbytes // (spec.kv_heads * sum(heads)), joined.offset
        for linear, count in zip(spec.qkv, heads, strict=True):
            name, shape = f"{linear.name}.{part}", (count * spec.head_dim, *joined.shape[1:])
            places = [start + group * sum(heads) * head_bytes for group in range(spec.kv_heads)]
            parts = tuple(
                replace(joined, name=f"{name}[{group}]", shape=shape, offset=place, nbytes=count * head_bytes)
                for group, place in enumerate(places)
            )
            rows, nbytes = shape[0] * spec.kv_heads, count * head_bytes * spec.kv_heads
            tensors[name] = replace(parts[0], name=name, shape=(rows, *shape[1:]), nbytes=nbytes, parts=parts)
            start += count * head_bytes


def latent_specs(config: ModelConfig) -> Iterator[LatentAttentionSpec]:
    """Return the declarations of latent attention of all layers that have it."""
    return (spec for spec in config.attentions if isinstance(spec, LatentAttentionSpec))


def _block(spec: LatentAttentionSpec) -> str:
    return spec.kv_b.name.rpartition(".")[0]


def halves(spec: LatentAttentionSpec) -> tuple[LinearSpec, LinearSpec]:
    """Return the halves of kv_b as linears: the matrices of all heads, one below the other."""
    keys = LinearSpec(f"{_block(spec)}.{_KEYS}", spec.heads * spec.rank, spec.nope_dim)
    return keys, LinearSpec(f"{_block(spec)}.{_VALUES}", spec.heads * spec.value_dim, spec.rank)


def half_packing(half: LinearSpec, config: ModelConfig, settings: Fields, headers: Headers) -> Packing | None:
    """Return the packing of a half; None if it is dense."""
    if f"{half.name}.scales" not in headers:
        return None
    chosen = settings.object(half.name) if isinstance(settings.values.get(half.name), dict) else settings
    return mlx.read_packing(chosen, half.name, config.dtype, headers)


def _join_halves(
    tensors: dict[str, TensorEntry], spec: LatentAttentionSpec, config: ModelConfig, settings: Fields
) -> None:
    parts: dict[str, TensorEntry] = {}
    for half in halves(spec):
        names = [name for part in ("weight", "scales", "biases") if (name := f"{half.name}.{part}") in tensors]
        stored = {name: tensors.pop(name) for name in names}
        packing = half_packing(half, config, settings, stored)
        dense: ExpectedTensor = f"{half.name}.weight", (half.out_features, half.in_features), SAFETENSORS_FLOATS
        for name, (rows, columns), dtypes in [dense] if packing is None else mlx.tensors(half, packing, stored):
            entry, stack = stored.get(name), (spec.heads, rows // spec.heads, columns)
            if entry is None or entry.shape != stack or entry.dtype not in dtypes:
                problem = "missing" if entry is None else f"{entry.dtype} {list(entry.shape)}"
                raise damaged(f"{name}: {problem}, expected {' or '.join(dtypes)} {list(stack)}")
            parts[name] = replace(entry, shape=(rows, columns))
    weight = next(iter(parts.values()))
    scales = parts.get(f"{_block(spec)}.{_KEYS}.scales", weight)
    dtype = scales.dtype if scales.dtype in SAFETENSORS_FLOATS else BY_NAME[config.dtype].safetensors_name
    name, shape = f"{spec.kv_b.name}.weight", (spec.kv_b.out_features, spec.kv_b.in_features)
    nbytes = prod(shape) * BY_SAFETENSORS_NAME[dtype].nbytes
    tensors[name] = TensorEntry(name, dtype, shape, weight.file, weight.offset, nbytes, parts=tuple(parts.values()))
