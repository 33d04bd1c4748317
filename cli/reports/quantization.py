"""The plan and the result of `mycli quantize`, and the limits that a result must keep."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mycli.cli.command import Call
from mycli.cli.reports.plot import LayerError
from mycli.cli.text.format import activation_rows, call_rows, head_rows, quality_rows
from mycli.cli.text.progress import duration
from mycli.quant.calls.record import CallQuality
from mycli.runtime.errors import GateError
from mycli.runtime.utils.units import human_bytes

if TYPE_CHECKING:  # torch takes seconds to import
    from mycli.quant.pipeline import Outcome
    from mycli.quant.planning.plan import QuantizationPlan

WORST = 5  # layers to list


def steps(work: "QuantizationPlan") -> list[str]:
    # What the command does, in order.
    from mycli.quant.planning.plan import measured_tokens

    recipe, blocks, layers = work.recipe, work.config.layers, len(work.packings)
    solver = f"{recipe.method} of {layers} layers"
    steps = [f"choose bits for a mean of {recipe.target_bpw:g}"] if recipe.target_bpw is not None else []
    steps += ["measure gradients of the model"] if recipe.hessian == "model" else []
    steps.append(
        f"{solver} in {blocks} blocks on {recipe.samples} windows of {work.seq} tokens" if recipe.needs_data else solver
    )
    steps += ["tune the result, codes included" if recipe.tune_codes else "tune the result"] if recipe.tune else []
    steps += ["choose the bits of the output head"] if work.chooses_head else []
    if tokens := measured_tokens(work.report):
        steps.append(f"measure the quality on {tokens} tokens")
    return steps


def show_plan(call: Call, work: "QuantizationPlan", target: Path, seconds: float) -> None:
    answer = {
        "folder": str(target),
        "name": work.recipe.name,
        "size": asdict(work.size),
        "memory_bytes": work.need.host,
        "device_memory_bytes": work.need.device,
        "tokens_at_once": work.need.at_once,
        "seconds": seconds,
    }
    if call.out.answered(answer):
        return
    size = work.size
    rows = [
        ("folder", str(target)),
        ("size", f"{human_bytes(size.bytes)} ({size.bytes} bytes), {size.bits_per_weight:.2f} bits per weight"),
        ("quantized", f"{len(work.packings)} layers at {size.quantized_bits_per_weight:.3f} bits per weight"),
        ("memory", f"{human_bytes(work.need.host)} in addition to Python and torch"),
        *([("GPU memory", human_bytes(work.need.device))] if work.need.device else []),
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
    answer = {
        "folder": str(outcome.folder),
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
        ("folder", str(outcome.folder)),
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


@dataclass(frozen=True)
class Gates:
    """Limits that end the command with exit code 6 when the result exceeds them; None: no limit."""

    max_kl: float | None
    max_call_loss: float | None
    max_fallback: float

    def check(self, outcome: "Outcome") -> None:
        kl, calls, written = outcome.report.kl, outcome.report.calls, f"the model was written to {outcome.folder}"
        if self.max_kl is not None and kl is not None and kl > self.max_kl:
            raise GateError(
                f"the mean KL of {kl:.4g} is above --max-kl {self.max_kl:g}",
                f"use more --bits or a smaller --group; {written}",
            )
        if self.max_call_loss is not None:
            if calls is None or calls.loss is None:
                raise GateError(f"--max-call-loss: {_why_no_loss(calls)}", f"omit --max-call-loss; {written}")
            if calls.loss > self.max_call_loss:
                raise GateError(
                    f"valid calls fell by {calls.loss:.1%} of the prompts, more than --max-call-loss"
                    f" {self.max_call_loss:g}",
                    f"use more --bits or a smaller --group; {written}",
                )
        if outcome.fallbacks > self.max_fallback * len(outcome.layers):
            raise GateError(
                f"{outcome.fallbacks} of {len(outcome.layers)} layers were only rounded, more than --max-fallback"
                f" {self.max_fallback:g}",
                f"use more or other calibration text; {written}",
            )


def _why_no_loss(calls: CallQuality | None) -> str:
    if calls is None:
        return "the model's chat template has no format for calls"
    if calls.before is None:
        return calls.skipped or "its replies were not measured"
    return f"the original itself replies with valid calls to 0 of {calls.prompts} prompts"
