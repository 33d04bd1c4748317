"""Plans a quantization: shapes, disk and memory, checked before the first second of work.

Reads config.json and the headers of the weights, no tensor.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from mycli.quant import solvers
from mycli.quant.calibration.sampler import Calibration, calibrate, check_windows
from mycli.quant.layer_streaming import tokens_at_once
from mycli.quant.output.model_card import Size
from mycli.quant.output.work_folder import unwritten_bytes
from mycli.quant.planning.memory import Need, QuantizationWork, fitting_need, require_memory
from mycli.quant.planning.mixed_precision import COPY_WINDOWS, WINDOWS
from mycli.quant.planning.settings import PlanSettings, Report
from mycli.quant.planning.target import OutputTarget, check_target
from mycli.quant.recipe import DEFAULT_SEQ, Recipe
from mycli.quant.source_weights import SourceWeights, source_scheme
from mycli.runtime.checkpoint import formats
from mycli.runtime.checkpoint.model_folder import ModelFolder
from mycli.runtime.device.placement import torch_dtype
from mycli.runtime.errors import UsageError
from mycli.runtime.hub.resolve import Source
from mycli.runtime.kernels.cpu.rounded import rounds
from mycli.runtime.models.config import ModelConfig
from mycli.runtime.models.multimodal import MTP_PART
from mycli.runtime.models.part_spec import Shape
from mycli.runtime.quantization.scheme import BITS, Packing
from mycli.runtime.utils.files import require_space

Tensors = tuple[tuple[str, torch.dtype, Shape], ...]

QUICK_TOKENS = 8192
# A CPU measures large models on fewer tokens: two cores with AVX2 take ten minutes for 1.1 billion parameters.
LARGE = 2_000_000_000  # parameters that a token uses
QUICK_TOKENS_OF_LARGE = 2048
FULL_TOKENS = 1 << 15  # more than the held-out text has in any vocabulary but one of bytes
REPORT_CONTEXT = 512
_SPARE_BYTES = 16 << 20  # for config.json, the card and headers


@dataclass(frozen=True)
class Plan:
    """The source of a quantization, the packings of its linears, and the memory that the work needs."""

    source: Source
    folder: ModelFolder
    stored: str | None  # number formats of a packed source
    packings: Mapping[str, Packing]
    need: Need  # of memory, beyond the process itself
    seq: int  # tokens per calibration window
    settings: PlanSettings

    @property
    def config(self) -> ModelConfig:
        return self.folder.config

    @property
    def measured_tokens(self) -> int:
        """The held-out tokens on which the result is measured."""
        return measured_tokens(self.settings.report, self.config, self.settings.gpu)

    def calibration(self, windows: int, seed: int) -> Calibration:
        return calibrate(self.settings.text, self.folder.tokenizer(), self.config.vocab_size, windows, self.seq, seed)


@dataclass(frozen=True)
class QuantizationPlan(Plan):
    """A plan of a folder: the tensors that quantizing will write."""

    recipe: Recipe
    tensors: Tensors  # of the result, in order
    balances: bool = True  # outlying columns may be rescaled

    @property
    def chooses_head(self) -> bool:
        return self.recipe.head == "auto" and self.config.head().name in self.packings

    def with_dense_head(self) -> "QuantizationPlan":
        packings = {name: packing for name, packing in self.packings.items() if name != self.config.head().name}
        return replace(self, packings=packings, tensors=_tensors(self.folder, packings))

    def disk_needs(self, target: Path, work_folder: Path | None) -> list[tuple[Path, int]]:
        """Return the folders that quantizing writes to, with their bytes; work_folder: None if there is none."""
        needs = [self.result_need(target), self.replaced_need(target)]
        return needs if work_folder is None else [*needs, self.blocks_need(work_folder)]

    def result_need(self, target: Path) -> tuple[Path, int]:
        companions = sum(map(len, self.folder.companions().values()))
        largest = self.with_dense_head() if self.chooses_head else self
        return target.resolve().parent, largest.size.bytes + companions + _SPARE_BYTES

    def replaced_need(self, target: Path) -> tuple[Path, int]:
        # The result with a packed head, from which one with a dense head is written if that is chosen.
        return target.resolve().parent, self.size.bytes if self.chooses_head else 0

    def blocks_need(self, work_folder: Path) -> tuple[Path, int]:
        if not self.recipe.needs_data:
            return work_folder, 0
        linears = [linear for linear in self.config.linears() if linear.name in self.packings]
        codes = sum(linear.out_features * linear.in_features for linear in linears)  # a byte each
        scales = sum(linear.out_features * self.packings[linear.name].groups(linear.in_features) for linear in linears)
        blocks = codes + scales * torch_dtype(self.config.dtype).itemsize
        return work_folder, unwritten_bytes(work_folder, blocks)

    @property
    def size(self) -> Size:
        total = sum(dtype.itemsize * math.prod(shape) for _, dtype, shape in self.tensors)
        names = tuple(f"{name}.weight" for name in self.packings)
        packed = sum(dtype.itemsize * math.prod(shape) for name, dtype, shape in self.tensors if name.startswith(names))
        quantized = sum(math.prod(shape) for name, shape in self.config.tensors() if name in names)
        parameters = self.config.parameters()
        if self.folder.mtp_head is not None:
            parameters += self.folder.mtp_head.config.parameters()
        return Size(total, parameters, 8 * total / parameters, quantized, 8 * packed / quantized)


def plan_quantization(
    source: Source,
    recipe: Recipe,
    settings: PlanSettings = PlanSettings(),  # noqa: B008  # frozen
    folder: ModelFolder | None = None,
) -> QuantizationPlan:
    """Plan to quantize `source` by `recipe`; `folder` is the source's if it is open already.

    Raises ModelError for a model with fewer than 8 bits or one that does not match its config; UsageError for a recipe
    that does not fit its shapes; ResourceError if a limit of memory is too small.
    """
    folder, unmeasured = folder or source.open(), settings.report == "none"
    if folder.config.bidirectional and (recipe.needs_data or not unmeasured):
        message = f"{source.label}: its tokens see the whole text, which calibration and the quality report do not do"
        raise UsageError(message, code="no-data-no-report")
    stored = source_scheme(folder, source.label)
    # Without a report nothing says what 8 bits would cost.
    measurable = replace(recipe, head="keep") if unmeasured and recipe.head == "auto" else recipe
    config, packings = folder.config, measurable.packings(folder.config)
    tensors = _tensors(folder, packings)
    seq = recipe.seq or min(DEFAULT_SEQ, config.max_context)
    if recipe.needs_data:
        check_windows(recipe.samples, seq, config.max_context)
    work = QuantizationWork(
        config=config,
        packings=packings,
        tokens=recipe.samples * seq if recipe.needs_data else 0,
        seq=seq,
        transforms=recipe.transform is not None,
        tunes=recipe.tune,
        tunes_codes=recipe.tune_codes,
        measured=measured_tokens(settings.report, config, settings.gpu),
        context=min(REPORT_CONTEXT, config.max_context),
        output_moments=recipe.hessian == "model",
        keeps_inputs=not settings.gpu and rounds(),
        native_products=not settings.gpu and rounds(),
        sensitivity_tokens=0 if recipe.target_bpw is None else min(WINDOWS, recipe.samples) * seq,
    )
    need = fitting_need(work, tokens_at_once(settings.gpu), settings)
    return QuantizationPlan(source, folder, stored, packings, need, seq, settings, recipe, tensors)


def plan_low_copy(work: QuantizationPlan) -> QuantizationPlan:
    """Return the plan of the copy for measuring widths: of the widest below 8 that fits `target_bpw`, or the least."""
    assert work.recipe.target_bpw is not None
    # Without a transform: rescaled weights cannot be compared with the original's.
    low = replace(
        work.recipe,
        method=solvers.DEFAULT if work.recipe.needs_data else work.recipe.method,
        target_bpw=None,
        widths=None,
        samples=min(work.recipe.samples, COPY_WINDOWS),
        head="keep",
        tune=False,
        tune_codes=False,
        hessian="layer",
    )
    settings = replace(work.settings, report="none", max_ram=None, max_vram=None)
    for bits in sorted((bits for bits in BITS if bits < 8), reverse=True):
        plan = plan_quantization(work.source, replace(low, bits=bits), settings, work.folder)
        if plan.size.quantized_bits_per_weight <= work.recipe.target_bpw:
            break
    return plan


def measured_tokens(report: Report, config: ModelConfig, gpu: bool) -> int:
    large = not gpu and config.active_parameters() > LARGE
    quick = min(QUICK_TOKENS, QUICK_TOKENS_OF_LARGE) if large else QUICK_TOKENS
    return {"none": 0, "quick": quick, "full": FULL_TOKENS}[report]


def _tensors(folder: ModelFolder, packings: Mapping[str, Packing]) -> Tensors:
    config, weights, layout = folder.config, SourceWeights(folder), formats.writable(packings)
    linears = {f"{linear.name}.weight": linear for linear in config.linears() if linear.name in packings}
    tensors: list[tuple[str, torch.dtype, Shape]] = []
    for name, shape in config.tensors():
        linear = linears.get(name)
        if linear is None:
            tensors.append((name, weights.dtype(name), shape))
        else:
            tensors += layout.planned_tensors(linear, packings[linear.name], torch_dtype(config.dtype))
    if folder.mtp_head is not None:
        weights = SourceWeights(folder.mtp_head)
        for name, shape in folder.mtp_head.config.tensors():
            tensors.append((MTP_PART.stored_name(name), weights.dtype(name), shape))
    return tuple(tensors)


def check_resources(work: QuantizationPlan, target: OutputTarget, work_folder: Path | None = None) -> None:
    """Raise UsageError for a target that cannot be written, ResourceError for too little disk or memory."""
    check_target(target.path, target.overwrite, work.source.folder)
    require_disk(work.disk_needs(target.path, work_folder))
    require_memory(work.need)


def require_disk(needs: Iterable[tuple[Path, int]]) -> None:
    """Raise ResourceError unless every disk has room for the bytes of all folders on it."""
    disks: dict[int, tuple[Path, int]] = {}
    for folder, nbytes in needs:
        folder = folder.resolve()
        disk = next(path for path in (folder, *folder.parents) if path.exists()).stat().st_dev
        first, total = disks.get(disk, (folder, 0))
        disks[disk] = first, total + nbytes
    for folder, nbytes in disks.values():
        require_space(folder, nbytes)
