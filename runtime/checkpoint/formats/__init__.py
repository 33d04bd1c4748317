"""Layouts of quantized checkpoints: one file each, found by the `quant_method` of config.json. The file is the
registry.

A layout is a module with the members of `Format`. It says which weights of a folder are packed and how, which tensors
hold them, and turns those into the parts of a `PackedWeight`, exactly: nothing is quantized again. Knows no layout by
name. Imports no torch before a weight is read. Modules whose names begin with `_` are what layouts share.
"""

import importlib
import pkgutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, cast

from mycli.runtime.checkpoint.formats import _published
from mycli.runtime.checkpoint.safetensors_header import TensorEntry
from mycli.runtime.errors import ModelError
from mycli.runtime.models.config import ModelConfig
from mycli.runtime.models.part_spec import LinearSpec, Shape
from mycli.runtime.quantization.scheme import Packing
from mycli.runtime.utils.dtypes import SAFETENSORS_FLOATS, Dtype
from mycli.runtime.utils.json_fields import Fields

if TYPE_CHECKING:  # a light command reads configurations only
    import torch

    from mycli.runtime.checkpoint.manifest import Manifest
    from mycli.runtime.checkpoint.reader import Checkpoint, CheckpointWriter
    from mycli.runtime.quantization.nested_scales import NestedScales
    from mycli.runtime.quantization.packed_weight import PackedWeight

Headers = Mapping[str, TensorEntry]  # of a folder's tensors, by name
Promise = tuple[str, Shape, Collection[str]]  # name, shape and allowed safetensors dtypes of a tensor
EMBEDDING = "model.embed_tokens"

Pack = Callable[["torch.Tensor", int], "torch.Tensor"]  # as `packed_weight.pack`, or a kernel that does the same


@dataclass(frozen=True)
class Scales:
    """What stands beside the codes of one linear: the parts of a `PackedWeight`."""

    scales: "torch.Tensor"
    offsets: "torch.Tensor | None" = None
    inputs: "torch.Tensor | None" = None
    factors: "torch.Tensor | None" = None


class Format(Protocol):
    """What a module of this package offers."""

    READABLE: str  # what of the layout is read, for a person
    IGNORED: tuple[str, ...]  # endings of tensors that a reader of weights has no use for
    TELLING: tuple[tuple[str, str, str], ...]  # ending of a tensor that config.json does not promise, problem, hint

    def read_quantization(self, section: Fields, config: ModelConfig, headers: Headers | None) -> dict[str, Packing]:
        """The packing of each quantized weight of `quantizable(config)`, by `quantization_config` and what is there.

        `headers` is None where only config.json is known. Raises ModelError.
        """
        ...

    def tensors(self, linear: LinearSpec, packing: Packing, headers: Headers) -> Iterator[Promise]:
        """What must stand in place of the linear's weight; of several possible forms the one that is there."""
        ...

    def check(self, linear: LinearSpec, packing: Packing, manifest: "Manifest") -> None:
        """Look into the few bytes that say more of a weight than its headers. Raises ModelError naming the tensor."""
        ...

    def read_linear(
        self, checkpoint: "Checkpoint", linear: LinearSpec, packing: Packing, out: "torch.Tensor"
    ) -> Scales:
        """Put the codes into `out`, int32 [out_features, words], on the CPU; what stands beside them is returned."""
        ...


class WritableFormat(Format, Protocol):
    """What a module of this package offers besides where quantizing writes it."""

    def planned_packing(self, linear: LinearSpec, bits: int, group: int | None, dtype: Dtype) -> Packing:
        """The packing of a linear of a model in `dtype`; `group`, if any, divides its inputs."""
        ...

    def planned_tensors(
        self, linear: LinearSpec, packing: Packing, scale_dtype: "torch.dtype"
    ) -> list[tuple[str, "torch.dtype", Shape]]:
        """Name, dtype and shape of what `write_weight` writes for a linear: for `CheckpointWriter`'s plan."""
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
        """Write codes uint8 [N, K] and scales [N, groups], or those of all rows nested, of a model in `dtype`.

        `pack` makes words of codes, in layouts of words.
        """
        ...

    def write_quantization(
        self, packings: Mapping[str, Packing], ignore: Iterable[str], dtype: Dtype
    ) -> dict[str, Any]:
        """The `quantization_config` for `packings`, all of this layout; `ignore` names the linears that stay dense."""
        ...


def names() -> list[str]:
    """The layouts there are."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_"))


def load(name: str) -> Format:
    """The layout of that name."""
    return cast(Format, importlib.import_module(f"{__name__}.{name}"))


def load_writable(name: str) -> WritableFormat:
    """Import a layout that can be written."""
    return cast(WritableFormat, load(name))


def writable(packings: Mapping[str, Packing]) -> WritableFormat:
    """The one layout of `packings` that are to be written."""
    (name,) = _layouts(packings)
    return load_writable(name)


def quantizable(config: ModelConfig) -> list[LinearSpec]:
    """Every weight that some layout stores quantized: the linears, and the embedding, seen as one."""
    return [*config.linears(), LinearSpec(EMBEDDING, config.vocab_size, config.hidden_size)]


def described(raw: Fields) -> bool:
    """Whether config.json says that the model is quantized."""
    return raw.has("quantization_config") or raw.has("quantization")


def _section(raw: Fields) -> tuple[str, Fields]:
    """Name and description of the layout; MLX names itself by another key only."""
    section = raw.object("quantization_config")
    if section.has("quant_method"):
        return _published.find_layout(section)
    if raw.has("quantization"):
        return "mlx", raw.object("quantization")
    if section.values:
        raise section.fail("quant_method", "is missing")
    return "", section


def read_quantization(raw: Fields, config: ModelConfig, headers: Headers | None = None) -> dict[str, Packing]:
    """How each quantized weight is packed, by a parsed config.json and, where known, the headers of the tensors.

    Empty for an unquantized model. Raises ModelError naming a `quant_method` or an option that is not read.
    """
    name, section = _section(raw)
    if not name:
        return {}
    if name not in names():
        readable = (*(load(each).READABLE for each in names()), *_published.READABLE)
        hint = f"readable: {'; '.join(readable)}"
        raise section.fail("quant_method", f"{section.text('quant_method')!r} is not supported", hint)
    packings = load(name).read_quantization(section, config, headers)
    if headers is not None and not packings:
        hint = "config.json and the weights belong to different models"
        raise ModelError(f"{section.source}: describes weights quantized by {name}, but none is there", hint)
    return packings


def stored_tensors(config: ModelConfig, packings: Mapping[str, Packing], headers: Headers) -> Iterator[Promise]:
    """Name, shape and allowed dtypes of every tensor that a folder must hold.

    Raises ModelError where a packing does not fit the shape of its linear.
    """
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


def ignored(packings: Mapping[str, Packing]) -> tuple[str, ...]:
    """Endings of tensors that the layouts in use may hold beside the weights, and nobody here needs."""
    return tuple(sorted({ending for name in _layouts(packings) for ending in load(name).IGNORED}))


def telling(packings: Mapping[str, Packing]) -> list[tuple[str, str, str]]:
    """What tensors that config.json does not promise say of themselves: ending, problem, hint; used layouts first."""
    used = _layouts(packings)
    return [row for name in (*used, *(each for each in names() if each not in used)) for row in load(name).TELLING]


def _layouts(packings: Mapping[str, Packing]) -> list[str]:
    return sorted({packing.layout for packing in packings.values()})


def read_weight(
    checkpoint: "Checkpoint", linears: Sequence[LinearSpec], packing: Packing, device: "torch.device"
) -> "PackedWeight":
    """The weights of linears that share an input and a packing, stacked. Permuted ones do not stack: one at a time.

    Raises what reading does, and ModelError for scales that are not finite.
    """
    import torch

    from mycli.runtime.quantization.packed_weight import PackedWeight
    from mycli.runtime.utils.memory import huge_empty

    assert len(linears) == 1 or not packing.permuted
    rows, columns = sum(linear.out_features for linear in linears), linears[0].in_features
    packed, layout = huge_empty((rows, packing.words(columns)), torch.int32), load(packing.layout)
    parts, start = [], 0
    for linear in linears:
        end = start + linear.out_features
        found = layout.read_linear(checkpoint, linear, packing, packed[start:end])
        for tensor in (found.scales, found.offsets):
            if tensor is not None:
                checkpoint.check(tensor, f"{linear.name}: scales")
        parts.append(found)
        start = end
    offsets = [part.offsets.to(device) for part in parts if part.offsets is not None]
    factors = [part.factors for part in parts if part.factors is not None and device.type == "cpu"]  # a GPU has no use
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


def expect_linears(checkpoint: "Checkpoint", linears: Iterable[LinearSpec], packings: Mapping[str, Packing]) -> None:
    """Ask the system to read what stands for the weights of `linears` ahead."""
    for linear in linears:
        packing = packings.get(linear.name)
        if packing is None:
            checkpoint.expect(f"{linear.name}.weight")
            continue
        for name, *_ in load(packing.layout).tensors(linear, packing, checkpoint.manifest.tensors):
            checkpoint.expect(name)


def read_dense(
    checkpoint: "Checkpoint", linear: LinearSpec, packings: Mapping[str, Packing], device: "torch.device"
) -> "torch.Tensor":
    """The weight [out_features, in_features] on `device`, in its stored dtype or, where packed, that of its scales."""
    import torch

    from mycli.runtime.quantization.packed_weight import dequantize_rows

    packing = packings.get(linear.name)
    if packing is None:
        return checkpoint.read(f"{linear.name}.weight").to(device)
    weight = read_weight(checkpoint, [linear], packing, device)
    out = torch.empty(linear.out_features, linear.in_features, dtype=weight.scales.dtype, device=device)
    for rows, values in dequantize_rows(weight):
        out[rows] = values
    return out
