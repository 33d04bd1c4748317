"""`mycli show`: what a model is, from its configuration and file headers, without loading or downloading it."""

import math
import shlex
import sys
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

from mycli.cli.command import Call, command
from mycli.cli.flags import options
from mycli.cli.output import Column
from mycli.cli.reports.plot import LayerError, require_svg, write_errors
from mycli.cli.text.format import activation_rows, active_parameters, call_rows, file_activation_rows, head_rows
from mycli.quant.calls.record import read_call_quality
from mycli.runtime.errors import NotFoundError, UsageError
from mycli.runtime.hub.activation_record import recorded_kl
from mycli.runtime.hub.client import Hub
from mycli.runtime.hub.model_info import ModelInfo, fetch_model_info, read_model_info
from mycli.runtime.hub.names import is_hub_name
from mycli.runtime.hub.resolve import resolve
from mycli.runtime.models.config import ModelConfig
from mycli.runtime.models.experts_spec import ExpertsSpec
from mycli.runtime.quantization.activations import read_activation_kl
from mycli.runtime.quantization.head import read_head_kl
from mycli.runtime.utils.json_fields import Fields
from mycli.runtime.utils.units import human_bytes, percent

EXAMPLES = (
    "mycli show pico",
    "mycli show pico --template",
    "mycli show pico --tensors",
    "mycli show pico --json",
    "mycli show Qwen/Qwen3-0.6B  # needs the network",
)
SAMPLING = ("do_sample", "temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_TENSOR_COLUMNS = (
    Column("tensor", "name"),
    Column("dtype", "dtype"),
    Column("shape", lambda tensor: " x ".join(map(str, tensor["shape"]))),
    Column("bytes", "bytes", right=True),
    Column("file", "file"),
)


def _find(call: Call, model: str) -> ModelInfo:
    try:
        return read_model_info(resolve(model, offline=call.offline))
    except NotFoundError:
        if call.offline or not is_hub_name(model):
            raise
    with Hub.connect(call.out.note) as hub:
        return fetch_model_info(hub, model)


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
        "task": _kind(info),
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
        "sampling": {name: value for name in SAMPLING if (value := getattr(info.defaults, name)) is not None},
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


def _perplexity(mean: Fields) -> float:
    # That of a collapsed model may be beyond every number; JSON then has null.
    return mean.number("value", math.inf, high=sys.float_info.max)


def _quality(info: ModelInfo) -> list[tuple[str, str]]:
    if info.record is None or not info.record.has("card"):
        return []
    card = info.record.object("card")
    after = _perplexity(card.object("perplexity"))
    if not card.has("divergence"):
        return [("perplexity", f"{after:.4f}")]
    divergence = card.object("divergence")
    before = _perplexity(divergence.object("reference_perplexity"))
    kl, p99 = divergence.object("kl").number("value", low=-1e-3), divergence.number("kl_p99", low=-1e-3)
    return [
        ("perplexity", f"{before:.4f} before, {after:.4f} after"),
        ("KL", f"mean {kl:.4g}, 99% below {p99:.4g}"),
        ("same top token", percent(divergence.object("same_top1").number("value"), 2)),
        *call_rows(read_call_quality(info.record)),
        *head_rows(read_head_kl(info.record)),
        *activation_rows(read_activation_kl(info.record)),
    ]


def _heads(config: ModelConfig) -> str:
    kinds = Counter((spec.heads, spec.kv_heads, spec.head_dim) for spec in config.attentions)
    texts = [
        f"{heads} of {size}, {kv} for keys and values" + ("" if count == config.layers else _in_layers(config, count))
        for (heads, kv, size), count in kinds.items()
    ]
    if shared := sum(spec.kv_source is not None for spec in config.attentions):
        texts.append(f"{shared} of {config.layers} layers share the KV cache of another")
    if recurrent := sum(spec.recurrent is not None for spec in config.layer_specs):
        texts.append(f"{recurrent} of {config.layers} layers are recurrent")
    return "; ".join(texts)


def _in_layers(config: ModelConfig, count: int) -> str:
    return f" in {count} of {config.layers} layers"


def _mlp(config: ModelConfig) -> str:
    mixtures = [spec.mlp for spec in config.layer_specs if isinstance(spec.mlp, ExpertsSpec)]
    if all(spec.mlp is None for spec in config.layer_specs):
        return "no MLP"
    if not mixtures:
        return f"MLP {config.intermediate_size}"
    experts = mixtures[0]
    where = "" if len(mixtures) == config.layers else _in_layers(config, len(mixtures))
    return f"{len(experts.experts)} experts of {experts.size}{where}, {experts.top_k} per token"


def _task(info: ModelInfo) -> str:
    config, embedding = info.config, info.embedding
    if embedding is not None:
        normalized = ", normalized" if embedding.normalize else ""
        pooling = " and ".join(embedding.pooling)
        return f"embeddings of {embedding.size(config.hidden_size)} values, {pooling} pooling{normalized} (mycli embed)"
    if info.cross_encoder is not None:
        sigmoid = info.cross_encoder.activation == "Sigmoid"
        scores = "0 to 1 (sigmoid)" if sigmoid else f"the head's output ({info.cross_encoder.activation})"
        return f"reranker; score of a pair of texts: {scores}; POST /v1/rerank of mycli serve"
    if info.score is not None:
        return 'reranker; score of a pair of texts: probability of "yes" against "no"; POST /v1/rerank of mycli serve'
    if config.classifier is not None:
        return "reranker; POST /v1/rerank of mycli serve"
    return "embeddings; its folder does not say how they are computed" if config.bidirectional else ""


def _kind(info: ModelInfo) -> str:
    if info.cross_encoder is not None or info.score is not None or info.config.classifier is not None:
        return "reranker"
    return "embedding" if info.embedding is not None or info.config.bidirectional else "generative"


def _rows(info: ModelInfo, answer: dict[str, Any]) -> list[tuple[str, str]]:
    config, file = info.config, info.source.folder
    plain = config.rope_scaling.kind in ("default", "proportional")
    rope = "" if plain else f", {config.rope_scaling.kind} rope x {config.rope_scaling.factor:g}"
    sliding = "".join(f", sliding window {window}" for window in answer["sliding_windows"][:1])
    foreign = "".join(f", {layout}" for layout in info.foreign_layouts)
    quantized = f"{foreign}, {len(info.packings)} linears" if info.packings else ""
    mtp = f"MTP head, {human_bytes(info.predictor_bytes)} (--draft mtp)" if info.predictor_bytes else ""
    rows = [
        ("architecture", config.model_type),
        ("task", _task(info)),
        *([("adapter", str(info.source.adapter))] if info.source.adapter is not None else []),
        ("layers", f"{config.layers} of width {config.hidden_size}, {_mlp(config)}"),
        ("heads", _heads(config)),
        ("context", f"{config.max_context} tokens{rope}{sliding}"),
        ("vocabulary", f"{config.vocab_size} tokens, head {'tied' if config.tie_embeddings else 'not tied'}"),
        ("parameters", f"{config.parameters():,}{active_parameters(config)}"),
        (
            "weights",
            f"{human_bytes(info.nbytes)}, {info.bits_per_weight:.2f} bits per weight ({info.scheme}{quantized})",
        ),
        ("draft", mtp),
        ("end tokens", ", ".join(map(str, info.eos)) or "none"),
        ("sampling", ", ".join(f"{name} {value}" for name, value in answer["sampling"].items()) or "none"),
        ("chat template", "yes (--template prints it)" if info.template else "no"),
        ("origin", _origin(info)),
        *_quality(info),
        *(file_activation_rows(recorded_kl(file)) if file.is_file() and info.packings else []),
        ("file" if file.is_file() else "folder", "" if info.remote else str(file)),
    ]
    return [(name, text) for name, text in rows if text]


def _show_tensors(call: Call, info: ModelInfo) -> None:
    tensors = [
        {"name": entry.name, "dtype": entry.dtype, "shape": entry.shape, "bytes": entry.nbytes, "file": entry.file}
        for entry in info.tensors.values()
    ]
    call.out.show({"model": info.source.name, "tensors": tensors}, _TENSOR_COLUMNS, rows="tensors")


def _show_template(call: Call, info: ModelInfo) -> None:
    if info.template is None:
        name = info.source.name
        hint = f"continue a text: mycli run {shlex.quote(name)} PROMPT --raw"
        raise UsageError(f"{name} has no chat template", "omit --template" if info.config.bidirectional else hint)
    if not call.out.answered({"model": info.source.name, "template": info.template}):
        call.out.result(info.template)


def _show_recipe(call: Call, info: ModelInfo) -> None:
    if info.record is None:
        raise UsageError(f"{info.source.name} was not quantized by mycli, so it has no recipe", "omit --recipe")
    record = {key: _section(info.record, key) for key in ("recipe", "source", "versions")}
    calibration = info.record.object("calibration").values
    # The recipe holds null where the program chose the value: show the value that was used.
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
    errors = []
    for index, values in enumerate(info.record.array("layers", dict) if info.record is not None else ()):
        layer = Fields(values, f"mycli.json: layers {index}")
        rounding = layer.number("rounding_output_error") if layer.has("rounding_output_error") else None
        error = layer.number("output_error" if layer.has("output_error") else "error")
        errors.append(LayerError(layer.text("name"), error, rounding))
    write_errors(path, info.source.name, errors)


@command
def show(
    call: Call,
    model: options.Model,
    template: Annotated[bool, options.flag("--template", "Print the chat template.")] = False,
    tensors: Annotated[bool, options.flag("--tensors", "List the tensors with dtype, shape and file.")] = False,
    recipe: Annotated[bool, options.flag("--recipe", "Print how the model was quantized.")] = False,
    plot: Annotated[
        Path | None, options.option("--plot", "FILE.svg", "Draw the error of each quantized layer.")
    ] = None,
) -> None:
    """Show what a model is, without loading it.

    Prints architecture, size, bits per weight, end tokens, sampling defaults, origin and, for a model quantized here,
    its quality. For a model that is only on the hub, mycli reads the small files and the headers of the weights.
    """
    if template + tensors + recipe > 1:
        raise UsageError("--template, --tensors and --recipe exclude each other", "use one of the three")
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
    else:
        answer = _answer(info)
        if not call.out.answered(answer):
            call.out.card(info.source.name, _rows(info, answer))
