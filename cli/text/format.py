"""How numbers are written, the same wherever they are shown: counts, speculation, quality. Does not measure."""

from typing import TYPE_CHECKING

from mycli.runtime.engine.stats import Timing
from mycli.runtime.utils.units import human_bytes, pluralize

if TYPE_CHECKING:  # torch takes a second to import
    from mycli.quant.evaluate import Evaluation, Mean
    from mycli.runtime.memory.plan import MemoryPlan
    from mycli.runtime.models.config import ModelConfig


def compact(count: int) -> str:
    """212 as 212, 1234 as 1.2k, 8030261248 as 8.0B."""
    for size, letter in ((10**9, "B"), (10**6, "M"), (1000, "k")):
        if count >= size:
            return f"{count / size:.1f}{letter}"
    return str(count)


def active(config: "ModelConfig") -> str:
    """Behind the number of parameters, how many of them a token meets where it does not meet all."""
    met = config.active_parameters()
    return f", {compact(met)} of them active for a token" if met < config.parameters() else ""


def experts_held(plan: "MemoryPlan") -> str:
    """How many experts of a mixture are in memory, where not all are."""
    from mycli.runtime.memory.resident import most_experts, slot_bytes  # only for a model that is larger than memory

    held, most = plan.expert_slots or 0, most_experts(plan.config)
    size = human_bytes(held * slot_bytes(plan))
    return f"{held} of {most} in each layer are in memory ({size}), the others are read from disk when they are chosen"


def speculation(timing: Timing) -> list[str]:
    """How much of a reply was guessed rightly and what that gained; nothing without a draft."""
    if timing.record is None:
        return []
    if not timing.record.passes:
        return ["draft off"]
    gain = "" if timing.speedup is None else f" ({timing.speedup:.1f}x)"
    return [f"draft {timing.record.acceptance_rate:.0%}{gain}"]


def _plus_minus(estimate: "Mean", digits: str) -> str:
    error = "" if estimate.error is None else f" ± {estimate.error:{digits}}"
    return f"{estimate.value:{digits}}{error}"


def quality(result: "Evaluation") -> list[tuple[str, str]]:
    """Names and values for a card."""
    bos = "BOS once" if result.begins_with_bos else "no BOS"
    protocol = f"{pluralize(result.windows, 'window')} of {result.context} tokens, {bos}, {result.dtype}"
    found = result.divergence
    if found is None:
        return [("perplexity", _plus_minus(result.perplexity, ".2f")), ("measured on", protocol)]
    reference = f"{found.reference_perplexity.value:.2f} → "
    percent = _plus_minus(found.same_top1, ".1%")
    return [
        ("perplexity", reference + _plus_minus(result.perplexity, ".2f")),
        (
            "KL divergence",
            f"mean {_plus_minus(found.kl, '.2g')}, median {found.kl_median:.2g}, 99% {found.kl_p99:.2g}"
            f", max {found.kl_max:.2g}",
        ),
        ("same top token", f"{percent}, RMS Δp {found.rms_dp:.2%}"),
        ("measured on", protocol),
    ]
