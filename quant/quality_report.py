"""Compares a quantized model with its original: on held-out text, with 8-bit activations, and on tool calls."""

from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from mycli.quant.calls.measure import count_calls, measure_structure
from mycli.quant.calls.prompts import call_prompts
from mycli.quant.calls.record import CallCounts, CallQuality
from mycli.quant.evaluate import (
    Evaluation,
    TokenWindows,
    activation_models,
    cut,
    evaluate_each,
    held_out_text,
    measure_heads,
)
from mycli.quant.layer_streaming import StreamedModel
from mycli.quant.planning.plan import REPORT_CONTEXT, measured_tokens
from mycli.quant.planning.settings import Report
from mycli.quant.progress import ReportProgress
from mycli.runtime.checkpoint.model_folder import ModelFolder
from mycli.runtime.device.placement import Placement
from mycli.runtime.device.system import trim_heap
from mycli.runtime.errors import ResourceError, UserError
from mycli.runtime.quantization.activations import ActivationKl
from mycli.runtime.quantization.head import HeadKl
from mycli.runtime.tokenizer.parsing.tool_formats import own_tool_format


class Original:
    """The model that results are measured against; it replies to the tool prompts once."""

    def __init__(self, model: StreamedModel, memory_limit: int | None = None, *, whole: bool = True) -> None:
        """`memory_limit`: bytes for replies; `whole`: all its weights are on this machine, so that it can reply."""
        self.model = model
        self.memory_limit = memory_limit
        self._whole = whole

    @cached_property
    def call_counts(self) -> CallCounts | str:
        """The calls in its replies, or why it did not reply."""
        if not self._whole:
            return "the original is read from the hub, layer by layer"
        try:
            return count_calls(self.model.folder, self.model.placement, self.memory_limit)
        except ResourceError as error:
            return f"the original does not fit in memory: {error.message}"


@dataclass(frozen=True)
class QualityReport:
    """The measurements of a result; all None without a report."""

    evaluation: Evaluation | None = None
    head: HeadKl | None = None
    activations: ActivationKl | None = None
    calls: CallQuality | None = None

    @property
    def kl(self) -> float | None:
        divergence = None if self.evaluation is None else self.evaluation.divergence
        return None if divergence is None else divergence.kl.value

    @property
    def record(self) -> dict[str, Any] | None:
        """The JSON object for `mycli.json`."""
        if self.evaluation is None:
            return None
        return {
            **asdict(self.evaluation),
            "head": None if self.head is None else self.head.record,
            "activations": None if self.activations is None else self.activations.record,
            "calls": None if self.calls is None else asdict(self.calls),
        }


@dataclass(frozen=True)
class MeasuredHead:
    text: TokenWindows
    kl: HeadKl
    evaluation: Evaluation  # with the head that is stored


def report_text(folder: ModelFolder, report: Report, placement: Placement) -> TokenWindows:
    config, gpu = folder.config, placement.device.type == "cuda"
    tokens = measured_tokens(report, config, gpu) if report == "quick" else None
    return cut(held_out_text(), folder.tokenizer(), min(REPORT_CONTEXT, config.max_context), tokens)


def choose_head(original: Original, result: ModelFolder, report: Report, progress: ReportProgress) -> MeasuredHead:
    """Measure a result whose head is packed with that head and with the original's."""
    trim_heap()
    text = report_text(result, report, original.model.placement)
    measured = measure_heads(result, text, original.model, progress)
    divergences = measured["keep"].divergence, measured["int8"].divergence
    assert divergences[0] is not None and divergences[1] is not None
    kl = HeadKl(divergences[0].kl.value, divergences[1].kl.value)
    return MeasuredHead(text, kl, measured["int8" if kl.packed else "keep"])


def measure_result(
    original: Original,
    result: ModelFolder,
    report: Report,
    progress: ReportProgress,
    *,
    same_head: bool = True,
    head: MeasuredHead | None = None,
) -> QualityReport:
    """Measure a result; `same_head`: a head that is not packed has the original's weights."""
    reference = original.model
    placement = reference.placement
    text = report_text(reference.folder, report, placement) if head is None else head.text
    trim_heap()
    model = StreamedModel(result, placement, reference.at_once)
    if same_head and "lm_head" not in result.packings:
        model.share_head(reference)
    # In one pass: the reference runs and predicts once for all precisions.
    rounded = activation_models(result, placement)
    models = [*([model] if head is None else []), *rounded.values()]
    measured = evaluate_each(models, text, reference, progress) if models else []
    evaluation = measured.pop(0) if head is None else head.evaluation
    kl = [score.divergence.kl.value for score in measured if score.divergence is not None]
    activations = ActivationKl(*kl) if kl else None
    del rounded, models
    calls = _measure_calls(original, model, progress)
    return QualityReport(evaluation, None if head is None else head.kl, activations, calls)


def _measure_calls(original: Original, model: StreamedModel, progress: ReportProgress) -> CallQuality | None:
    # None for a model that has no format for calls, or whose template refuses the built-in conversations.
    if own_tool_format(model.folder.tokenizer()) is None:
        return None
    try:
        structure, kinds = measure_structure(original.model, model, progress)
    except UserError:
        return None
    before = original.call_counts
    count = len(call_prompts())
    if isinstance(before, str):
        return CallQuality(count, structure, kinds, None, None, before)
    try:
        after = count_calls(model.folder, model.placement, original.memory_limit, progress)
    except ResourceError as error:  # the quantized model is written all the same
        return CallQuality(count, structure, kinds, None, None, f"the result does not fit in memory: {error.message}")
    return CallQuality(count, structure, kinds, before, after)
