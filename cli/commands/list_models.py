"""`mycli list`: the models on this machine."""

from mycli.cli.command import Call, command
from mycli.cli.output import Column
from mycli.runtime.hub.local import local_models
from mycli.runtime.utils.units import human_bytes

EXAMPLES = ("mycli list", "mycli list --json")
_COLUMNS = (
    Column("model", "name"),
    Column("kind", "kind"),
    Column("size", lambda model: human_bytes(model["bytes"]), right=True),
    Column("commit", lambda model: (model["commit"] or "")[:12]),
    Column("folder", lambda model: model["folder"] if model["kind"] in ("ollama", "lm-studio") else ""),
    Column("state", lambda model: model["problem"] or "ready"),
)


@command
def list_models(call: Call) -> None:
    """List the models on this machine.

    Lists the built-in model, models quantized here, models in the Hugging Face cache, and those that Ollama and LM
    Studio downloaded, which are used where they lie. A model that mycli cannot run is listed with the reason.
    """
    models = [
        {
            "name": model.name,
            "kind": model.kind,
            "folder": str(model.folder),
            "commit": model.commit,
            "bytes": model.nbytes,
            "usable": not model.problem,
            "problem": model.problem or None,
        }
        for model in local_models()
    ]
    call.out.show({"models": models}, _COLUMNS, rows="models")
    if any(model["kind"] == "unfinished" for model in models) and not call.out.json_mode:
        call.out.note("(unfinished: repeat the mycli quantize command to continue it, or delete it with mycli rm NAME)")
