"""`mycli rm`: delete stored models."""

import shlex
from typing import Annotated

from mycli.cli.command import Call, command
from mycli.cli.flags import options
from mycli.runtime.errors import UsageError
from mycli.runtime.hub.local import plan_removal, remove
from mycli.runtime.utils.units import human_bytes

EXAMPLES = (
    "mycli quantize pico --method rtn --report none && mycli rm pico-rtn-int4-g128 --yes",
    "mycli rm Qwen/Qwen3-0.6B  # needs the model, and asks",
    "mycli rm Qwen/Qwen3-0.6B@main --yes --json  # needs the model",
)


@command
def rm(
    call: Call,
    models: options.Models,
    yes: Annotated[bool, options.flag("-y --yes", "Do not ask.")] = False,
) -> None:
    """Delete stored models.

    Deletes models that were pulled or quantized here; with @revision, only files that no other revision uses. Asks
    first on a terminal; elsewhere --yes is required. Other folders are refused.
    """
    removals = [plan_removal(model) for model in dict.fromkeys(models)]  # before the first deletion: all or none
    names = ", ".join(removal.name for removal in removals)
    if not yes and not call.out.interactive:
        raise UsageError(
            f"cannot ask whether to delete {names}: not a terminal", shlex.join(["mycli", "rm", *models, "--yes"])
        )
    if not yes:
        size = human_bytes(sum(removal.nbytes for removal in removals))
        place = removals[0].folder if len(removals) == 1 else f"{len(removals)} folders"
        if not call.out.ask(f"Delete {names} ({size}) from {place}?"):
            call.out.note("nothing was deleted")
            return
    for removal in removals:
        remove(removal, call.out.note)
    removed = [{"name": removal.name, "folder": str(removal.folder), "bytes": removal.nbytes} for removal in removals]
    if not call.out.answered({"removed": removed}):
        for removal in removals:
            call.out.result(f"removed {removal.name}: {human_bytes(removal.nbytes)}")
