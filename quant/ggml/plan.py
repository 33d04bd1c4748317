"""Plans the GGUF file of a model before weights are read: the type of every tensor, file size and memory."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mycli.quant.calibration.sampler import check_windows
from mycli.quant.ggml.file import GgufLayout, fp32_matrices, require_loadable
from mycli.quant.ggml.mixes import ModelShape, choose_types, load_mix
from mycli.quant.ggml.recipe import GgufRecipe
from mycli.quant.layer_streaming import tokens_at_once
from mycli.quant.output.model_card import Size
from mycli.quant.output.work_folder import unwritten_bytes
from mycli.quant.planning.memory import QuantizationWork, fitting_need, require_memory
from mycli.quant.planning.plan import REPORT_CONTEXT, Plan, measured_tokens, require_disk
from mycli.quant.planning.settings import PlanSettings
from mycli.quant.planning.target import OutputTarget
from mycli.quant.recipe import DEFAULT_SEQ
from mycli.quant.source_weights import SourceWeights, source_scheme
from mycli.runtime.checkpoint.formats import EMBEDDING
from mycli.runtime.checkpoint.gguf.architecture import Architecture
from mycli.runtime.checkpoint.gguf.architectures import written_architecture
from mycli.runtime.checkpoint.gguf.types import TYPES_BY_NAME
from mycli.runtime.checkpoint.model_folder import ModelFolder
from mycli.runtime.device.placement import dtype_info
from mycli.runtime.errors import ModelError, UsageError
from mycli.runtime.hub.resolve import Source
from mycli.runtime.kernels.cpu.rounded import rounds
from mycli.runtime.models.config import ModelConfig
from mycli.runtime.models.experts_spec import ExpertsSpec

_SPARE_BYTES = 1 << 20  # for the record next to the file
_HINT = "GGUF can hold it unquantized"
_HEAD_KEYS = ("head_count", "head_count_kv")  # a number for all layers, or one for each


@dataclass(frozen=True)
class GgufPlan(Plan):
    """A plan of a file; `packings` are those of every linear with blocks, the embedding among them."""

    recipe: GgufRecipe
    layout: GgufLayout

    @property
    def size(self) -> Size:
        shapes = dict(self.config.tensors())
        sizes = {name: kind_bytes(shape, self.layout.kinds[name]) for name, shape in shapes.items()}
        names = [f"{name}.weight" for name in self.packings]
        parameters, quantized = self.config.parameters(), sum(math.prod(shapes[name]) for name in names)
        total, packed = self.layout.nbytes, sum(sizes[name] for name in names)
        return Size(total, parameters, 8 * total / parameters, quantized, 8 * packed / quantized)

    @property
    def kinds(self) -> Counter[str]:
        return Counter(self.layout.kinds[f"{name}.weight"] for name in self.packings)


def kind_bytes(shape: tuple[int, ...], kind: str) -> int:
    stored = TYPES_BY_NAME[kind]
    return math.prod(shape) // stored.block * stored.nbytes


def plan_gguf(
    source: Source,
    recipe: GgufRecipe,
    settings: PlanSettings = PlanSettings(),  # noqa: B008  # frozen
    folder: ModelFolder | None = None,
) -> GgufPlan:
    """Plan a GGUF file of `source`; arguments and errors are those of `planning.plan.plan_quantization`."""
    folder = folder or source.open()
    stored, config = source_scheme(folder, source.label), folder.config
    kinds = _kinds(folder, recipe)
    mix = load_mix(recipe.mix)
    layout = GgufLayout(folder, source.label, kinds, mix.id)
    names = [name.removesuffix(".weight") for name, kind in kinds.items() if TYPES_BY_NAME[kind].bits]
    packings = {name: TYPES_BY_NAME[kinds[f"{name}.weight"]].packing for name in names}
    seq = recipe.seq or min(DEFAULT_SEQ, config.max_context)
    check_windows(recipe.samples, seq, config.max_context)
    work = QuantizationWork(
        config=config,
        packings=packings,
        tokens=recipe.samples * seq,
        seq=seq,
        transforms=False,
        tunes=False,
        measured=measured_tokens(settings.report, config, settings.gpu),
        context=min(REPORT_CONTEXT, config.max_context),
        keeps_inputs=not settings.gpu and rounds(),
    )
    need = fitting_need(work, tokens_at_once(settings.gpu), settings)
    return GgufPlan(source, folder, stored, packings, need, seq, settings, recipe, layout)


def check_gguf_resources(work: GgufPlan, target: OutputTarget) -> None:
    """Raise UsageError for a target that cannot be written, ResourceError for too little disk or memory."""
    check_gguf_target(target.path, target.overwrite)
    size = work.size
    blocks = int(size.quantized_parameters * size.quantized_bits_per_weight / 8)
    output = target.path.resolve().parent, size.bytes + _SPARE_BYTES
    require_disk([output, (target.work_folder, unwritten_bytes(target.work_folder, blocks))])
    require_memory(work.need)


def check_gguf_target(target: Path, overwrite: bool) -> None:
    """Raise UsageError unless `target` is new or, with `overwrite`, a file."""
    if target.is_symlink() or (target.exists() and not target.is_file()):
        raise UsageError(f"{target}: not a regular file, so it is not replaced", code="other-output")
    if target.exists() and not overwrite:
        raise UsageError(f"{target}: exists already", code="target-exists")


def quantized_names(folder: ModelFolder) -> list[str]:
    """Return the tensors that get a quantized type: linears, embeddings and head, except those transposed in GGUF."""
    # kv_b of latent attention is stored as two halves, one transposed; blocks lie along rows, so it stays in floats.
    config = folder.config
    architecture = written_architecture(config)
    tables = [EMBEDDING, *([config.per_layer_table().name] if config.per_layer_width else [])]
    names = [f"{name}.weight" for name in (*tables, *(linear.name for linear in config.linears()))]
    places = {name: architecture.place(name) for name in names}
    return [name for name, place in places.items() if place is None or not place.rule.by_head]


def _kinds(folder: ModelFolder, recipe: GgufRecipe) -> dict[str, str]:
    config, weights = folder.config, SourceWeights(folder)
    architecture, shapes = written_architecture(config), dict(config.tensors())
    require_loadable(config, architecture, ())  # before keys are computed, which such a model may lack
    stored = {}
    for name in quantized_names(folder):
        place = architecture.place(name)
        stored[name] = name if place is None else place.name
    rows = {stored[name]: shapes[name][1] for name in stored}
    types = choose_types(recipe.mix, rows.items(), model_shape(config, architecture))
    exact = fp32_matrices(config)
    kinds, chosen = {}, dict(recipe.kinds)
    for name, shape in shapes.items():
        long_axes = [size for size in shape if size != 1]
        if name in stored:
            kinds[name] = chosen.get(name) or types[stored[name]]
            if TYPES_BY_NAME[kinds[name]].dtype is not None:
                raise ModelError(f"{name}: rows of {shape[1]} values, which no GGUF type divides", _HINT)
        elif name in exact or len(long_axes) == 1 or len(shape) > 2:
            kinds[name] = "F32"
        else:
            kinds[name] = dtype_info(weights.dtype(name)).safetensors_name
    return kinds


def model_shape(config: ModelConfig, architecture: Architecture) -> ModelShape:
    """Return the properties of a model that decide types, as llama.cpp reads them from the file."""
    experts = [len(spec.mlp.experts) for spec in config.layer_specs if isinstance(spec.mlp, ExpertsSpec)]
    keys = architecture.metadata(config, None)
    queries, kv_heads = (_first(keys.get(f"{architecture.name}.attention.{key}", 0)) for key in _HEAD_KEYS)
    return ModelShape(
        config.layers,
        queries // kv_heads if kv_heads else 0,
        max(experts, default=0),
        architecture.name,
        config.tie_embeddings,
    )


def _first(value: int | Sequence[int]) -> int:
    return value if isinstance(value, int) else value[0]
