"""`mycli search`: models on the hub by words of their name, and which of them run here."""

from typing import Annotated

import typer

from mycli.cli.command import Call, command
from mycli.cli.text.format import compact
from mycli.runtime.errors import NotFoundError
from mycli.runtime.hub.client import Hub, SearchResult, search_models
from mycli.runtime.models.multimodal import TEXT_PARTS
from mycli.runtime.models.registry import families

EXAMPLES = (
    "mycli search llama 3.2  # needs the network",
    "mycli search qwen3 --limit 5 --json  # needs the network",
)
MOST_LISTED = 100


@command
def search(
    call: Call,
    words: Annotated[list[str], typer.Argument(metavar="WORDS", help="Parts of a name.", show_default=False)],
    limit: Annotated[
        int, typer.Option("--limit", metavar="N", min=1, max=MOST_LISTED, help="Most models to list.")
    ] = 15,
) -> None:
    """Find models on the Hugging Face hub.

    Those with safetensors whose name holds the words, the most fetched first. The last column says whether the family
    is one that runs here, and whether its authors ask for an account.
    """
    wanted = " ".join(words)
    if call.offline:
        raise NotFoundError("the hub is not asked under --offline", "mycli list shows the models on this machine")
    with Hub.connect(call.out.note) as hub:
        found = search_models(hub, wanted, limit)
    supported = {*families(), *TEXT_PARTS}
    listed = [
        {**vars(one), "supported": None if one.model_type is None else one.model_type in supported} for one in found
    ]
    if call.out.answered({"words": wanted, "models": listed}):
        return
    if not found:
        call.out.note(f"the hub has no model with safetensors whose name holds: {wanted}")
        return
    rows = [
        (
            one.name,
            "" if one.parameters is None else compact(one.parameters),
            compact(one.downloads),
            _say(one, supported),
        )
        for one in found
    ]
    call.out.table(("model", "parameters", "downloads", "state"), rows, right=(1, 2), order=(0, 3, 1, 2))


def _say(one: SearchResult, supported: set[str]) -> str:
    if one.model_type is None:
        return "family unknown"
    kind = one.model_type if one.model_type in supported else f"{one.model_type}: does not run here"
    return f"{kind}, requires an account" if one.gated else kind
