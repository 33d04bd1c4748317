"""The parts that quantizations of one model share."""

from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

from mycli.quant.calibration.output_moments import LayerMoments, output_moments
from mycli.quant.calibration.sampler import Calibration
from mycli.quant.evaluate import STREAM_BYTES
from mycli.quant.layer_streaming import RememberedModel, StreamedModel
from mycli.quant.output import model_card
from mycli.quant.planning.plan import QuantizationPlan
from mycli.quant.progress import ReportProgress
from mycli.quant.quality_report import Original
from mycli.runtime.checkpoint.model_folder import ModelFolder
from mycli.runtime.device.placement import Placement

REMEMBERED_BYTES = 256 << 20  # of the residual streams of an original that only one result is measured against


class SharedWork:
    """The parts that quantizations of one model share; each is computed by the first that needs it."""

    def __init__(self, remembers: bool = False, digests: dict[str, Any] | None = None) -> None:
        """`remembers`: keep the moments and residual streams of the source that copies are solved and measured with.

        digests: of the source's files, where they are known.
        """
        self._remembers = remembers
        self._calibrations: dict[tuple[object, ...], Calibration] = {}
        self._moments: dict[tuple[object, ...], list[LayerMoments]] = {}
        self._digests: Future[dict[str, Any]] | None = None
        if digests is not None:
            self._digests = Future()
            self._digests.set_result(digests)
        self._original: Original | None = None

    def calibration(self, work: QuantizationPlan) -> Calibration:
        key = self._text(work)
        if key not in self._calibrations:
            self._calibrations[key] = work.calibration(work.recipe.samples, work.recipe.seed)
        return self._calibrations[key]

    def moments(self, work: QuantizationPlan, model: StreamedModel, progress: ReportProgress) -> list[LayerMoments]:
        """The output moments of `model`, the source, on the calibration windows."""
        key = (*self._text(work), model.at_once)
        moments = self._moments.get(key)
        if moments is None:
            moments = output_moments(model, self.calibration(work).windows, work.recipe.seed, progress)
            # Copies are measured with them in memory, which their plans do not count.
            if self._remembers and sum(layer.nbytes for layer in moments) <= STREAM_BYTES:
                self._moments[key] = moments
        return moments

    def _text(self, work: QuantizationPlan) -> tuple[object, ...]:
        return work.settings.text, work.recipe.samples, work.seq, work.recipe.seed

    @contextmanager
    def digests(self, folder: ModelFolder) -> Iterator[Future[dict[str, Any]]]:
        if self._digests is not None:
            yield self._digests
            return
        with model_card.digests_in_background(folder.source_files(), folder.path) as digests:
            self._digests = digests
            try:
                yield digests
                digests.result()
            except BaseException:
                self._digests = None  # leaving the context may have cancelled it
                raise

    def original(self, work: QuantizationPlan, placement: Placement, *, whole: bool) -> Original:
        at_once = work.need.at_once
        if self._original is None or self._original.model.at_once != at_once:
            model = (
                RememberedModel(work.folder, placement, at_once, twice=not self._remembers)
                if self._remembers or _runs_again(work, placement)
                else StreamedModel(work.folder, placement, at_once)
            )
            self._original = Original(model, work.settings.max_ram, whole=whole)
        return self._original


def _runs_again(work: QuantizationPlan, placement: Placement) -> bool:
    # The head is chosen by the text that the result is then measured on; with a long text its stream needs much memory.
    stream = work.measured_tokens * work.config.stream_width * placement.dtype.itemsize
    return work.chooses_head and stream <= REMEMBERED_BYTES
