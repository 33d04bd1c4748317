"""`mycli pull`: bring a model from the hub into the Hugging Face cache, verified and resumable."""

from typing import Annotated, Any

import typer

from mycli.cli.command import Call, command
from mycli.cli.flags import options
from mycli.runtime.hub.client import Hub
from mycli.runtime.hub.download import DownloadPlan, check_space, fetch_files, plan_download
from mycli.runtime.hub.model_info import check_supported
from mycli.runtime.hub.resolve import Source, custom_code_warning, resolve
from mycli.runtime.utils.units import human_bytes, pluralize

EXAMPLES = (
    "mycli pull HuggingFaceTB/SmolLM2-135M-Instruct  # needs the network",
    "mycli pull Qwen/Qwen3-0.6B --dry-run  # needs the network",
    "mycli pull Qwen/Qwen3-0.6B@main --json  # needs the network",
)


def _answer(job: DownloadPlan, source: Source | None) -> dict[str, Any]:
    missing = {file.name for file in job.missing}
    return {
        "model": job.model,
        "repo": job.repo,
        "commit": job.commit,
        "folder": None if source is None else str(source.folder),
        "bytes": job.total_bytes,
        "new_bytes": job.new_bytes,
        "files": [{"name": f.name, "bytes": f.size, "cached": f.name not in missing} for f in job.files],
    }


def _show(call: Call, job: DownloadPlan, source: Source | None) -> None:
    if call.out.answered(_answer(job, source)):
        return
    if source is not None:
        call.out.result(str(source.folder))
        return
    answer = _answer(job, source)
    rows = [(f["name"], str(f["bytes"]), "cached" if f["cached"] else "new") for f in answer["files"]]
    call.out.table(("file", "bytes", "state"), rows, right=(1,))
    cached = job.total_bytes - job.new_bytes
    call.out.result(f"new: {human_bytes(job.new_bytes)}, cached: {human_bytes(cached)}")


def _show_present(call: Call, model: str) -> None:
    source = resolve(model, offline=call.offline)
    if call.out.answered(
        {"model": model, "repo": source.repo, "commit": source.revision, "folder": str(source.folder)}
    ):
        return
    call.out.note(f"{model} is complete on this machine; the hub was not asked")
    call.out.result(str(source.folder))


@command
def pull(
    call: Call,
    model: options.Model,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be fetched, and fetch nothing.")] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Fetch even if the disk seems too small, or the model cannot run here.")
    ] = False,
) -> None:
    """Fetch a model from the Hugging Face hub.

    Takes safetensors, JSON, tokenizer and template files of one commit, each checked by size and hash.
    A model that cannot run here is refused before anything is fetched. What was interrupted goes on from where it
    stopped. Prints the folder, which other tools find in their cache too.
    """
    if call.offline or "/" not in model:  # names without an organization are of this machine only
        _show_present(call, model)
        return
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
        except KeyboardInterrupt:
            call.out.note("stopped; the same command continues from here")
            raise
    code = custom_code_warning(source.folder)
    if code:
        call.out.warn(code)
    fetched = f"{human_bytes(job.new_bytes)} fetched and verified" if job.missing else "nothing new"
    files = f"{pluralize(len(job.files), 'file')}, {human_bytes(job.total_bytes)}"
    call.out.note(f"{job.repo} @ {job.commit[:12]}: {files}; {fetched}")
    _show(call, job, source)
