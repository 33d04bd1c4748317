"""mycli eval: perplexity of a model, and its divergence from another, on a text."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from mycli.cli import options
from mycli.cli.command import Call, command
from mycli.cli.loading import parse_dtype
from mycli.cli.measures import rows
from mycli.cli.stages import stages

EXAMPLES = [
    "mycli eval pico --tokens 8k",
    "mycli eval pico-draft --ref pico --ctx 256 --tokens 2k",
    "mycli eval pico --tokens 2k --json",
]

Ref = Annotated[str | None, typer.Option("--ref", metavar="MODEL", help="Compare with this model's distributions.")]
Text = Annotated[Path | None, typer.Option("--text", help="UTF-8 text to score.", show_default="held-out.txt of pico")]
Context = Annotated[
    int, typer.Option("--ctx", parser=options.parse_count, metavar="N", help="Tokens in a window.", show_default="512")
]
Tokens = Annotated[
    int | None,
    typer.Option("--tokens", parser=options.parse_count, metavar="N", help="Stop after so many.", show_default="all"),
]


@command
def evaluate(
    call: Call,
    model: options.Model,
    ref: Ref = None,
    text: Text = None,
    ctx: Context = 512,
    tokens: Tokens = None,
    device: options.Device = "auto",
    dtype: options.Dtype = "fp32",
) -> None:
    """Score a model on a text, alone or against another.

    Perplexity with its standard error; with --ref also the KL divergence from that model.

    The text is tokenized once as the model's tokenizer does by default, and cut into windows that do not overlap; the
    tail is dropped. The layers are read one at a time, so the models may be larger than memory.
    """
    from mycli.quant import evaluate as measuring
    from mycli.quant.streaming import StreamedModel
    from mycli.runtime.device import place
    from mycli.runtime.errors import UsageError
    from mycli.runtime.hub import resolve
    from mycli.runtime.packing import describe
    from mycli.runtime.tokenizer import Tokenizer

    content = measuring.held_out_text() if text is None else measuring.read_text(text)
    names = [model] if ref is None else [model, ref]
    sources = [resolve(name, offline=call.offline) for name in names]
    configs = [describe(source.folder)[0] for source in sources]
    placements = [place(config, device, parse_dtype(dtype)) for config in configs]
    for note in placements[0].notes:
        call.out.note(note)
    cuts = [
        measuring.cut(content, Tokenizer.load(source.folder, config.vocab_size), ctx, tokens)
        for source, config in zip(sources, configs, strict=True)
    ]
    if not cuts[0].windows.equal(cuts[-1].windows):
        raise UsageError(f"{model} and {ref} tokenize the text differently", "compare models of one tokenizer")
    models = [StreamedModel(source.folder, placement) for source, placement in zip(sources, placements, strict=True)]
    with stages(call.out) as progress:
        result = measuring.evaluate(models[0], cuts[0], models[1] if ref else None, progress)
    if call.out.json_mode:
        call.out.json({"model": sources[0].name, "reference": sources[-1].name if ref else None, **asdict(result)})
        return
    title = sources[0].name if ref is None else f"{sources[0].name} against {sources[-1].name}"
    call.out.card(title, rows(result))
