"""Formats numbers, answers and errors in the same way for every command."""

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mycli.cli.remedies import Subject, remedy
from mycli.runtime.checkpoint.formats import EMBEDDING
from mycli.runtime.errors import UserError
from mycli.runtime.quantization.activations import MAX_ADDED_KL, MAX_MOVED_KL, ActivationKl
from mycli.runtime.utils.json_fields import finite
from mycli.runtime.utils.sanitize import sanitize_json
from mycli.runtime.utils.units import human_bytes, percent, pluralize

if TYPE_CHECKING:  # torch takes a second to import
    from mycli.quant.calls.record import CallQuality
    from mycli.quant.evaluate import Evaluation, Mean
    from mycli.runtime.engine.stats import Timing
    from mycli.runtime.memory.plan import MemoryPlan
    from mycli.runtime.models.config import ModelConfig
    from mycli.runtime.quantization.head import HeadKl
    from mycli.runtime.quantization.scheme import Packing

SCHEMA_VERSION = 1  # of every JSON answer; raised when the meaning of a field changes


def json_line(value: Mapping[str, Any], encoding: str = "utf-8") -> str:
    """Return `value` with `schema_version` as one line of JSON; characters that `encoding` lacks are escaped."""
    # JSON has no infinity: an infinite perplexity becomes null instead of making the whole answer unreadable.
    answer = finite({"schema_version": SCHEMA_VERSION, **value})
    line = sanitize_json(json.dumps(answer, ensure_ascii=False, allow_nan=False))
    try:
        line.encode(encoding)
        return line
    except UnicodeEncodeError:
        return json.dumps(answer, allow_nan=False)


def error_fields(error: UserError, subject: Subject = Subject()) -> dict[str, Any]:  # noqa: B008  # frozen
    """Return the JSON object for an error; `code` is present only if its remedy has one."""
    code = {"code": error.code} if error.code else {}
    return {"message": error.message, "hint": remedy(error, subject), "exit_code": int(error.exit_code), **code}


def compact(count: int) -> str:
    """Return 212 as 212, 1234 as 1.2k, 8030261248 as 8.0B."""
    for size, letter in ((10**9, "B"), (10**6, "M"), (1000, "k")):
        if count >= size:
            return f"{count / size:.1f}{letter}"
    return str(count)


def active_parameters(config: "ModelConfig") -> str:
    """Return ", 3.3B active per token" for a MoE model, "" for a dense one."""
    active = config.active_parameters()
    return f", {compact(active)} active per token" if active < config.parameters() else ""


def experts_in_memory(plan: "MemoryPlan") -> str:
    from mycli.runtime.memory.resident import most_experts, slot_bytes  # only for a model larger than memory

    slots, most = plan.expert_slots or 0, most_experts(plan.config)
    size = human_bytes(slots * slot_bytes(plan))
    return f"{slots} of {most} per layer in memory ({size}), the others are read from disk on demand"


def speed_statistics(tokens: int, timing: "Timing", digits: int = 0) -> list[str]:
    """Return ["81 tok", "45 tok/s", "TTFT 22 ms"], without what a reply that was stopped early does not show."""
    rate = [f"{timing.tokens_per_second:.{digits}f} tok/s"] if timing.tokens_per_second else []
    first = [f"TTFT {timing.first_token_seconds * 1e3:.0f} ms"] if timing.generated else []
    return [f"{tokens} tok", *rate, *first]


def draft_statistics(timing: "Timing") -> list[str]:
    """Return ["draft 71% (1.6x)"]: acceptance and speed-up; empty without a draft."""
    if timing.record is None:
        return []
    if not timing.record.passes:
        return ["draft off"]
    speedup = "" if timing.speedup is None else f" ({timing.speedup:.1f}x)"
    return [f"draft {timing.record.acceptance_rate:.0%}{speedup}"]


def _plus_minus(estimate: "Mean", digits: str) -> str:
    error = "" if estimate.error is None else f" ± {estimate.error:{digits}}"
    return f"{estimate.value:{digits}}{error}"


def activation_rows(measured: ActivationKl | None) -> list[tuple[str, str]]:
    """Return the row on the cost of 8-bit activations on a CPU; none if it was not measured."""
    if measured is None:
        return []
    kl = f"KL {measured.eight:#.4g}, with 16 bits {measured.sixteen:#.4g} ({measured.added:+.1%})"
    return [_activation_row(kl, measured.added < MAX_ADDED_KL, f"{MAX_ADDED_KL:.0%}")]


def head_format(config: "ModelConfig", packings: "Mapping[str, Packing]") -> str:
    """Return the name of the packing of the output head, such as int8-g128, or the dtype of a dense one."""
    packing = packings.get(EMBEDDING if config.tie_embeddings else config.head().name)
    return packing.name if packing is not None else config.dtype


def head_rows(measured: "HeadKl | None") -> list[tuple[str, str]]:
    """Return the row on the choice of the output head; none if it was not measured."""
    if measured is None:
        return []
    kl = f"KL {measured.keep:#.4g} unquantized, {measured.int8:#.4g} in 8 bits ({measured.added:+.1%})"
    limit = f"the limit is {MAX_ADDED_KL:.0%}"
    return [("output head", f"8 bits: {kl}" if measured.packed else f"unquantized: {kl}; {limit}")]


def file_activation_rows(moved: float | None) -> list[tuple[str, str]]:
    """Return the row on 8-bit activations of a GGUF file; moved: the mean KL divergence from 16 bits, if measured."""
    if moved is None:
        return [("8-bit activations", "measured when the file is first loaded on a CPU")]
    return [_activation_row(f"mean KL {moved:.2g} from 16 bits", moved < MAX_MOVED_KL, f"{MAX_MOVED_KL:g}")]


def _activation_row(kl: str, used: bool, limit: str) -> tuple[str, str]:
    verdict = "auto uses them" if used else f"auto uses 16: the limit is {limit}"
    return "8-bit activations", f"{kl}; --activations {verdict}"


def call_rows(calls: "CallQuality | None") -> list[tuple[str, str]]:
    if calls is None:  # they were not measured
        return []
    kinds = ", ".join(f"{name} {percent(part.same_top1, 1)}" for name, part in calls.kinds.items())
    structure = calls.structure
    rows = [("call tokens", f"KL {structure.kl:.2g}, same top token {percent(structure.same_top1, 1)} ({kinds})")]
    if calls.before is not None and calls.after is not None:
        valid = f"{calls.before.valid} → {calls.after.valid} of {calls.prompts} prompts"
        rows.append(("valid calls", f"{valid}; as expected {calls.before.expected} → {calls.after.expected}"))
    return rows


def quality_rows(result: "Evaluation", model: str = "", reference: str = "") -> list[tuple[str, str]]:
    """Return the rows of a card; with names the two perplexities are labelled, without them they are before → after."""
    bos = "BOS once" if result.begins_with_bos else "no BOS"
    protocol = f"{pluralize(result.windows, 'window')} of {result.context} tokens, {bos}, {result.dtype}"
    divergence = result.divergence
    if divergence is None:
        return [("perplexity", _plus_minus(result.perplexity, ".2f")), ("measured on", protocol)]
    before, after = f"{divergence.reference_perplexity.value:.2f}", _plus_minus(result.perplexity, ".2f")
    kl_tail = f"median {divergence.kl_median:.2g}, 99% {divergence.kl_p99:.2g}, max {divergence.kl_max:.2g}"
    same = divergence.same_top1
    error = "" if same.error is None else f" ± {same.error:.1%}"
    return [
        ("perplexity", f"{model} {after}, {reference} {before}" if model else f"{before} → {after}"),
        ("KL divergence", f"mean {_plus_minus(divergence.kl, '.2g')}, {kl_tail}"),
        ("same top token", f"{percent(same.value, 1)}{error}, RMS Δp {divergence.rms_dp:.2%}"),
        ("measured on", protocol),
    ]
