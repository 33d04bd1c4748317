"""The plan and the result of `mycli quantize`."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mycli.cli.command import Call
from mycli.cli.reports.plot import LayerError
from mycli.cli.text.format import activation_rows, call_rows, head_rows, quality_rows
from mycli.cli.text.progress import duration
from mycli.runtime.utils.units import human_bytes

if TYPE_CHECKING:  # torch takes seconds to import
    from mycli.quant.ggml.plan import GgufPlan
    from mycli.quant.pipeline import Outcome
    from mycli.quant.planning.plan import QuantizationPlan

WORST = 5  # layers to list


def steps(work: "QuantizationPlan") -> list[str]:
    # What the command does, in order.
    recipe, blocks, layers = work.recipe, work.config.layers, len(work.packings)
    solver = f"{recipe.method} of {layers} layers"
    steps = [f"choose bits for a mean of {recipe.target_bpw:g}"] if recipe.target_bpw is not None else []
    steps += ["measure gradients of the model"] if recipe.hessian == "model" else []
    steps.append(
        f"{solver} in {blocks} blocks on {recipe.samples} windows of {work.seq} tokens" if recipe.needs_data else solver
    )
    steps += ["tune the result, codes included" if recipe.tune_codes else "tune the result"] if recipe.tune else []
    steps += ["choose the bits of the output head"] if work.chooses_head else []
    if tokens := work.measured_tokens:
        steps.append(f"measure the quality on {tokens} tokens")
    return steps


def plan_fields(work: "QuantizationPlan | GgufPlan") -> dict[str, Any]:
    """Return what the plans of a folder and of a GGUF file have in common, for JSON."""
    return {
        "name": work.recipe.name,
        "size": asdict(work.size),
        "memory_bytes": work.need.host,
        "device_memory_bytes": work.need.device,
        "tokens_at_once": work.need.at_once,
    }


def plan_rows(work: "QuantizationPlan | GgufPlan", kinds: tuple[str, str]) -> list[tuple[str, str]]:
    """Return the rows of `plan_fields`; `kinds`: the row about the quantized layers."""
    size = work.size
    return [
        ("size", f"{human_bytes(size.bytes)} ({size.bytes} bytes), {size.bits_per_weight:.2f} bits per weight"),
        kinds,
        ("memory", f"{human_bytes(work.need.host)} in addition to Python and torch"),
        *([("GPU memory", human_bytes(work.need.device))] if work.need.device else []),
    ]


def show_plan(call: Call, work: "QuantizationPlan", target: Path, seconds: float) -> None:
    if call.out.answered({"folder": str(target), **plan_fields(work), "seconds": seconds}):
        return
    layers = f"{len(work.packings)} layers at {work.size.quantized_bits_per_weight:.3f} bits per weight"
    rows = [
        ("folder", str(target)),
        *plan_rows(work, ("quantized", layers)),
        ("work", "; ".join(steps(work))),
        ("time", f"about {duration(seconds)}, estimated from a short measurement"),
    ]
    call.out.card(f"{target.name} (dry run, nothing is written)", rows)


def _output_error(errors: Sequence[LayerError]) -> str | None:
    pairs = [(layer.error, layer.rounding) for layer in errors if layer.rounding is not None]
    if not pairs:
        return None
    error, rounding = (sum(column) / len(pairs) for column in zip(*pairs, strict=True))
    return f"{error:.3%} on average, {rounding:.3%} with rounding to nearest"


def show_outcome(call: Call, outcome: "Outcome", errors: Sequence[LayerError]) -> None:
    kind = "file" if outcome.folder.is_file() else "folder"
    answer = {
        kind: str(outcome.folder),
        "size": asdict(outcome.size),
        "card": outcome.report.record,
        "layers": [asdict(layer) for layer in outcome.layers],
        "notes": outcome.notes,
    }
    if call.out.answered(answer):
        return
    size, report, output_error = outcome.size, outcome.report, _output_error(errors)
    worst = sorted(errors, key=lambda layer: layer.error, reverse=True)[:WORST]
    rows = [
        (kind, str(outcome.folder)),
        ("size", f"{human_bytes(size.bytes)}, {size.bits_per_weight:.2f} bits per weight"),
        ("quantized", f"{len(outcome.layers)} layers at {size.quantized_bits_per_weight:.3f} bits per weight"),
        *([] if report.evaluation is None else quality_rows(report.evaluation)),
        *call_rows(report.calls),
        *head_rows(report.head),
        *activation_rows(report.activations),
        *([] if output_error is None else [("output error", output_error)]),
        ("worst layers", ", ".join(f"{layer.name.removeprefix('model.')} {layer.error:.2%}" for layer in worst)),
    ]
    call.out.card(outcome.folder.name, rows)
