"""What quantizing a model will write and need: shapes, disk and memory, checked before the first second of work.

Reads config.json and the headers of the weights, no tensor. Knows no solver by name and nothing of a terminal.
"""

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch

from mycli.quant import model_card
from mycli.quant.calibration.sampler import check_windows
from mycli.quant.layer_streaming import TOKENS_AT_ONCE, TOKENS_ON_GPU
from mycli.quant.mixed_precision import WINDOWS
from mycli.quant.model_card import Size
from mycli.quant.planning.memory import Need, QuantizationWork, choose
from mycli.quant.recipe import DEFAULT_SEQ, Recipe
from mycli.quant.source_weights import SourceWeights, source_scheme
from mycli.runtime.checkpoint import formats
from mycli.runtime.checkpoint.model_folder import MAX_COMPANION_BYTES, ModelFolder
from mycli.runtime.checkpoint.open_folder import open_model_folder
from mycli.runtime.device.placement import torch_dtype
from mycli.runtime.device.system import memory
from mycli.runtime.errors import ModelError, ResourceError, UsageError
from mycli.runtime.hub.resolve import Source
from mycli.runtime.models.config import ModelConfig
from mycli.runtime.models.experts_spec import ExpertsSpec
from mycli.runtime.models.multimodal import MTP_PART
from mycli.runtime.models.part_spec import Shape
from mycli.runtime.quantization.scheme import Packing
from mycli.runtime.utils.files import require_space
from mycli.runtime.utils.json_fields import read_object
from mycli.runtime.utils.units import distinct_sizes

Report = Literal["none", "quick", "full"]

QUICK_TOKENS = 8192
FULL_TOKENS = 1 << 15  # the held-out text has fewer in any vocabulary but of bytes
REPORT_CONTEXT = 512


@dataclass(frozen=True)
class QuantizationPlan:
    """What quantizing will write and need, known before any tensor is read."""

    source: Source
    recipe: Recipe
    folder: ModelFolder  # of the source
    stored: str | None  # the number formats of the source, where it is not dense
    packings: Mapping[str, Packing]
    tensors: tuple[tuple[str, torch.dtype, Shape], ...]  # of the result, in order
    need: Need  # of memory, beyond the program itself
    report: Report
    text: Path | None  # to calibrate on; None for the one in the package

    @property
    def config(self) -> ModelConfig:
        """Of the source."""
        return self.folder.config

    @property
    def seq(self) -> int:
        """Tokens in a window of calibration."""
        return self.recipe.seq or min(DEFAULT_SEQ, self.config.max_context)

    @property
    def size(self) -> Size:
        """Of the result, exact."""
        total = sum(dtype.itemsize * math.prod(shape) for _, dtype, shape in self.tensors)
        names = tuple(f"{name}.weight" for name in self.packings)
        inside = sum(d.itemsize * math.prod(s) for name, d, s in self.tensors if name.startswith(names))
        quantized = sum(math.prod(shape) for name, shape in self.config.tensors() if name in names)
        parameters = self.config.parameters()
        if self.folder.mtp_head is not None:
            parameters += self.folder.mtp_head.config.parameters()
        return Size(total, parameters, 8 * total / parameters, quantized, 8 * inside / quantized)


def plan_quantization(
    source: Source,
    recipe: Recipe,
    text: Path | None = None,
    *,
    folder: ModelFolder | None = None,
    report: Report = "quick",
    gpu: bool = False,
    max_ram: int | None = None,
    max_vram: int | None = None,
) -> QuantizationPlan:
    """Check that `source` can be quantized by `recipe`, from config.json and the headers of its weights.

    `folder` is the source's where it is open already; `text` is a file to calibrate on instead of the text in the
    package, opened only when the work begins. The memory needed, on a `gpu` or not, is kept below `max_ram` and
    `max_vram` bytes.

    Raises ModelError for a model that has fewer than 8 bits already or does not match its config; UsageError for a
    recipe that does not fit its shapes; ResourceError for bounds that cannot be kept.
    """
    folder = folder or open_model_folder(source.folder)
    stored = source_scheme(folder, source.label)
    config = folder.config
    packings = recipe.packings(config)
    weights, layout = SourceWeights(folder), formats.writable(packings)
    scale_dtype = torch_dtype(config.dtype)
    tensors: list[tuple[str, torch.dtype, Shape]] = []
    linears = {f"{linear.name}.weight": linear for linear in config.linears() if linear.name in packings}
    for name, shape in config.tensors():
        linear = linears.get(name)
        if linear is None:
            tensors.append((name, weights.dtype(name), shape))
        else:
            tensors += layout.planned_tensors(linear, packings[linear.name], scale_dtype)
    if folder.mtp_head is not None:
        beside = SourceWeights(folder.mtp_head)
        for name, shape in folder.mtp_head.config.tensors():
            tensors.append((MTP_PART.stored_name(name), beside.dtype(name), shape))
    work = QuantizationPlan(
        source=source,
        recipe=recipe,
        folder=folder,
        stored=stored,
        packings=packings,
        tensors=tuple(tensors),
        need=Need(0, 0, 0),
        report=report,
        text=text,
    )
    if config.has_side_inputs and (recipe.tune or recipe.target_bpw is not None):
        raise UsageError(
            f"{config.model_type}: gradients do not follow what layers read beside the stream",
            "leave tuning out, and give all layers one width",
        )
    experts = any(isinstance(spec.mlp, ExpertsSpec) for spec in config.layer_specs)
    if experts and (recipe.tune or recipe.target_bpw is not None):
        raise UsageError(
            f"{config.model_type}: gradients do not follow the choice of experts",
            "leave tuning out, and give all layers one width",
        )
    if recipe.needs_data:
        check_windows(recipe.samples, work.seq, config.max_context)
    at_once = TOKENS_ON_GPU if gpu else TOKENS_AT_ONCE
    return replace(work, need=choose(_stages(work), gpu, at_once, max_ram, max_vram))


def measured_tokens(report: Report) -> int:
    """Of held-out text, at most."""
    return {"none": 0, "quick": QUICK_TOKENS, "full": FULL_TOKENS}[report]


def _stages(work: QuantizationPlan) -> QuantizationWork:
    measured = measured_tokens(work.report)
    return QuantizationWork(
        config=work.config,
        packings=work.packings,
        tokens=work.recipe.samples * work.seq if work.recipe.needs_data else 0,
        seq=work.seq,
        transforms=work.recipe.transform is not None,
        tunes=work.recipe.tune,
        measured=measured,
        context=min(REPORT_CONTEXT, work.config.max_context),
        judged=0 if work.recipe.target_bpw is None else min(WINDOWS, work.recipe.samples) * work.seq,
    )


def check_resources(work: QuantizationPlan, target: Path, *, overwrite: bool = False) -> None:
    """Raise UsageError for a target that cannot be made, ResourceError where disk or memory will not do."""
    resolved, folder = target.resolve(), work.source.folder.resolve()
    if resolved == folder or folder in resolved.parents:
        raise UsageError(f"{target} lies within the model to be quantized", code="other-output")
    check_target(target, overwrite)
    beside = sum(map(len, work.folder.companions().values()))
    require_space(resolved.parent, work.size.bytes + beside + (16 << 20))
    available = memory().available
    if work.need.host > available:
        needed, left = distinct_sizes(work.need.host, available)
        raise ResourceError(f"{needed} of memory needed, {left} available", code="fewer-samples")


def check_target(target: Path, overwrite: bool) -> None:
    """Raise UsageError unless a model may be written at `target`.

    There is nothing; or, with `overwrite`, a folder that holds what this program wrote there and nothing else: a
    person's own files would go with it.
    """
    if not os.path.lexists(target):
        beneath = next(path for path in target.absolute().parents if path.exists())
        if not beneath.is_dir() or not os.access(beneath, os.W_OK | os.X_OK):
            raise UsageError(f"{target}: {beneath} cannot be written to", code="other-output")
        return
    foreign = _foreign(target)
    if foreign:
        raise UsageError(f"{target}: exists and {foreign}, so it is not replaced", code="other-output")
    if not overwrite:
        raise UsageError(f"{target}: exists already", code="target-exists")


def _foreign(target: Path) -> str:
    """Why what is at `target` is not this program's alone; nothing where it is, or is an empty folder."""
    if target.is_symlink() or not target.is_dir():
        return "is not a folder"
    held = {entry.name for entry in os.scandir(target)}
    if not held:
        return ""
    if model_card.CARD_FILE not in held:
        return "was not made by this program"
    try:
        written = read_object(target / model_card.CARD_FILE, MAX_COMPANION_BYTES).object("files").values
    except ModelError as error:
        return f"cannot be looked into ({error.message})"
    others = sorted(held - {model_card.CARD_FILE, *written})
    return f"also holds {others[0]}, which this program did not write" if others else ""
