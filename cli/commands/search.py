"""`mycli search`: models on the hub by parts of their names, and whether mycli can run them."""

from typing import Annotated, Any

from mycli.cli.command import Call, command
from mycli.cli.flags import options
from mycli.cli.output import Column
from mycli.cli.text.format import compact
from mycli.runtime.errors import NotFoundError
from mycli.runtime.hub.client import Hub, search_models
from mycli.runtime.models.multimodal_types import TEXT_PARTS
from mycli.runtime.models.registry import families

EXAMPLES = (
    "mycli search llama 3.2  # needs the network",
    "mycli search qwen3 --limit 5 --json  # needs the network",
)
MOST_LISTED = 100


def _state(model: dict[str, Any]) -> str:
    if model["model_type"] is None:
        return "family unknown"
    if not model["supported"]:
        return f"{model['model_type']}: not supported"
    return f"{model['model_type']}, requires an account" if model["gated"] else str(model["model_type"])


_COLUMNS = (
    Column("model", "name", priority=1),
    Column(
        "parameters",
        lambda model: None if model["parameters"] is None else compact(model["parameters"]),
        right=True,
        priority=3,
    ),
    Column("downloads", lambda model: compact(model["downloads"]), right=True, priority=4),
    Column("state", _state, priority=2),
)


@command
def search(
    call: Call,
    words: Annotated[list[str], options.argument("WORDS", "Parts of a name.")],
    limit: Annotated[int, options.option("--limit", "N", "Maximum number of models.", min=1, max=MOST_LISTED)] = 15,
) -> None:
    """Search models on the Hugging Face hub.

    Lists models with safetensors files whose names contain all words, most downloads first. The last column shows the
    family, whether mycli supports it, and whether the model requires an account.
    """
    query = " ".join(words)
    if call.offline:
        raise NotFoundError("search needs the network", "omit --offline; mycli list shows the models on this machine")
    with Hub.connect(call.out.note) as hub:
        results = search_models(hub, query, limit)
    supported = {*families(), *TEXT_PARTS}
    models = [
        {**vars(result), "supported": None if result.model_type is None else result.model_type in supported}
        for result in results
    ]
    if not models and not call.out.json_mode:
        call.out.note(f"no model with safetensors files on the hub has a name with: {query}")
        return
    call.out.show({"words": query, "models": models}, _COLUMNS, rows="models")
