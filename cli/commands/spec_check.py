"""`mycli spec check`: whether one model can draft for another."""

from mycli.cli.command import Call, command
from mycli.cli.flags import options
from mycli.cli.output import Column
from mycli.runtime.hub.resolve import resolve
from mycli.runtime.tokenizer.compatibility import check_vocabularies

EXAMPLES = (
    "mycli spec check pico pico-draft",
    "mycli spec check org/model-8b org/model-1b  # needs the models",
)


def _head_rows(sizes: list[int]) -> str:
    padding = "" if sizes[0] == sizes[1] else "; the heads are padded to different sizes, which is allowed"
    return f"{sizes[0]:,} and {sizes[1]:,}{padding}"


_COLUMNS = (
    Column("vocabulary", lambda answer: f"the same {answer['tokens']:,} tokens, byte for byte"),
    Column("head rows", lambda answer: _head_rows(answer["rows"])),
    Column("end tokens", lambda answer: "different; the target's are used" if answer["ends_differ"] else "the same"),
)


@command
def spec_check(call: Call, model: options.Model, draft: options.DraftName) -> None:
    """Check that a draft has the vocabulary of its target.

    Exits with 3 and the first different ids unless every id is the same token in both models. Rows that only pad the
    output head are ignored. No weights are read.
    """
    sources = [resolve(name, offline=call.offline) for name in (model, draft)]
    folders = [source.open() for source in sources]
    sizes = [folder.config.vocab_size for folder in folders]
    shared = check_vocabularies(folders[0].tokenizer(), folders[1].tokenizer())
    answer = {"tokens": shared.tokens, "rows": sizes, "different": 0, "ends_differ": shared.eos_differs}
    call.out.show(answer, _COLUMNS, title=f"{sources[1].name} can draft for {sources[0].name}")
