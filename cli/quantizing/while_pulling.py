"""`mycli pull MODEL --bits 4`: quantizes a model while it is downloaded."""

import shlex
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from mycli.cli.command import Call
from mycli.cli.flags.recipe import RecipeFlags
from mycli.cli.quantizing.request import carry_out, complete_settings
from mycli.cli.reports.plot import layer_error
from mycli.cli.reports.quantization import show_outcome
from mycli.quant.planning.settings import PlanSettings
from mycli.quant.planning.target import SOURCE, OutputTarget, check_target
from mycli.runtime.engine.config import EngineConfig
from mycli.runtime.errors import UsageError
from mycli.runtime.hub.client import Hub
from mycli.runtime.hub.download import plan_download
from mycli.runtime.hub.model_info import check_supported
from mycli.runtime.hub.remote_folder import RemoteModel
from mycli.runtime.hub.store import data_dir
from mycli.runtime.utils.units import human_bytes

# Limit of the ranges of the source on disk, as a share of the result. With headers and the journal, the run needs less
# than 1.2 times the result.
_SPOOL_SHARE = 0.15


@dataclass(frozen=True)
class QuantizedPull:
    output: Path | None
    settings: PlanSettings  # device and text are not known yet
    device: str
    overwrite: bool
    restart: bool


def pull_quantized(call: Call, model: str, flags: RecipeFlags, request: QuantizedPull) -> None:
    """Quantize a model of the hub layer by layer; only the result is stored. Resumes an interrupted run."""
    recipe = flags.resolve()
    # Each reading of the whole model would be another download.
    if recipe.tune or recipe.target_bpw is not None or recipe.hessian == "model":
        message = "--tune, --target-bpw and --hessian model read the whole model several times"
        raise UsageError(message, f"download it first: mycli pull {shlex.quote(model)}; then mycli quantize")
    name = model.partition("@")[0].rpartition("/")[2]
    folder = request.output or data_dir() / "models" / f"{name}-{recipe.name}"
    target = OutputTarget(folder, request.overwrite, request.restart)
    check_target(folder, target.overwrite)
    with Hub.connect(call.out.note) as hub:
        plan = plan_download(hub, model)
        check_supported(hub, plan)
        with RemoteModel.open(hub, plan, target.work_folder / SOURCE) as remote:
            _quantize(call, remote, flags, request, target)


def _quantize(
    call: Call, remote: RemoteModel, flags: RecipeFlags, request: QuantizedPull, target: OutputTarget
) -> None:
    from mycli.quant import pipeline
    from mycli.quant.planning.plan import plan_quantization
    from mycli.quant.shared_work import SharedWork

    folder, recipe = remote.folder, flags.resolve()
    placement = EngineConfig(device=request.device, dtype="float32").place(folder.config)
    settings = complete_settings(call, request.settings, flags.calib, placement, fetch=True)
    work = plan_quantization(remote.source, recipe, settings, folder)
    if work.chooses_head:
        # The choice may write the result anew: twice the disk, and a kill after it would lose all finished parts.
        call.out.note("the output head stays unquantized; --head int8 halves it")
        work = plan_quantization(remote.source, replace(recipe, head="keep"), settings, folder)
    remote.spool.limit = int(work.size.bytes * _SPOOL_SHARE)
    shared = SharedWork(digests=remote.digests())
    quantize = partial(pipeline.quantize, work, target, placement, shared=shared, in_place=True)
    size = f"({human_bytes(folder.manifest.nbytes)}) → {target.path.name}: {human_bytes(work.size.bytes)} on disk"
    outcome = carry_out(call, placement, f"{remote.source.label} {size}", quantize, lambda: "to continue")
    show_outcome(call, outcome, [layer_error(layer) for layer in outcome.layers])
