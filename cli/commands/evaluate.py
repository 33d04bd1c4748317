"""mycli eval: perplexity of a model, and its divergence from another, on a text."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mycli.cli.command import Call, command
from mycli.cli.flags import options
from mycli.cli.flags.records import KV, LoadFlags
from mycli.cli.load import adapted, announce_build, announce_placement
from mycli.cli.text.format import quality
from mycli.cli.text.progress import stages
from mycli.runtime.checkpoint.model_folder import ModelFolder
from mycli.runtime.checkpoint.open_folder import open_model_folder
from mycli.runtime.errors import ModelError, UsageError
from mycli.runtime.hub.resolve import resolve
from mycli.runtime.memory.plan import MemoryPlan
from mycli.runtime.utils.units import pluralize

if TYPE_CHECKING:  # torch takes a second to import
    from mycli.quant.evaluate import TokenWindows
    from mycli.runtime.device.placement import Placement

EXAMPLES = [
    "mycli eval pico --tokens 8k",
    "mycli eval pico-draft --ref pico --ctx 256 --tokens 2k",
    "mycli eval pico --kv-sweep --tokens 2k",
    "mycli eval pico --tokens 2k --json",
]

Ref = Annotated[str | None, typer.Option("--ref", metavar="MODEL", help="Compare with this model's distributions.")]
Sweep = Annotated[bool, typer.Option("--kv-sweep", help="Compare the kinds of cache with the one that loses nothing.")]
Text = Annotated[
    Path | None,
    typer.Option("--text", metavar="FILE", help="UTF-8 text to score.", show_default="held-out.txt of pico"),
]
Window = Annotated[int, options.count_option("--ctx", help="Tokens in a window.", show_default="512")]
Tokens = Annotated[
    int | None, options.count_option("--tokens", help="Stop after this many tokens.", show_default="all")
]


def sweep(call: Call, name: str, folder: ModelFolder, placement: "Placement", text: "TokenWindows") -> None:
    """One line for each kind of cache: its size, and how far replies lie from those of a cache as exact as passes."""
    from mycli.quant import evaluate as measuring
    from mycli.quant.layer_streaming import StreamedModel
    from mycli.runtime.cache.kv_cache import PACKED, cache_dtype

    reference = StreamedModel(folder, placement)
    results, cells = [], []
    for kind in KV:
        dtype = cache_dtype(kind, placement.dtype)
        if kind != "auto" and dtype == placement.dtype:
            continue
        held = kind if dtype == PACKED else str(dtype).removeprefix("torch.")
        plan = MemoryPlan(reference.config, dtype=placement.dtype_name, kv=kind)
        try:
            size = sum(plan.token_bytes(layer) for layer in range(plan.config.layers))
        except ModelError as refused:
            call.out.note(f"{held} is left out: {refused.message}")
            continue
        with stages(call.out.progress) as progress:
            model = StreamedModel(folder, replace(placement, kv=kind))
            result = measuring.evaluate(model, text, None if kind == "auto" else reference, progress)
        results.append({"kv": held, "bytes_per_token": size, **asdict(result)})
        found = result.divergence
        loss = ["", "", "", ""]
        if found:
            loss = [f"{value:.2g}" for value in (found.kl.value, found.kl_p99, found.kl_max)]
            loss.append(f"{found.same_top1.value:.2%}")
        cells.append([held, f"{size / 1024:.2f} KiB", f"{result.perplexity.value:.3f}", *loss])
    if call.out.answered({"model": name, "sweep": results}):
        return
    columns = ("kv", "a token", "perplexity", "KL mean", "KL 99%", "KL max", "same top")
    call.out.table(columns, cells, right=range(1, len(columns)))
    windows = pluralize(results[0]["windows"], "window")
    call.out.note(f"{windows} of {text.windows.shape[1]} tokens, against {results[0]['kv']}")


@command
def evaluate(
    call: Call,
    model: options.Model,
    ref: Ref = None,
    text: Text = None,
    ctx: Window = 512,
    tokens: Tokens = None,
    device: options.Device = "auto",
    threads: options.Threads = None,
    dtype: options.Precision = "fp32",
    kv: options.CacheKind = "auto",
    kv_sweep: Sweep = False,
    adapter: options.AdapterName = None,
) -> None:
    """Score a model on a text, alone or against another.

    Perplexity with its standard error; with --ref also the KL divergence from that model, and with --kv-sweep what each
    kind of cache does to this one. An adapter is added to the model, not to the one of --ref.

    The text is tokenized once as the model's tokenizer does by default, and cut into windows that do not overlap; the
    tail is dropped. The layers are read one at a time, so the models may be larger than memory.
    """
    from mycli.quant import evaluate as measuring
    from mycli.quant.layer_streaming import StreamedModel

    engine = LoadFlags(device=device, dtype=dtype, kv=kv).resolve()
    if kv_sweep and (ref is not None or engine.kv != "auto"):
        raise UsageError("--kv-sweep compares the model with itself", "omit --ref and --kv")
    content = measuring.held_out_text() if text is None else measuring.read_text(text)
    names = [model] if ref is None else [model, ref]
    sources = [resolve(name, offline=call.offline) for name in names]
    folders = [open_model_folder(source.folder) for source in sources]
    folders[0] = adapted(call, folders[0], model, adapter)
    placements = [
        engine.place(folders[0].config),
        *(replace(engine, kv="auto").place(one.config) for one in folders[1:]),
    ]
    announce_placement(call, placements[0])
    cuts = [measuring.cut(content, folder.tokenizer(), ctx, tokens) for folder in folders]
    if not cuts[0].windows.equal(cuts[-1].windows):
        raise UsageError(f"{model} and {ref} tokenize the text differently", "compare models that share a tokenizer")
    announce_build(call, placements[0])
    if kv_sweep:
        sweep(call, sources[0].name, folders[0], placements[0], cuts[0])
        return
    models = [StreamedModel(folder, placement) for folder, placement in zip(folders, placements, strict=True)]
    with stages(call.out.progress) as progress:
        result = measuring.evaluate(models[0], cuts[0], models[1] if ref else None, progress)
    if call.out.answered({"model": sources[0].name, "reference": sources[-1].name if ref else None, **asdict(result)}):
        return
    title = sources[0].name + ("" if folders[0].adapter is None else f" with {folders[0].adapter.name}")
    title += "" if ref is None else f" against {sources[-1].name}"
    call.out.card(title, quality(result))
