"""`mycli pull`: download a model into the Hugging Face cache, verified and resumable."""

from pathlib import Path
from typing import Annotated

from mycli.cli.command import Call, Terminated, command
from mycli.cli.flags import options
from mycli.cli.flags.recipe import RecipeFlags
from mycli.cli.output import Column
from mycli.cli.quantizing.while_pulling import QuantizedPull, pull_quantized
from mycli.quant.planning.settings import PlanSettings, Report
from mycli.runtime.errors import UsageError
from mycli.runtime.hub.client import Hub
from mycli.runtime.hub.download import DownloadPlan, check_space, fetch_files, plan_download
from mycli.runtime.hub.model_info import check_supported
from mycli.runtime.hub.other_stores import find_stored
from mycli.runtime.hub.resolve import Source, custom_code_warning, resolve
from mycli.runtime.utils.units import human_bytes, pluralize

EXAMPLES = (
    "mycli pull HuggingFaceTB/SmolLM2-135M-Instruct  # needs the network",
    "mycli pull Qwen/Qwen3-0.6B --dry-run  # needs the network",
    "mycli pull Qwen/Qwen3-0.6B@main --json  # needs the network",
    "mycli pull Qwen/Qwen3-8B --bits 4  # needs the network",
)
_COLUMNS = (
    Column("file", "name"),
    Column("bytes", "bytes", right=True),
    Column("state", lambda file: "cached" if file["cached"] else "new"),
)


def _show(call: Call, job: DownloadPlan, source: Source | None) -> None:
    missing = {file.name for file in job.missing}
    answer = {
        "model": job.model,
        "repo": job.repo,
        "commit": job.commit,
        "folder": None if source is None else str(source.folder),
        "bytes": job.total_bytes,
        "new_bytes": job.new_bytes,
        "files": [{"name": f.name, "bytes": f.size, "cached": f.name not in missing} for f in job.files],
    }
    if source is not None and not call.out.json_mode:
        call.out.result(str(source.folder))
        return
    call.out.show(answer, _COLUMNS, rows="files")
    if not call.out.json_mode:
        cached = human_bytes(job.total_bytes - job.new_bytes)
        call.out.result(f"new: {human_bytes(job.new_bytes)}, cached: {cached}")


def _show_local(call: Call, model: str) -> None:
    source = resolve(model, offline=call.offline)
    answer = {"model": model, "repo": source.repo, "commit": source.revision, "folder": str(source.folder)}
    if not call.out.answered(answer):
        call.out.note(f"{model} is complete on this machine; the hub was not contacted")
        call.out.result(str(source.folder))


@command
def pull(
    call: Call,
    model: options.HubModel,
    flags: RecipeFlags,
    dry_run: Annotated[bool, options.flag("--dry-run", "Show what would be downloaded, and download nothing.")] = False,
    force: Annotated[
        bool, options.flag("--force", "Download even if the disk seems too small or mycli cannot run the model.")
    ] = False,
    output: Annotated[
        Path | None,
        options.option("-o --output", "PATH", "Folder of the quantized model.", show_default="in $MYCLI_HOME"),
    ] = None,
    report: Annotated[
        str, options.option("--report", "quick|full|none", "How much held-out text its quality is measured on.")
    ] = "quick",
    max_ram: Annotated[int | None, options.size("--max-ram", "Limit of memory for quantizing.")] = None,
    device: options.Device = "auto",
    threads: options.Threads = None,
    overwrite: Annotated[bool, options.flag("--overwrite", "Replace the quantized model if it exists.")] = False,
    restart: Annotated[bool, options.flag("--restart", "Drop the unfinished work of an earlier run.")] = False,
) -> None:
    """Download a model from the Hugging Face hub.

    Downloads the safetensors, JSON, tokenizer and template files of one commit into the Hugging Face cache, and checks
    size and hash of each. A model that mycli cannot run is refused before the download. An interrupted download
    resumes. Prints the folder. A model that Ollama or LM Studio has already is not downloaded again, unless --force is
    given.

    With --bits, --method or another option of quantization the model is quantized while it is downloaded: its layers
    come one by one, and only the quantized model is stored, with the bytes that pull and then quantize would give.
    Without such an option nothing is quantized; their defaults apply as soon as one is given.
    """
    if flags != RecipeFlags():
        if dry_run or force or call.offline:
            raise UsageError("quantizing while downloading excludes --dry-run, --force and --offline", "omit them")
        held_out: Report = options.choice("--report", report, ("quick", "full", "none"))
        settings = PlanSettings(held_out, max_ram=max_ram)
        pull_quantized(call, model, flags, QuantizedPull(output, settings, device, overwrite, restart))
        return
    if output is not None or overwrite or restart:
        hint = "add --bits 4, or omit them: downloads are stored in the Hugging Face cache, which HF_HUB_CACHE names"
        raise UsageError("-o, --overwrite and --restart concern a model that is quantized while downloading", hint)
    # Names without an organization are local. What another program downloaded is not downloaded again.
    if call.offline or "/" not in model or (not force and find_stored(model) is not None):
        _show_local(call, model)
        return
    _download(call, model, dry_run, force)


def _download(call: Call, model: str, dry_run: bool, force: bool) -> None:
    with Hub.connect(call.out.note) as hub:
        job = plan_download(hub, model)
        for warning in job.warnings:
            call.out.warn(warning)
        if not force:
            check_supported(hub, job)
            if job.missing:
                check_space(job)
        if dry_run:
            _show(call, job, None)
            return
        try:
            with call.out.progress(f"{job.repo} @ {job.commit[:12]}", job.new_bytes, "B") as bar:
                source = fetch_files(hub, job, force=force, advance=bar.advance)
        except (KeyboardInterrupt, Terminated):
            call.out.note("stopped; run the same command again to resume")
            raise
    code = custom_code_warning(source.folder)
    if code:
        call.out.warn(code)
    new = f"{human_bytes(job.new_bytes)} downloaded and verified" if job.missing else "nothing new"
    files = f"{pluralize(len(job.files), 'file')}, {human_bytes(job.total_bytes)}"
    call.out.note(f"{job.repo} @ {job.commit[:12]}: {files}; {new}")
    _show(call, job, source)
