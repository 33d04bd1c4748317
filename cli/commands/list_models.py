"""`mycli list`: the models on this machine."""

from mycli.cli.command import Call, command
from mycli.runtime.hub.local import local_models
from mycli.runtime.utils.units import human_bytes

EXAMPLES = ("mycli list", "mycli list --json")


@command
def list_models(call: Call) -> None:
    """List the models on this machine.

    Built in, quantized here, and in the Hugging Face cache. What other tools left in that cache is shown too; the last
    column says what cannot be used and why.
    """
    models = local_models()
    answer = {
        "models": [
            {
                "name": model.name,
                "kind": model.kind,
                "folder": str(model.folder),
                "commit": model.commit,
                "bytes": model.nbytes,
                "usable": not model.problem,
                "problem": model.problem or None,
            }
            for model in models
        ]
    }
    if call.out.answered(answer):
        return
    rows = [
        (model.name, model.kind, human_bytes(model.nbytes), (model.commit or "")[:12], model.problem or "ready")
        for model in models
    ]
    call.out.table(("model", "kind", "size", "commit", "state"), rows, right=(2,))
