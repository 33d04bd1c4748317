"""`mycli verify`: compare every file of a stored model with its recorded size and hash."""

from typing import Annotated

from mycli.cli.command import Call, command
from mycli.cli.flags import options
from mycli.cli.output import Column
from mycli.runtime.errors import GateError
from mycli.runtime.hub.integrity import drop_damaged, files_to_verify, find_local, verify_files
from mycli.runtime.utils.units import pluralize

EXAMPLES = (
    "mycli quantize pico --method rtn --report none && mycli verify pico-rtn-int4-g128",
    "mycli verify pico-rtn-int4-g128 --json",
    "mycli verify Qwen/Qwen3-0.6B --drop && mycli pull Qwen/Qwen3-0.6B  # needs the network",
)
_COLUMNS = (Column("file", "name"), Column("bytes", "bytes", right=True), Column("state", "state"))


@command
def verify(
    call: Call,
    model: options.Model,
    drop: Annotated[
        bool, options.flag("--drop", "Delete damaged files of a hub model, so that pull downloads them again.")
    ] = False,
) -> None:
    """Check the files of a model against their recorded hashes.

    Compares size and hash of every file of a model that was pulled or quantized here. Exits with 6 if a file differs or
    is missing.
    """
    source = find_local(model)
    files = files_to_verify(source)
    with call.out.progress(f"Reading {model}", sum(file.size for file in files.values()), "B") as bar:
        checked = verify_files(source, files, bar.advance)
    bad = [file.name for file in checked if file.state in ("damaged", "missing")]
    dropped = drop_damaged(source, checked) if drop else []
    records = [{"name": file.name, "bytes": file.nbytes, "state": file.state} for file in checked]
    answer = {"model": model, "folder": str(source.folder), "ok": not bad, "files": records, "dropped": dropped}
    call.out.show(answer, _COLUMNS, rows="files")
    if bad:
        again = "quantize it again" if source.repo is None else f"mycli pull {model}"
        if source.repo is not None and not dropped and any(file.state == "damaged" for file in checked):
            again = f"mycli verify {model} --drop && {again}"
        count = f"{len(bad)} of {pluralize(len(checked), 'file')}"
        raise GateError(f"{model}: {count} damaged or missing, the first is {bad[0]}", again)
