"""Layouts of quantized checkpoints, one module per `quant_method` of config.json; the file name is the registry.

A layout has the members of `Format`. It repacks stored tensors into the parts of a `PackedWeight` exactly: nothing is
quantized again. Imports no torch before a weight is read. Modules with a leading `_` hold what layouts share.
"""

import importlib
import pkgutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, cast

from mycli.runtime.checkpoint.safetensors_header import TensorEntry
from mycli.runtime.errors import ModelError
from mycli.runtime.models.config import ModelConfig
from mycli.runtime.models.part_spec import LinearSpec, Shape
from mycli.runtime.quantization.scheme import Packing
from mycli.runtime.utils.dtypes import SAFETENSORS_FLOATS, Dtype
from mycli.runtime.utils.json_fields import Fields

if TYPE_CHECKING:  # `show` and `list` read configs without torch
    import torch

    from mycli.runtime.checkpoint.manifest import Manifest
    from mycli.runtime.checkpoint.reader import Checkpoint
    from mycli.runtime.checkpoint.writer import CheckpointWriter
    from mycli.runtime.quantization.nested_scales import NestedScales
    from mycli.runtime.quantization.packed_weight import PackedWeight

Headers = Mapping[str, TensorEntry]  # the tensors of a folder by name
ExpectedTensor = tuple[str, Shape, Collection[str]]  # name, shape and allowed safetensors dtypes
EMBEDDING = "model.embed_tokens"

Pack = Callable[["torch.Tensor", int], "torch.Tensor"]  # `packed_weight.pack`, or a kernel with the same result


@dataclass(frozen=True)
class Scales:
    """The parts of one linear's `PackedWeight` other than its codes."""

    scales: "torch.Tensor"
    offsets: "torch.Tensor | None" = None
    inputs: "torch.Tensor | None" = None
    factors: "torch.Tensor | None" = None


class Format(Protocol):
    """The members of a layout's module."""

    READABLE: str  # the supported variants, for messages
    IGNORED: tuple[str, ...]  # name suffixes of tensors that weights do not need
    UNEXPECTED: tuple[tuple[str, str, str], ...]  # suffix of a tensor that config.json lacks, problem, hint

    def read_quantization(self, section: Fields, config: ModelConfig, headers: Headers | None) -> dict[str, Packing]:
        """Return the packing of each quantized weight of `quantizable(config)`.

        `headers` is None if only config.json is known. Raises ModelError naming the field that is not supported.
        """
        ...

    def tensors(self, linear: LinearSpec, packing: Packing, headers: Headers) -> Iterator[ExpectedTensor]:
        """Yield the tensors that store the linear's weight; of several variants the one in `headers`."""
        ...

    def check(self, linear: LinearSpec, packing: Packing, manifest: "Manifest") -> None:
        """Check the small contents that describe a weight. Raises ModelError naming the tensor."""
        ...

    def read_linear(
        self, checkpoint: "Checkpoint", linear: LinearSpec, packing: Packing, out: "torch.Tensor"
    ) -> Scales:
        """Read the codes into `out`, int32 [out_features, words], on the CPU; return the other parts."""
        ...


class WritableFormat(Format, Protocol):
    """The further members of a layout that quantizing writes."""

    def planned_packing(self, linear: LinearSpec, bits: int, group: int | None, dtype: Dtype) -> Packing:
        """The packing of a linear of a model in `dtype`; `group`, if any, divides its inputs."""
        ...

    def planned_tensors(
        self, linear: LinearSpec, packing: Packing, scale_dtype: "torch.dtype"
    ) -> list[tuple[str, "torch.dtype", Shape]]:
        """Return name, dtype and shape of each tensor that `write_weight` writes, for `CheckpointWriter`'s plan."""
        ...

    def write_weight(
        self,
        writer: "CheckpointWriter",
        linear: str,
        packing: Packing,
        codes: "torch.Tensor",
        scales: "torch.Tensor | NestedScales",
        dtype: Dtype,
        pack: Pack,
    ) -> None:
        """Write codes uint8 [N, K] and scales [N, groups] or nested, of a model in `dtype`.

        `pack` packs codes into words, in layouts that store words.
        """
        ...

    def write_quantization(
        self, packings: Mapping[str, Packing], ignore: Iterable[str], dtype: Dtype
    ) -> dict[str, Any]:
        """Return the `quantization_config` for `packings` of this layout; `ignore` names the dense linears."""
        ...


def names() -> list[str]:
    return sorted(module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_"))


def load(name: str) -> Format:
    return cast(Format, importlib.import_module(f"{__name__}.{name}"))


def load_writable(name: str) -> WritableFormat:
    return cast(WritableFormat, load(name))


def writable(packings: Mapping[str, Packing]) -> WritableFormat:
    (name,) = _layouts(packings)
    return load_writable(name)


def quantizable(config: ModelConfig) -> list[LinearSpec]:
    """Return every weight that a layout may store quantized: the linears, routers and gates, and the embedding."""
    return [*config.linears(), *_gates(config), LinearSpec(EMBEDDING, config.vocab_size, config.hidden_size)]


def _gates(config: ModelConfig) -> list[LinearSpec]:
    # Never quantized here, but by bitsandbytes and MLX, which quantize all linear layers of some models.
    return [linear for layer in config.layer_specs for linear in layer.unquantized]


def _stored_packed(name: str, headers: Headers | None) -> bool:
    weight = None if headers is None else headers.get(f"{name}.weight")
    return headers is not None and (weight is None or weight.dtype not in SAFETENSORS_FLOATS)


def is_quantized(raw: Fields) -> bool:
    return raw.has("quantization_config") or raw.has("quantization")


def _section(raw: Fields) -> tuple[str, Fields]:
    section = raw.object("quantization_config")
    if section.has("quant_method"):
        from mycli.runtime.checkpoint.formats import _published  # not needed for unquantized models

        return _published.find_layout(section)
    if raw.has("quantization"):  # MLX has a key of its own and no quant_method
        return "mlx", raw.object("quantization")
    if section.values:
        raise section.fail("quant_method", "is missing")
    return "", section


def read_quantization(raw: Fields, config: ModelConfig, headers: Headers | None = None) -> dict[str, Packing]:
    """Return the packing of each quantized weight, from config.json and, if known, the headers of the tensors.

    Empty for an unquantized model. Raises ModelError naming the field that is not supported.
    """
    name, section = _section(raw)
    if not name:
        return {}
    if name not in names():
        from mycli.runtime.checkpoint.formats import _published

        readable = (*(load(layout).READABLE for layout in names()), *_published.READABLE)
        hint = f"readable: {'; '.join(readable)}"
        raise section.fail("quant_method", f"{section.text('quant_method')!r} is not supported", hint)
    packings = load(name).read_quantization(section, config, headers)
    # Whatever the section covers: routers and the head are linear layers for some programs and not for others. The FP8
    # folders that AutoRound writes for llm-compressor target all linear layers, and their head is dense.
    optional = [*_gates(config), *([] if headers is None else [config.head()])]
    dense = {linear.name for linear in optional if not _stored_packed(linear.name, headers)}
    packings = {name: packing for name, packing in packings.items() if name not in dense}
    if headers is not None and not packings:
        hint = "config.json and the weights belong to different models"
        raise ModelError(f"{section.source}: describes weights quantized by {name}, but the files have none", hint)
    return packings


def expected_tensors(
    config: ModelConfig, packings: Mapping[str, Packing], headers: Headers
) -> Iterator[ExpectedTensor]:
    """Yield every tensor that a folder must hold. Raises ModelError if a packing does not fit its linear's shape."""
    linears = {f"{spec.name}.weight": spec for spec in quantizable(config) if spec.name in packings}
    for name, shape in config.tensors():
        linear = linears.get(name)
        if linear is None:
            yield name, shape, SAFETENSORS_FLOATS
            continue
        packing = packings[linear.name]
        try:
            packing.groups(linear.in_features)
        except ModelError as error:
            raise error.with_message(f"config.json: {linear.name}: {error.message}") from None
        yield from load(packing.layout).tensors(linear, packing, headers)


def ignored_suffixes(packings: Mapping[str, Packing]) -> tuple[str, ...]:
    """Return the name suffixes of tensors that the layouts of `packings` may hold and weights do not need."""
    return tuple(sorted({ending for name in _layouts(packings) for ending in load(name).IGNORED}))


def unexpected_suffixes(packings: Mapping[str, Packing]) -> list[tuple[str, str, str]]:
    """Return suffix, problem and hint of tensors that reveal a wrong config.json, from the layouts in use first."""
    used = _layouts(packings)
    others = [name for name in names() if name not in used]
    return [row for name in (*used, *others) for row in load(name).UNEXPECTED]


def _layouts(packings: Mapping[str, Packing]) -> list[str]:
    return sorted({packing.layout for packing in packings.values()})


def read_weight(
    checkpoint: "Checkpoint", linears: Sequence[LinearSpec], packing: Packing, device: "torch.device"
) -> "PackedWeight":
    """Read the weights of linears that share an input and a packing, stacked by rows; permuted ones one at a time.

    Raises what reading raises, and ModelError for scales that are not finite.
    """
    import torch

    from mycli.runtime.quantization.packed_weight import PackedWeight
    from mycli.runtime.utils.memory import huge_empty

    assert len(linears) == 1 or not packing.permuted
    checkpoint = checkpoint.stored
    rows, columns = sum(linear.out_features for linear in linears), linears[0].in_features
    packed, layout = huge_empty((rows, packing.words(columns)), torch.int32), load(packing.layout)
    parts, start = [], 0
    for linear in linears:
        end = start + linear.out_features
        part = layout.read_linear(checkpoint, linear, packing, packed[start:end])
        for tensor in (part.scales, part.offsets):
            if tensor is not None:
                checkpoint.check(tensor, f"{linear.name}: scales")
        parts.append(part)
        start = end
    offsets = [part.offsets.to(device) for part in parts if part.offsets is not None]
    # Only the CPU's kernels multiply by super-block factors; a GPU reads the scales.
    factors = [part.factors for part in parts if part.factors is not None and device.type == "cpu"]
    inputs = parts[0].inputs
    return PackedWeight(
        packed.to(device),
        torch.cat([part.scales for part in parts]).to(device),
        packing,
        columns,
        torch.cat(offsets) if offsets else None,
        None if inputs is None else inputs.to(device),
        torch.cat(factors) if factors else None,
    )


def prefetch_linears(checkpoint: "Checkpoint", linears: Iterable[LinearSpec], packings: Mapping[str, Packing]) -> None:
    """Start reading the tensors of `linears` into the page cache."""
    for linear in linears:
        packing = packings.get(linear.name)
        if packing is None:
            checkpoint.prefetch(f"{linear.name}.weight")
            continue
        for name, *_ in load(packing.layout).tensors(linear, packing, checkpoint.manifest.tensors):
            checkpoint.prefetch(name)


def read_dense(
    checkpoint: "Checkpoint",
    linear: LinearSpec,
    packings: Mapping[str, Packing],
    device: "torch.device",
    dtype: "torch.dtype | None" = None,
) -> "torch.Tensor":
    """Read a weight [out_features, in_features] to `device`, with an adapter merged into it.

    Its dtype is `dtype`, by default the stored one or, if it is packed, that of its scales.
    """
    import torch

    from mycli.runtime.checkpoint.reader import merge_update
    from mycli.runtime.quantization.packed_weight import dequantize_rows

    packing, name = packings.get(linear.name), f"{linear.name}.weight"
    shape = (linear.out_features, linear.in_features)
    if packing is None:
        out = torch.empty(shape, dtype=dtype or checkpoint.dtype(name))
        checkpoint.read_into(name, out)
        return out.to(device)
    weight, update = read_weight(checkpoint, [linear], packing, device), checkpoint.update(name)
    decoded = weight.scales.dtype if update is not None or dtype is None else dtype
    out = torch.empty(shape, dtype=decoded, device=device)
    for rows, values in dequantize_rows(weight):
        out[rows] = values
    if update is not None:
        merge_update(update.to(device), out)
        checkpoint.check(out, f"{linear.name} with the adapter")
    return out.to(dtype or decoded)
