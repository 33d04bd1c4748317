"""The estimate of a model's memory and speed as a JSON object, and the card made from it."""

from dataclasses import dataclass, replace
from typing import Any

from mycli.cli.serving.other_engines import RANKS, command_for_more_gpus
from mycli.cli.text.format import experts_in_memory, head_format
from mycli.runtime.checkpoint.model_folder import ModelFolder
from mycli.runtime.device.probe import Target
from mycli.runtime.diagnostics.vllm_tp import obstacles
from mycli.runtime.memory import estimate as memory
from mycli.runtime.memory.ceiling import tokens_per_second, tokens_per_second_from_disk
from mycli.runtime.memory.fit import PackingScheme
from mycli.runtime.memory.plan import MemoryPlan
from mycli.runtime.memory.resident import most_experts
from mycli.runtime.memory.weights import prompt_copy_bytes
from mycli.runtime.utils.units import human_bytes

SEQUENCE_PARALLEL = (
    "also use an engine that splits the sequence: vLLM's --decode-context-parallel-size, or ring attention"
)
BANDWIDTH_HINT = "unknown: measure it with mycli doctor, or give --bandwidth"


@dataclass(frozen=True)
class EstimateSubject:
    """A model, how its weights are stored, and the machine it would run on."""

    model: str
    folder: ModelFolder
    plan: MemoryPlan
    target: Target
    scheme: PackingScheme  # from --quant and --head
    disk: tuple[float, str] | None = None  # GB/s of reading experts and its source; None if all are in memory

    @property
    def scheme_name(self) -> str:
        """The names of the packings, such as int4-g128, joined by +; for a dense model its dtype."""
        names = sorted({packing.name for packing in self.plan.packings.values()})
        return "+".join(names) or self.plan.dtype or self.plan.config.dtype


def _number(tokens: float) -> str:
    return f"{tokens:,.0f}" if tokens >= 100 else f"{tokens:.1f}"


def _ceilings(subject: EstimateSubject) -> list[dict[str, float]]:
    bandwidth = subject.target.bandwidth
    if bandwidth is None or subject.plan.config.bidirectional:  # a model of embeddings decodes nothing
        return []
    depths = dict.fromkeys((0, subject.plan.context))  # an empty and a full cache
    return [{"depth": depth, "rate": tokens_per_second(subject.plan, depth, bandwidth)} for depth in depths]


def _more_gpus(subject: EstimateSubject) -> dict[str, Any] | None:
    # The smallest context of the planned and the model's longest that one GPU cannot hold, and the GPUs for it.
    plan, free = subject.plan, subject.target.free
    if not subject.target.gpu or subject.scheme.packing is not None:
        return None
    for larger in (plan, replace(plan, context=plan.config.max_context)):
        if memory.estimate(larger).total > free:
            gpus, line = command_for_more_gpus(subject.model, larger, free) or (None, SEQUENCE_PARALLEL)
            return {"context": larger.context, "gpus": gpus, "command": line}
    return None


def estimate_json(subject: EstimateSubject, ranks: int | None) -> dict[str, Any]:
    """Return the JSON answer; `ranks` adds whether the model can be split over that number of GPUs."""
    plan, target, parts = subject.plan, subject.target, memory.estimate(subject.plan)
    answer: dict[str, Any] = {
        "model": subject.model,
        "scheme": subject.scheme_name,
        "head": head_format(plan.config, plan.packings),
        "parameters": plan.config.parameters(),
        "active_parameters": plan.config.active_parameters(),
        "context": plan.context,
        "batch": plan.batch,
        "device": target.place,
        "device_name": target.name,
        "bytes": {
            "weights": parts.weights,
            "embeddings_and_head": parts.embeddings,
            "cache": parts.cache,
            "draft": parts.draft,
            "workspace": parts.workspace.total,
            "runtime": parts.runtime,
            "total": parts.total,
            "free": target.free,
        },
        # The key of `allocator` is older than its name.
        "workspace_bytes": {
            "kept" if part == "allocator" else part: size for part, size in vars(parts.workspace).items()
        },
        "fits": parts.total <= target.free,
        "longest_context": memory.longest_context(plan, target.free),
        "bandwidth_gb_per_second": target.bandwidth,
        "bandwidth_source": target.bandwidth_source,
        "ceiling_tokens_per_second": _ceilings(subject),
    }
    if subject.disk is not None:
        rate, source = subject.disk
        bandwidth = target.bandwidth
        slowest = None if bandwidth is None else tokens_per_second_from_disk(plan, 0, bandwidth, rate)
        answer["experts"] = {
            "in_memory": plan.expert_slots,
            "of": most_experts(plan.config),
            "disk_gb_per_second": rate,
            "disk_source": source,
            "ceiling_tokens_per_second_without_hits": slowest,
        }
    if (adapter := subject.folder.adapter) is not None:
        held = plan.adapter_values * plan.value_bytes
        merged = len(adapter.added) + len(adapter.replaced) - len(subject.folder.unmerged)
        answer["adapter"] = {"merged": merged, "bytes": held, "file_bytes": adapter.nbytes}
    if (more := _more_gpus(subject)) is not None:
        answer["more_gpus"] = more
    if ranks is not None:
        lines = [
            f"{prefix}{obstacle.where}: {obstacle.problem}"
            + (f" ({obstacle.layers} layers)" if obstacle.layers > 1 else "")
            for prefix, part in (("", plan), ("draft: ", plan.draft))
            if part is not None
            for obstacle in obstacles(part.config, part.packings, ranks)
        ]
        rank_bytes = memory.rank_bytes(plan, ranks)
        answer["tensor_parallel"] = {
            "ranks": ranks,
            "possible": not lines,
            "obstacles": lines,
            "bytes_each": rank_bytes,
        }
    return answer


def _cache_content(plan: MemoryPlan) -> str:
    config, shape = plan.config, plan.cache_shape
    windowed = {layer for layer in range(config.layers) if shape.window_blocks and config.windowed(layer)}
    # Not from the bytes of the cache: those are of whole blocks, many times as much for a short context.
    per_token = sum(plan.token_bytes(layer) for layer in range(config.layers) if layer not in windowed) / 1024
    content = f"{plan.context} tokens x {plan.batch}, {per_token:.1f} KiB per token"
    if windowed:
        nbytes = sum(map(plan.token_bytes, windowed)) * shape.window_blocks * shape.block_size
        layers = "layer" if len(windowed) == 1 else "layers"
        content += f"; {human_bytes(nbytes)} for {len(windowed)} {layers} with a window of {config.longest_window}"
    states = memory.all_state_bytes(plan)
    return f"{content}; {human_bytes(states)} recurrent states" if states else content


def estimate_rows(subject: EstimateSubject, answer: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the rows of the card for `estimate_json`'s `answer`."""
    plan, target, config, nbytes = subject.plan, subject.target, subject.plan.config, answer["bytes"]
    spare = target.free - nbytes["total"]
    verdict = f"fits, {human_bytes(spare)} to spare" if spare >= 0 else f"does not fit: {human_bytes(-spare)} too much"
    limit = ", the model's limit" if answer["longest_context"] == config.max_context else ""
    space = answer["workspace_bytes"]
    kind = "an 8-bit" if plan.prompt_copy == "fp8" else "a 16-bit"
    copies = human_bytes(prompt_copy_bytes(plan))
    copied = "" if plan.prompt_copy == "none" else f"; {copies} for {kind} copy"
    tied = "tied" if config.tie_embeddings else ""
    passes = f"activations {human_bytes(space['activations'])}, dequantization {human_bytes(space['dequantization'])}"
    rows = [("weights", f"{human_bytes(nbytes['weights'])}  ({config.layers} layers, {answer['scheme']}{copied})")]
    if subject.disk is not None:
        rows.append(("experts", experts_in_memory(plan)))
    if (adapter := subject.folder.adapter) is not None:
        size = f"{len(adapter.added)} weights changed, {human_bytes(adapter.nbytes)} read"
        held = plan.adapter_values * plan.value_bytes
        place = "next to packed weights" if held else "merged into the weights"
        rows.append(("adapter", f"{human_bytes(held)}  ({place}: {size})"))
    rows += [
        ("embeddings and head", f"{human_bytes(nbytes['embeddings_and_head'])}  ({tied or answer['head']})"),
        ("KV cache", f"{human_bytes(nbytes['cache'])}  ({_cache_content(plan)})"),
    ]
    if plan.draft is not None:
        rows.append(("draft", human_bytes(nbytes["draft"])))
    rows += [
        ("workspace", f"{human_bytes(nbytes['workspace'])}  ({passes})"),
        ("CUDA context" if target.gpu else "Python and torch", human_bytes(nbytes["runtime"])),
        ("total", human_bytes(nbytes["total"])),
        ("free", f"{human_bytes(target.free)} on {target.place} ({target.name})"),
        ("verdict", verdict),
        ("longest context", f"{answer['longest_context']} tokens{limit}"),
    ]
    if (more := answer.get("more_gpus")) is not None:
        count = f"{more['gpus']} such GPUs" if more["gpus"] else f"more than {RANKS[-1]} such GPUs"
        rows.append(("beyond one GPU", f"{more['context']} tokens need {count}: {more['command']}"))
    return rows if config.bidirectional else [*rows, *_speed_rows(subject, answer)]


def _speed_rows(subject: EstimateSubject, answer: dict[str, Any]) -> list[tuple[str, str]]:
    target = subject.target
    speeds = ", ".join(
        f"{_number(ceiling['rate'])} tok/s " + (f"at {ceiling['depth']} tokens" if ceiling["depth"] else "empty")
        for ceiling in answer["ceiling_tokens_per_second"]
    )
    source = f"  ({target.bandwidth:g} GB/s, {target.bandwidth_source})" if target.bandwidth else ""
    rows = [("ceiling", speeds + source if speeds else BANDWIDTH_HINT)]
    if subject.disk is not None and (slowest := answer["experts"]["ceiling_tokens_per_second_without_hits"]):
        read = f"{subject.disk[0]:.2g} GB/s, {subject.disk[1]}"
        rows.append(("from disk", f"{_number(slowest)} tok/s with no chosen expert in memory  ({read})"))
    return rows
