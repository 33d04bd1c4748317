"""The arguments of a quantization besides its recipe, and the steps that every kind of result shares."""

import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from mycli.cli.command import Call, Terminated
from mycli.cli.flags.gates import Gates
from mycli.cli.load import announce_build, announce_placement
from mycli.cli.reports.plot import layer_error, write_errors
from mycli.cli.reports.quantization import show_outcome
from mycli.cli.text.progress import STEP_SECONDS, stages
from mycli.quant.planning.settings import PlanSettings
from mycli.quant.planning.target import OutputTarget
from mycli.quant.progress import Callbacks, ReportProgress
from mycli.runtime.checkpoint.model_folder import ModelFolder
from mycli.runtime.engine.config import EngineConfig
from mycli.runtime.errors import ModelError
from mycli.runtime.hub.client import Hub
from mycli.runtime.hub.dataset import DatasetName, cached_dataset, fetch_dataset, plan_dataset
from mycli.runtime.hub.resolve import Source

if TYPE_CHECKING:  # torch takes seconds to import
    from mycli.quant.pipeline import Outcome
    from mycli.runtime.device.placement import Placement


@dataclass(frozen=True)
class QuantizationRequest:
    """The model, the output, the limits and the measurements of a quantization."""

    source: Source
    folder: ModelFolder
    calib: str | None
    settings: PlanSettings  # device and text are not known yet
    gates: Gates
    device: str
    output: Path | None
    work_dir: Path | None
    plot: Path | None
    overwrite: bool
    restart: bool
    dry_run: bool

    def place(self) -> "Placement":
        # Measured in float32: half precision alone moves KL by as much as 8-bit weights do.
        return EngineConfig(device=self.device, dtype="float32").place(self.folder.config)

    def plan_settings(self, call: Call, placement: "Placement", fetch: bool) -> PlanSettings:
        return complete_settings(call, self.settings, self.calib, placement, fetch)

    def target(self, path: Path) -> OutputTarget:
        return OutputTarget(path, self.overwrite, self.restart, self.work_dir)


def complete_settings(
    call: Call, settings: PlanSettings, calib: str | None, placement: "Placement", fetch: bool
) -> PlanSettings:
    """Return the settings with device and calibration text, which is downloaded first if `fetch`."""
    text = _calibration_file(call, calib, fetch) if calib else None
    return replace(settings, text=text, gpu=placement.device.type == "cuda")


def _calibration_file(call: Call, calib: str, fetch: bool) -> Path | None:
    # None for a data set that is not downloaded: a dry run gives the same result with every text.
    if not calib.startswith("hf:"):
        return Path(calib)
    name = DatasetName.parse(calib.removeprefix("hf:"))
    if call.offline:
        return cached_dataset(name)
    if not fetch:
        return None
    with Hub.connect(call.out.note) as hub:
        job = plan_dataset(hub, name)
        with call.out.progress(f"{name.repo} @ {job.commit[:12]}", job.new_bytes, "B") as bar:
            path = fetch_dataset(hub, job, bar.advance)
    call.out.note(f"calibration data: {name.repo} @ {job.commit[:12]}, {job.files[0].name}")
    return path


def quantization_progress(call: Call) -> AbstractContextManager[ReportProgress]:
    return stages(partial(call.out.progress, line_seconds=STEP_SECONDS))


def carry_out(
    call: Call,
    placement: "Placement",
    summary: str,
    quantize: "Callable[[Callbacks], Outcome]",
    when_stopped: Callable[[], str],
) -> "Outcome":
    """Print what is done and where, do it, and say what an interruption leaves."""
    announce_placement(call, placement)
    announce_build(call, placement)
    call.out.note(summary)
    with noting_stop(call, when_stopped), quantization_progress(call) as progress:
        outcome = quantize(Callbacks(progress, call.out.note))
    for note in outcome.notes:
        call.out.note(note)
    return outcome


@contextmanager
def noting_stop(call: Call, when_stopped: Callable[[], str]) -> Iterator[None]:
    """Say what Ctrl-C or SIGTERM leaves, and the command to type again."""
    try:
        yield
    except (KeyboardInterrupt, Terminated):
        call.out.note(f"stopped; {when_stopped()}: {shlex.join(['mycli', *sys.argv[1:]])}")
        raise


def carry_out_request(
    call: Call,
    request: QuantizationRequest,
    placement: "Placement",
    steps: str,
    quantize: "Callable[[Callbacks], Outcome]",
    stored_in: Path | None,
) -> None:
    """Carry out a plan, print and draw the result, then raise GateError if it exceeds a limit.

    stored_in: the folder of finished blocks.
    """

    def unfinished_work() -> str:
        if stored_in is not None and stored_in.is_dir():
            return f"finished blocks are stored in {stored_in}; to continue"
        return "nothing was written; to start again"

    outcome = carry_out(call, placement, f"{request.source.label} → {steps}", quantize, unfinished_work)
    errors = [layer_error(layer) for layer in outcome.layers]
    show_outcome(call, outcome, errors)
    if request.plot is not None:  # after the result, which a full disk must not take away
        write_errors(request.plot, outcome.folder.name, errors)
    request.gates.check(outcome)


def tell_how_to_use(call: Call, folder: ModelFolder, name: str) -> None:
    if call.out.json_mode:
        return
    use = f"to continue a text with it: mycli run {name} PROMPT"
    with suppress(ModelError):  # without a readable template there is no chat
        if folder.chat_template() is not None:
            use = f"to chat with it: mycli chat {name}"
    call.out.note(use)
