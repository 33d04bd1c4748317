"""An estimate of a model as JSON, and as the rows of a card. Knows what is told of it; does not print."""

from dataclasses import dataclass, replace
from typing import Any

from mycli.cli.other_engines import RANKS, beyond_one_gpu
from mycli.cli.text.format import experts_held
from mycli.runtime.checkpoint.model_folder import ModelFolder
from mycli.runtime.device.probe import Target
from mycli.runtime.diagnostics.vllm_tp import obstacles
from mycli.runtime.memory import estimate as memory
from mycli.runtime.memory.ceiling import tokens_per_second, tokens_per_second_from_disk
from mycli.runtime.memory.fit import PackingScheme
from mycli.runtime.memory.plan import MemoryPlan
from mycli.runtime.memory.resident import most_experts
from mycli.runtime.memory.weights import shadow_bytes
from mycli.runtime.utils.units import human_bytes

SEQUENCE_PARALLEL = (
    "also use an engine that splits the sequence: vLLM's --decode-context-parallel-size, or ring attention"
)
BANDWIDTH_HINT = "unknown: measure it with mycli doctor, or give --bandwidth"


_JSON_KEYS = {"allocator": "kept"}  # parts of the workspace whose key is older than their name


@dataclass(frozen=True)
class EstimateSubject:
    """A model, how its weights are held, and where it would run."""

    model: str
    folder: ModelFolder
    plan: MemoryPlan
    target: Target
    wish: PackingScheme  # what --quant and --head ask for
    disk: tuple[float, str] | None = None  # GB/s of reading experts, and whence; None where all are in memory

    @property
    def scheme(self) -> str:
        """int4-g128, several joined by +, or the dtype of a dense model."""
        names = sorted({packing.name for packing in self.plan.packings.values()})
        return "+".join(names) or self.plan.dtype or self.plan.config.dtype


def _number(tokens: float) -> str:
    return f"{tokens:,.0f}" if tokens >= 100 else f"{tokens:.1f}"


def _ceilings(subject: EstimateSubject) -> dict[int, float]:
    """Tokens per second by depth: an empty and a full cache. Empty where the bandwidth is unknown."""
    bandwidth = subject.target.bandwidth
    if bandwidth is None:
        return {}
    return {depth: tokens_per_second(subject.plan, depth, bandwidth) for depth in (0, subject.plan.context)}


def _from_disk(subject: EstimateSubject) -> float | None:
    """Tokens per second of an empty cache where no expert that is chosen is in memory; None where all are."""
    bandwidth = subject.target.bandwidth
    if subject.disk is None or bandwidth is None:
        return None
    return tokens_per_second_from_disk(subject.plan, 0, bandwidth, subject.disk[0])


def obstacle_lines(subject: EstimateSubject, ranks: int) -> list[str]:
    """What keeps a model from being split over so many GPUs, a line each."""
    return [
        f"{one.where}: {one.problem}" + (f" ({one.layers} layers)" if one.layers > 1 else "")
        for one in obstacles(subject.plan.config, subject.plan.packings, ranks)
    ]


def _more_gpus(subject: EstimateSubject) -> tuple[int, int | None, str] | None:
    """Where one GPU ends: the context that it does not hold, how many would, None for none of one machine, and how.

    None where one GPU holds all that the model was made for, and on a CPU.
    """
    plan, free = subject.plan, subject.target.free
    if not subject.target.gpu or subject.wish.packing is not None:
        return None
    most = replace(plan, context=plan.config.max_context)
    beyond = next((one for one in (plan, most) if memory.estimate(one).total > free), None)
    if beyond is None:
        return None
    found = beyond_one_gpu(subject.model, beyond, free)
    if found is None:
        return beyond.context, None, SEQUENCE_PARALLEL
    return beyond.context, *found


def estimate_json(subject: EstimateSubject, ranks: int | None) -> dict[str, Any]:
    """What `--json` answers; `ranks`: GPUs that a model is to be split over."""
    plan, target, result = subject.plan, subject.target, memory.estimate(subject.plan)
    found: dict[str, Any] = {
        "model": subject.model,
        "scheme": subject.scheme,
        "parameters": plan.config.parameters(),
        "active_parameters": plan.config.active_parameters(),
        "context": plan.context,
        "batch": plan.batch,
        "device": target.place,
        "device_name": target.name,
        "bytes": {
            "weights": result.weights,
            "embeddings_and_head": result.embeddings,
            "cache": result.cache,
            "draft": result.draft,
            "workspace": result.workspace.total,
            "runtime": result.runtime,
            "total": result.total,
            "free": target.free,
        },
        "workspace_bytes": {
            "kept" if key == "allocator" else key: size for key, size in vars(result.workspace).items()
        },
        "fits": result.total <= target.free,
        "longest_context": memory.longest_context(plan, target.free),
        "bandwidth_gb_per_second": target.bandwidth,
        "bandwidth_source": target.bandwidth_source,
        "ceiling_tokens_per_second": [{"depth": d, "rate": rate} for d, rate in _ceilings(subject).items()],
    }
    if subject.disk is not None:
        found["experts"] = {
            "in_memory": plan.expert_slots,
            "of": most_experts(plan.config),
            "disk_gb_per_second": subject.disk[0],
            "disk_source": subject.disk[1],
            "ceiling_tokens_per_second_without_hits": _from_disk(subject),
        }
    if (adapter := subject.folder.adapter) is not None:
        found["adapter"] = {"merged": len(adapter.added) + len(adapter.replaced), "file_bytes": adapter.nbytes}
    more = _more_gpus(subject)
    if more is not None:
        found["more_gpus"] = {"context": more[0], "gpus": more[1], "command": more[2]}
    if ranks is not None:
        lines = obstacle_lines(subject, ranks)
        each = memory.rank_bytes(plan, ranks)
        found["tensor_parallel"] = {"ranks": ranks, "possible": not lines, "obstacles": lines, "bytes_each": each}
    return found


def estimate_rows(subject: EstimateSubject) -> list[tuple[str, str]]:
    """Names and values for a card."""
    plan, target, result = subject.plan, subject.target, memory.estimate(subject.plan)
    space, longest = result.workspace, memory.longest_context(plan, target.free)
    verdict = f"fits, {human_bytes(target.free - result.total)} to spare"
    if result.total > target.free:
        verdict = f"does not fit: {human_bytes(result.total - target.free)} too much"
    limit = ", the model's limit" if longest == plan.config.max_context else ""
    passes = f"passes {human_bytes(space.activations)}, dequantization {human_bytes(space.dequantization)}"
    states = memory.all_state_bytes(plan)
    per_token = (result.cache - states) // (plan.context * plan.batch) / 1024
    kept = f"; {human_bytes(states)} of it states" if states else ""
    copied = f"; {human_bytes(shadow_bytes(plan))} a copy in 16 bits" if plan.shadow else ""
    rows = [
        ("weights", f"{human_bytes(result.weights)}  ({plan.config.layers} blocks, {subject.scheme}{copied})"),
        ("embeddings and head", human_bytes(result.embeddings) + ("  (tied)" if plan.config.tie_embeddings else "")),
        (
            "KV cache",
            f"{human_bytes(result.cache)}  ({plan.context} tokens x {plan.batch}, {per_token:.1f} KiB a token{kept})",
        ),
        ("workspace", f"{human_bytes(space.total)}  ({passes})"),
        ("CUDA context" if target.gpu else "Python and torch", human_bytes(result.runtime)),
        ("total", human_bytes(result.total)),
        ("free", f"{human_bytes(target.free)} on {target.place} ({target.name})"),
        ("verdict", verdict),
        ("longest context", f"{longest} tokens{limit}"),
    ]
    if plan.draft is not None:
        rows.insert(3, ("draft", human_bytes(result.draft)))
    if (adapter := subject.folder.adapter) is not None:
        size = f"{len(adapter.added)} of them changed by {human_bytes(adapter.nbytes)} while they are read"
        rows.insert(1, ("adapter", f"0 bytes  (merged into the weights: {size})"))
    more = _more_gpus(subject)
    if more is not None:
        context, gpus, how = more
        where = f"{gpus} such GPUs" if gpus else f"more than {RANKS[-1]} such GPUs"
        rows.append(("beyond one GPU", f"{context} tokens take {where}: {how}"))
    if subject.disk is not None:
        rows.insert(1, ("experts", experts_held(plan)))
    speeds = [f"{_number(rate)} tok/s {f'at {d} tokens' if d else 'empty'}" for d, rate in _ceilings(subject).items()]
    source = f"  ({target.bandwidth:g} GB/s, {target.bandwidth_source})" if target.bandwidth else ""
    rows.append(("ceiling", ", ".join(speeds) + source if speeds else BANDWIDTH_HINT))
    if subject.disk is not None and (slowest := _from_disk(subject)) is not None:
        read = f"{subject.disk[0]:.2g} GB/s, {subject.disk[1]}"
        rows.append(("from disk", f"{_number(slowest)} tok/s where no expert chosen is in memory  ({read})"))
    return rows
