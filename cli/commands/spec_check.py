"""`mycli spec check`: can one model draft for another?"""

from mycli.cli.command import Call, command
from mycli.cli.flags import options
from mycli.runtime.checkpoint.open_folder import open_model_folder
from mycli.runtime.hub.resolve import resolve
from mycli.runtime.tokenizer.compatibility import check_vocabularies

EXAMPLES = (
    "mycli spec check pico pico-draft",
    "mycli spec check org/model-8b org/model-1b  # needs the network",
)


@command
def spec_check(call: Call, model: options.Model, draft: options.DraftName) -> None:
    """Say whether one model can draft for another.

    Exits with 3 and the first ids that differ unless every id is the same token in both. Rows that only pad a head
    count for nothing. No weights are read.
    """
    sources = [resolve(name, offline=call.offline) for name in (model, draft)]
    folders = [open_model_folder(source.folder) for source in sources]
    sizes = [folder.config.vocab_size for folder in folders]
    found = check_vocabularies(folders[0].tokenizer(), folders[1].tokenizer())
    if call.out.answered({"tokens": found.tokens, "rows": sizes, "different": 0, "eos_differs": found.eos_differs}):
        return
    padded = "" if sizes[0] == sizes[1] else "; the heads are padded differently, which does not matter"
    ends = "different; the target's are used" if found.eos_differs else "the same"
    rows = [
        ("vocabulary", f"the same {found.tokens:,} tokens, byte for byte"),
        ("head rows", f"{sizes[0]:,} and {sizes[1]:,}{padded}"),
        ("end tokens", ends),
    ]
    call.out.card(f"{sources[1].name} can draft for {sources[0].name}", rows)
