"""`mycli rm`: delete a stored model."""

from typing import Annotated

import typer

from mycli.cli import options
from mycli.cli.command import Call, command
from mycli.runtime.errors import UsageError
from mycli.runtime.hub.local import plan_removal, remove
from mycli.runtime.utils.units import gib

EXAMPLES = (
    "mycli quantize pico --method rtn --report none && mycli rm pico-rtn-int4-g128 --yes",
    "mycli rm Qwen/Qwen3-0.6B  # needs the network, and asks",
    "mycli rm Qwen/Qwen3-0.6B@main --yes --json  # needs the network",
)


@command
def rm(
    call: Call, model: options.Model, yes: Annotated[bool, typer.Option("-y", "--yes", help="Do not ask.")] = False
) -> None:
    """Delete a stored model.

    One that was pulled or quantized here; with @revision only what no other revision uses. On a terminal it asks
    first, elsewhere it wants --yes. Folders that mycli did not store are left alone.
    """
    removal = plan_removal(model)
    if not yes and not call.out.interactive:
        raise UsageError(f"nobody can be asked whether to delete {removal.name}", f"mycli rm {model} --yes")
    if not yes and not call.out.ask(f"Delete {removal.name} ({gib(removal.nbytes)}) from {removal.folder}?"):
        call.out.note("nothing was deleted")
        return
    remove(removal, call.out.note)
    if call.out.answered({"removed": removal.name, "folder": str(removal.folder), "bytes": removal.nbytes}):
        return
    call.out.result(f"removed {removal.name}: {gib(removal.nbytes)}")
