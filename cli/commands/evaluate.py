"""`mycli eval`: the perplexity of a model on a text, and its divergence from another model."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from mycli.cli.command import Call, command
from mycli.cli.flags import options
from mycli.cli.flags.records import KV, LoadFlags
from mycli.cli.load import adapted, announce_build, announce_placement, open_generative
from mycli.cli.output import Column
from mycli.cli.text.format import quality_rows
from mycli.cli.text.progress import stages
from mycli.runtime.checkpoint.model_folder import ModelFolder
from mycli.runtime.engine.config import EngineConfig
from mycli.runtime.errors import ModelError, UsageError
from mycli.runtime.memory.plan import MemoryPlan
from mycli.runtime.utils.units import percent, pluralize

if TYPE_CHECKING:  # torch takes a second to import
    from mycli.quant.evaluate import TokenWindows
    from mycli.runtime.device.placement import Placement

EXAMPLES = [
    "mycli eval pico --tokens 8k",
    "mycli eval pico-draft --ref pico --ctx 256 --tokens 2k",
    "mycli eval pico --kv-sweep --tokens 2k",
    "mycli eval pico --tokens 2k --json",
]

Ref = Annotated[str | None, options.option("--ref", "MODEL", "Also compare with the predictions of this model.")]
Sweep = Annotated[bool, options.flag("--kv-sweep", "Compare the data types of the KV cache.")]
ActivationSweep = Annotated[
    bool, options.flag("--activations-sweep", "Compare activations of 16 and 8 bits, in bf16 on the CPU.")
]
Text = Annotated[
    Path | None, options.option("--text", "FILE", "UTF-8 text to measure on.", show_default="held-out.txt of pico")
]
Window = Annotated[int, options.count("--ctx", "Tokens per window.", show_default="512")]
Tokens = Annotated[int | None, options.count("--tokens", "Stop after this many tokens.", show_default="all")]


def _divergence(field: str, heading: str, style: str = ".2g") -> Column:
    def text(row: dict[str, Any]) -> str | None:
        if row["divergence"] is None:
            return None
        value = row["divergence"][field]
        return format(value["value"] if isinstance(value, dict) else value, style)

    return Column(heading, text, right=True)


def _same_top(row: dict[str, Any]) -> str | None:
    return None if row["divergence"] is None else percent(row["divergence"]["same_top1"]["value"], 2)


_DIVERGENCE_COLUMNS = (
    Column("perplexity", lambda row: f"{row['perplexity']['value']:.3f}", right=True),
    _divergence("kl", "KL mean", ".4g"),
    _divergence("kl_p99", "KL 99%"),
    _divergence("kl_max", "KL max"),
    Column("same top", _same_top, right=True),
)
_SWEEP_COLUMNS = (
    Column("kv", "kv"),
    Column("per token", lambda row: f"{row['bytes_per_token'] / 1024:.2f} KiB", right=True),
    *_DIVERGENCE_COLUMNS,
)
_ACTIVATION_COLUMNS = (Column("activations", "activations"), *_DIVERGENCE_COLUMNS)


def _sweep(call: Call, name: str, folder: ModelFolder, placement: "Placement", text: "TokenWindows") -> None:
    from mycli.quant import evaluate as measuring
    from mycli.quant.layer_streaming import StreamedModel
    from mycli.runtime.cache.kv_cache import PACKED, cache_dtype

    reference = StreamedModel(folder, placement)  # its cache has the dtype of the activations: nothing is lost
    results = []
    for kind in KV:
        dtype = cache_dtype(kind, placement.dtype)
        if kind != "auto" and dtype == placement.dtype:
            continue
        label = kind if dtype == PACKED else str(dtype).removeprefix("torch.")
        plan = MemoryPlan(reference.config, dtype=placement.dtype_name, kv=kind)
        try:
            size = sum(plan.token_bytes(layer) for layer in range(plan.config.layers))
        except ModelError as unsupported:
            call.out.note(f"{label} is skipped: {unsupported.message}")
            continue
        with stages(call.out.result_progress) as progress:
            model = StreamedModel(folder, replace(placement, kv=kind))
            result = measuring.evaluate(model, text, None if kind == "auto" else reference, progress)
        results.append({"kv": label, "bytes_per_token": size, **asdict(result)})
    _show_sweep(call, {"model": name, "sweep": results}, _SWEEP_COLUMNS, results[0]["kv"])


def _sweep_activations(
    call: Call, names: list[str], folders: list[ModelFolder], placement: "Placement", text: "TokenWindows"
) -> None:
    import torch

    from mycli.quant import evaluate as measuring
    from mycli.quant.layer_streaming import StreamedModel

    # The reference is exact: fp32 activations, which no kernel rounds.
    reference = StreamedModel(folders[-1], replace(placement, dtype=torch.float32))
    with stages(call.out.result_progress) as progress:
        models = measuring.activation_models(folders[0], placement)
        if not models:
            raise UsageError(
                f"{names[0]} has no packed weights that CPU kernels multiply in bf16",
                "--activations-sweep compares those",
            )
        measured = measuring.evaluate_each([*models.values()], text, reference, progress)
    results = [{"activations": bits, **asdict(result)} for bits, result in zip(models, measured, strict=True)]
    answer = {"model": names[0], "reference": names[-1], "sweep": results}
    _show_sweep(call, answer, _ACTIVATION_COLUMNS, f"{names[-1]} in float32")


def _show_sweep(call: Call, answer: dict[str, Any], columns: Sequence[Column], against: str) -> None:
    call.out.show(answer, columns, rows="sweep")
    if not call.out.json_mode:
        first = answer["sweep"][0]
        windows = pluralize(first["windows"], "window")
        call.out.note(f"{windows} of {first['context']} tokens, compared with {against}")


def _check_options(engine: EngineConfig, ref: str | None, kv_sweep: bool, activations_sweep: bool) -> None:
    if engine.portable and (kv_sweep or activations_sweep):
        raise UsageError("--portable-bits measures one precision", "omit --kv-sweep and --activations-sweep")
    if activations_sweep and (kv_sweep or engine.activations != "auto"):
        raise UsageError("--activations-sweep excludes --kv-sweep and --activations", "omit them")
    if kv_sweep and (ref is not None or engine.kv != "auto"):
        raise UsageError("--kv-sweep excludes --ref and --kv: it compares the model with itself", "omit --ref and --kv")


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
    activations: options.ActivationKind = "auto",
    activations_sweep: ActivationSweep = False,
    portable_bits: options.PortableBits = False,
    fp8_prompts: options.Fp8Prompts = False,
    adapter: options.AdapterName = None,
) -> None:
    """Measure the perplexity of a model, or compare two models.

    Prints perplexity with its standard error; with --ref also the KL divergence from that model, with --kv-sweep the
    effect of each data type of the KV cache, and with --activations-sweep that of rounding activations to 16 and 8
    bits, which is done in bf16 on a CPU only. --adapter applies to MODEL, not to --ref.

    The text is tokenized once with the default settings of the tokenizer and cut into windows without overlap; the
    incomplete last window is dropped. Layers are read one at a time, so models may be larger than memory; with
    --portable-bits, which needs --dtype bf16, the whole model is loaded.
    """
    from mycli.quant import evaluate as measuring
    from mycli.quant.layer_streaming import StreamedModel
    from mycli.quant.resident_model import ResidentModel

    loading = LoadFlags(device=device, dtype=dtype, kv=kv, activations=activations, portable_bits=portable_bits)
    engine = replace(loading, fp8_prompts=fp8_prompts).resolve()
    _check_options(engine, ref, kv_sweep, activations_sweep)
    content = measuring.held_out_text() if text is None else measuring.read_text(text)
    names = [model] if ref is None else [model, ref]
    opened = [open_generative(call, name) for name in names]
    sources, folders = [source for source, _ in opened], [folder for _, folder in opened]
    folders[0] = adapted(call, folders[0], model, adapter)
    placements = [
        engine.place(folders[0].config),
        *(replace(engine, kv="auto").place(reference.config) for reference in folders[1:]),
    ]
    announce_placement(call, placements[0])
    cuts = [measuring.cut(content, folder.tokenizer(), ctx, tokens) for folder in folders]
    if not cuts[0].windows.equal(cuts[-1].windows):
        raise UsageError(f"{model} and {ref} tokenize the text differently", "compare models that share a tokenizer")
    announce_build(call, placements[0])
    if kv_sweep:
        _sweep(call, sources[0].name, folders[0], placements[0], cuts[0])
        return
    if activations_sweep:
        _sweep_activations(call, [source.name for source in sources], folders, placements[0], cuts[0])
        return
    kind = ResidentModel if portable_bits else StreamedModel
    models = [kind(folder, placement) for folder, placement in zip(folders, placements, strict=True)]
    with stages(call.out.result_progress) as progress:
        result = measuring.evaluate(models[0], cuts[0], models[1] if ref else None, progress)
    if call.out.answered({"model": sources[0].name, "reference": sources[-1].name if ref else None, **asdict(result)}):
        return
    title = sources[0].name + ("" if folders[0].adapter is None else f" with {folders[0].adapter.name}")
    if ref is None:
        call.out.card(title, quality_rows(result))
    else:
        against = sources[-1].name
        call.out.card(f"{title} compared with {against}", quality_rows(result, title, against))
