"""`mycli rm`: delete stored models."""

import shlex
from typing import Annotated

import typer

from mycli.cli.command import Call, command
from mycli.cli.flags import options
from mycli.runtime.errors import UsageError
from mycli.runtime.hub.local import plan_removal, remove
from mycli.runtime.utils.units import human_bytes

EXAMPLES = (
    "mycli quantize pico --method rtn --report none && mycli rm pico-rtn-int4-g128 --yes",
    "mycli rm Qwen/Qwen3-0.6B  # needs the network, and asks",
    "mycli rm Qwen/Qwen3-0.6B@main --yes --json  # needs the network",
)


@command
def rm(
    call: Call,
    models: options.Models,
    yes: Annotated[bool, typer.Option("-y", "--yes", help="Do not ask.")] = False,
) -> None:
    """Delete stored models.

    Those that were pulled or quantized here; with @revision only what no other revision uses. On a terminal it asks
    first, elsewhere it wants --yes. Folders that mycli did not store are left alone.
    """
    removals = [plan_removal(model) for model in dict.fromkeys(models)]  # all or none, where one is not there
    names = ", ".join(removal.name for removal in removals)
    if not yes and not call.out.interactive:
        again = shlex.join(["mycli", "rm", *models, "--yes"])
        raise UsageError(f"not a terminal, so cannot ask whether to delete {names}", again)
    if not yes:
        where = removals[0].folder if len(removals) == 1 else f"{len(removals)} folders"
        if not call.out.ask(f"Delete {names} ({human_bytes(sum(one.nbytes for one in removals))}) from {where}?"):
            call.out.note("nothing was deleted")
            return
    for removal in removals:
        remove(removal, call.out.note)
    removed = [{"name": one.name, "folder": str(one.folder), "bytes": one.nbytes} for one in removals]
    if call.out.answered({"removed": removed}):
        return
    for removal in removals:
        call.out.result(f"removed {removal.name}: {human_bytes(removal.nbytes)}")
