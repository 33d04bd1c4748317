"""`mycli show`: what a model is, from its configuration and headers, without loading or downloading it."""

import shlex
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import typer

from mycli.cli.command import Call, command
from mycli.cli.flags import options
from mycli.cli.plot import LayerError, require_svg, write_errors
from mycli.cli.text.format import active
from mycli.runtime.errors import NotFoundError, UsageError
from mycli.runtime.hub.client import Hub
from mycli.runtime.hub.model_info import ModelInfo, fetch_model_info, read_model_info
from mycli.runtime.hub.names import is_hub_name
from mycli.runtime.hub.resolve import resolve
from mycli.runtime.models.config import ModelConfig
from mycli.runtime.models.experts_spec import ExpertsSpec
from mycli.runtime.utils.json_fields import Fields
from mycli.runtime.utils.units import human_bytes

EXAMPLES = (
    "mycli show pico",
    "mycli show pico --template",
    "mycli show pico --tensors",
    "mycli show pico --json",
    "mycli show Qwen/Qwen3-0.6B  # needs the network",
)


def _find(call: Call, model: str) -> ModelInfo:
    try:
        return read_model_info(resolve(model, offline=call.offline))
    except NotFoundError:
        if call.offline or not is_hub_name(model):
            raise
    with Hub.connect(call.out.note) as hub:
        return fetch_model_info(hub, model)


def _defaults(info: ModelInfo) -> dict[str, Any]:
    named = ("do_sample", "temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    return {name: value for name in named if (value := getattr(info.defaults, name)) is not None}


def _section(record: Fields | None, key: str) -> Any:
    return None if record is None else record.values.get(key)


def _answer(info: ModelInfo) -> dict[str, Any]:
    config = info.config
    return {
        "model": info.source.name,
        "repo": info.source.repo,
        "commit": info.source.revision,
        "folder": None if info.remote else str(info.source.folder),
        "architecture": config.model_type,
        "layers": config.layers,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "heads": config.heads,
        "kv_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "context": config.max_context,
        "sliding_windows": sorted({window for window in config.windows if window is not None}),
        "rope": {"kind": config.rope_scaling.kind, "factor": config.rope_scaling.factor, "theta": config.rope_theta},
        "tied_head": config.tie_embeddings,
        "parameters": config.parameters(),
        "active_parameters": config.active_parameters(),
        "bytes": info.nbytes,
        "bits_per_weight": round(info.bits_per_weight, 4),
        "predictor_bytes": info.predictor_bytes,
        "dtype": config.dtype,
        "scheme": info.scheme,
        "quantized_linears": len(info.packings),
        "eos": list(info.eos),
        "sampling": _defaults(info),
        "chat_template": info.template is not None,
        "recipe": _section(info.record, "recipe"),
        "source": _section(info.record, "source"),
        "card": _section(info.record, "card"),
    }


def _origin(info: ModelInfo) -> str:
    if info.record is None:
        return f"{info.source.repo} @ {info.source.revision}" if info.source.repo else "unknown"
    source = info.record.object("source")
    revision = f" @ {source.text('revision')}" if source.has("revision") else ""
    scheme = f" ({source.text('scheme')})" if source.has("scheme") else ""
    adapter = f" with the adapter {source.text('adapter')}" if source.has("adapter") else ""
    return f"quantized from {source.text('name', 'an unknown model')}{revision}{scheme}{adapter}"


def _card(info: ModelInfo) -> list[tuple[str, str]]:
    if info.record is None or not info.record.has("card"):
        return []
    card = info.record.object("card")
    after = card.object("perplexity").number("value")
    if not card.has("divergence"):
        return [("perplexity", f"{after:.4f}")]
    found = card.object("divergence")
    before = found.object("reference_perplexity").number("value")
    kl, p99 = found.object("kl").number("value", low=-1e-3), found.number("kl_p99", low=-1e-3)
    return [
        ("perplexity", f"{before:.4f} before, {after:.4f} after"),
        ("KL", f"mean {kl:.4g}, 99 % below {p99:.4g}"),
        ("same top token", f"{found.object('same_top1').number('value'):.2%}"),
    ]


def _heads(config: ModelConfig) -> str:
    """Of all layers, or of each kind with the number of its layers."""
    kinds = Counter((spec.heads, spec.kv_heads, spec.head_dim) for spec in config.attentions)
    said = [(f"{heads} of {size}, {kv} for keys and values", count) for (heads, kv, size), count in kinds.items()]
    lent = sum(spec.kv_source is not None for spec in config.attentions)
    rest = f"; {lent} of {config.layers} layers read those of another" if lent else ""
    if config.has_recurrent:
        states = config.layers - len(config.attentions)
        rest += f"; {states} of {config.layers} layers keep a state instead"
    if len(said) == 1 and not config.has_recurrent:
        return said[0][0] + rest
    return "; ".join(f"{text} in {count} of {config.layers} layers" for text, count in said) + rest


def _mlp(config: ModelConfig) -> str:
    """The MLP of a layer, or its experts where it has some."""
    mixtures = [spec.mlp for spec in config.layer_specs if isinstance(spec.mlp, ExpertsSpec)]
    if not mixtures:
        return f"MLP {config.intermediate_size}"
    first = mixtures[0]
    where = "" if len(mixtures) == config.layers else f" in {len(mixtures)} of them"
    return f"{len(first.experts)} experts of {first.size}{where}, {first.top_k} for a token"


def _predictor(info: ModelInfo) -> list[tuple[str, str]]:
    if not info.predictor_bytes:
        return []
    return [("draft", f"a head that predicts further tokens, {human_bytes(info.predictor_bytes)} (--draft mtp)")]


def _rows(info: ModelInfo) -> list[tuple[str, str]]:
    config = info.config
    windows = sorted({window for window in config.windows if window is not None})
    plain = config.rope_scaling.kind in ("default", "proportional")
    rope = "" if plain else f", {config.rope_scaling.kind} rope x {config.rope_scaling.factor:g}"
    sliding = f", sliding window {windows[0]}" if windows else ""
    foreign = "".join(f", {layout}" for layout in info.foreign_layouts)
    quantized = f"{foreign}, {len(info.packings)} linears" if info.packings else ""
    return [
        ("architecture", config.model_type),
        ("layers", f"{config.layers} of width {config.hidden_size}, {_mlp(config)}"),
        ("heads", _heads(config)),
        ("context", f"{config.max_context} tokens{rope}{sliding}"),
        ("vocabulary", f"{config.vocab_size}, head {'tied' if config.tie_embeddings else 'of its own'}"),
        ("parameters", f"{config.parameters():,}{active(config)}"),
        (
            "weights",
            f"{human_bytes(info.nbytes)}, {info.bits_per_weight:.2f} bits per weight ({info.scheme}{quantized})",
        ),
        *_predictor(info),
        ("end tokens", ", ".join(map(str, info.eos)) or "none"),
        ("sampling", ", ".join(f"{name} {value}" for name, value in _defaults(info).items()) or "none"),
        ("chat template", "yes (--template shows it)" if info.template else "no"),
        ("origin", _origin(info)),
        *_card(info),
        *([] if info.remote else [("file" if info.source.folder.is_file() else "folder", str(info.source.folder))]),
    ]


def _show_tensors(call: Call, info: ModelInfo) -> None:
    entries = info.tensors.values()
    listed = [{"name": e.name, "dtype": e.dtype, "shape": e.shape, "bytes": e.nbytes, "file": e.file} for e in entries]
    if call.out.answered({"model": info.source.name, "tensors": listed}):
        return
    rows = [(e.name, e.dtype, " x ".join(map(str, e.shape)), str(e.nbytes), e.file) for e in entries]
    call.out.table(("tensor", "dtype", "shape", "bytes", "file"), rows, right=(3,))


def _show_template(call: Call, info: ModelInfo) -> None:
    if info.template is None:
        raise UsageError(
            f"{info.source.name} has no chat template",
            f"continue a text: mycli run {shlex.quote(info.source.name)} PROMPT --raw",
        )
    if call.out.answered({"model": info.source.name, "template": info.template}):
        return
    call.out.result(info.template)


def _show_recipe(call: Call, info: ModelInfo) -> None:
    if info.record is None:
        raise UsageError(
            f"{info.source.name} was not quantized by mycli", "mycli show without --recipe says what it is"
        )
    record = {key: _section(info.record, key) for key in ("recipe", "source", "versions")}
    calibration = info.record.object("calibration").values
    # Where it was left to the program, the recipe holds null: what was then taken is what a person wants to know.
    record["recipe"] = {**(record["recipe"] or {}), **({"seq": calibration["seq"]} if "seq" in calibration else {})}
    if call.out.answered({"model": info.source.name, **record}):
        return
    rows = [
        (f"{key} {name}", str(value))
        for key, part in record.items()
        for name, value in (part or {}).items()
        if name != "files" and value is not None
    ]
    call.out.card(info.source.name, rows)


def _plot(info: ModelInfo, path: Path) -> None:
    require_svg(path)
    points = []
    for index, values in enumerate(info.record.array("layers", dict) if info.record is not None else ()):
        layer = Fields(values, f"mycli.json: layers {index}")
        rounding = layer.number("rounding_output_error") if layer.has("rounding_output_error") else None
        error = layer.number("output_error" if layer.has("output_error") else "error")
        points.append(LayerError(layer.text("name"), error, rounding))
    write_errors(path, info.source.name, points)


@command
def show(
    call: Call,
    model: options.Model,
    template: Annotated[bool, typer.Option("--template", help="Print the chat template.")] = False,
    tensors: Annotated[bool, typer.Option("--tensors", help="List the tensors with dtype, shape and file.")] = False,
    recipe: Annotated[bool, typer.Option("--recipe", help="Print how the model was quantized.")] = False,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE.svg", help="Draw the error of each quantized layer.")
    ] = None,
) -> None:
    """Say what a model is, without loading it.

    Shape, size, bits per weight, end tokens, sampling defaults, origin and quality card. A model of the hub that is not
    here is looked at through its small files and the headers of its weights.
    """
    if template + tensors + recipe > 1:
        raise UsageError("--template, --tensors and --recipe each print something of their own", "give one of them")
    info = _find(call, model)
    for warning in info.warnings:
        call.out.warn(warning)
    if plot is not None:
        _plot(info, plot)
    if template:
        _show_template(call, info)
    elif tensors:
        _show_tensors(call, info)
    elif recipe:
        _show_recipe(call, info)
    elif call.out.json_mode:
        call.out.json(_answer(info))
    else:
        call.out.card(info.source.name, _rows(info))
