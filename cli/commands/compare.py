"""`mycli compare`: the replies of two models to the same prompts, and how far their distributions are apart."""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from mycli.cli.command import Call, command
from mycli.cli.flags import options
from mycli.cli.flags.records import LoadFlags
from mycli.cli.load import about, announce_build, load_engine, open_generative
from mycli.cli.output import Column
from mycli.cli.replies.batch_file import MAX_LINE, parse_prompt
from mycli.cli.reports.plot import Chart, Point, require_svg, write_charts
from mycli.cli.text.progress import STEP_SECONDS, CpuContention, stages
from mycli.runtime.checkpoint.model_folder import ModelFolder
from mycli.runtime.errors import GateError, UsageError
from mycli.runtime.tokenizer.chat_template import Message
from mycli.runtime.utils.files import open_input
from mycli.runtime.utils.json_fields import parse_object
from mycli.runtime.utils.units import human_bytes, percent, pluralize

if TYPE_CHECKING:  # torch takes a second to import
    from mycli.quant.comparison import ComparedPrompt, Comparison, Interval, ModelReplies
    from mycli.runtime.engine.config import EngineConfig

EXAMPLES = (
    "mycli compare pico pico-draft -n 16",
    "mycli compare pico pico-draft -n 16 --max-kl 5 --plot compared.svg --json",
)
_MAX_PROMPTS = 10_000
# Mean KL in nats below which copies are usually taken for the original: that of good 8-bit and 4-bit copies.
SAME_KL, CLOSE_KL = 1e-3, 5e-2

_COLUMNS = (
    Column("prompt", "name", priority=1),
    Column("tokens", "tokens", right=True, priority=5),
    Column("first difference", lambda row: _difference(row["divergence"]), right=True, priority=2),
    Column("KL", lambda row: f"{row['kl']:.2g}", right=True, priority=3),
    Column("same top token", lambda row: percent(row["same_top1"]), right=True, priority=6),
    Column("answer", lambda row: "same" if row["same_answer"] else "changed", priority=4),
    Column("calls", lambda row: "" if row["calls"] == "none" else row["calls"], priority=7),
)


def _difference(index: int | None) -> str:
    return "none" if index is None else f"token {index + 1}"


def _read_prompts(path: Path) -> "list[ComparedPrompt]":
    from mycli.quant.comparison import as_prompts

    hint = 'a line is {"id": 1, "prompt": "..."} or {"messages": [...], "tools": [...]}'
    prompts: list[tuple[str, str | list[Message], list[dict[str, Any]]]] = []
    with open_input(path, pipes=True) as file:
        for number, data in enumerate(iter(partial(file.readline, MAX_LINE + 1), b""), start=1):
            if not data.strip():
                continue
            if len(prompts) == _MAX_PROMPTS or len(data) > MAX_LINE:
                raise UsageError(f"{path}: line {number} is too long, or one of too many", hint)
            line = parse_object(data, f"{path.name}: line {number}", MAX_LINE)
            tools = line.array("tools", dict)
            if not all(isinstance(tool.get("function"), dict) for tool in tools):
                raise line.fail("tools", "must be functions, as in a request of OpenAI's API", hint)
            values = {key: value for key, value in line.values.items() if key not in ("id", "tools")}
            prompts.append((str(line.values.get("id", number)), parse_prompt(values, number), tools))
    if not prompts:
        raise UsageError(f"{path}: no prompts", hint)
    return as_prompts(prompts)


def _built_in_prompts() -> "list[ComparedPrompt]":
    from mycli.quant.comparison import as_prompts
    from mycli.runtime.diagnostics.prompts import QUESTIONS, STORIES

    return as_prompts([(text, text, []) for text in (*QUESTIONS, *STORIES)])


def _require_alike(names: tuple[str, str], folders: list[ModelFolder], prompts: "list[ComparedPrompt]") -> None:
    """Raise UsageError for models that read different tokens, or choose from different ones."""
    from mycli.quant.evaluate import require_same_vocabulary

    first, second = ([prompt.encode(folder.tokenizer()) for prompt in prompts] for folder in folders)
    if first != second:
        message = f"{names[0]} and {names[1]} render or tokenize the prompts differently"
        raise UsageError(message, "compare related models")
    require_same_vocabulary(folders[0].config, folders[1].config)


def _stages(call: Call) -> AbstractContextManager[Callable[[str, int, int], None]]:
    return stages(partial(call.out.result_progress, line_seconds=5 * STEP_SECONDS))


def _replies(
    call: Call, model: str, engine: "EngineConfig", prompts: "list[ComparedPrompt]", limit: int
) -> "ModelReplies":
    from mycli.quant.comparison import reply_to_all

    with about(call, model), load_engine(call, model, engine) as opened, _stages(call) as progress:
        return reply_to_all(opened, prompts, limit, lambda _, done, total: progress(f"{model}: replies", done, total))


def _range(interval: "Interval", style: str) -> str:
    if interval.low is None or interval.high is None:
        return f"{interval.value:{style}}"
    return f"{interval.value:{style}} (95%: {interval.low:{style}} to {interval.high:{style}})"


def comparison_verdict(result: "Comparison") -> str:
    """Return in words how close the candidate is to the reference."""
    kl = result.kl.value if result.kl.high is None else result.kl.high
    if kl < SAME_KL and not result.changed_prompts:
        return "no difference that matters"
    if kl < CLOSE_KL and not result.changed_calls:
        return "close: most replies keep their meaning"
    return "different: read the replies before replacing one by the other"


def _show(call: Call, reference: str, candidate: str, result: "Comparison", answer: dict[str, Any]) -> None:
    if call.out.answered(answer):
        return
    call.out.table(answer["prompts"], _COLUMNS)
    count, share = len(result.prompts), result.candidate_bytes / result.reference_bytes
    sizes = f"{human_bytes(result.reference_bytes)} → {human_bytes(result.candidate_bytes)}"
    with_calls = sum(prompt.calls != "none" for prompt in result.prompts)
    rows = [
        ("replies", f"{result.changed_replies} of {count} differ, {result.changed_answers} with another answer"),
        *([("calls", f"{result.changed_calls} of {with_calls} differ")] if with_calls else []),
        ("KL divergence", f"mean {_range(result.kl, '.2g')}"),
        ("same top token", percent(result.same_top1, 1)),
        ("speed", f"{_range(result.speed, '.2f')} times as fast"),
        ("weights and cache", f"{sizes} ({share:.0%})"),
        ("verdict", comparison_verdict(result)),
    ]
    call.out.card(f"{candidate} compared with {reference}", rows)


def _check(result: "Comparison", max_kl: float | None, max_changed: float | None) -> None:
    changed = result.changed_prompts / len(result.prompts)
    if max_kl is not None and result.kl.value > max_kl:
        raise GateError(f"the mean KL of {result.kl.value:.4g} is above --max-kl {max_kl:g}", "use more bits")
    if max_changed is not None and changed > max_changed:
        problem = f"{changed:.0%} of the answers or calls changed, more than --max-changed {max_changed:g}"
        raise GateError(problem, "use more bits, or read the replies: they may be as good")


@command
def compare(
    call: Call,
    model: Annotated[str, options.argument("A", "The reference, such as the original.", options.complete_model)],
    candidate: Annotated[str, options.argument("B", "The candidate, such as a copy.", options.complete_model)],
    prompts: Annotated[
        Path | None,
        options.option("--prompts", "FILE.jsonl", "Your prompts, one per line.", show_default="built-in questions"),
    ] = None,
    limit: Annotated[int, options.count("-n --max-tokens", "Maximum number of tokens of a reply.")] = 128,
    max_kl: Annotated[
        float | None, options.option("--max-kl", "X", "Exit with 6 if the mean KL is above this.")
    ] = None,
    max_changed: Annotated[
        float | None,
        options.option("--max-changed", "SHARE", "Exit with 6 if more answers or calls change.", min=0, max=1),
    ] = None,
    plot: Annotated[Path | None, options.option("--plot", "FILE.svg", "Draw KL and length of each reply.")] = None,
    ctx: options.Context = None,
    device: options.Device = "auto",
    threads: options.Threads = None,
    dtype: options.Precision = "auto",
    kv: options.CacheKind = "auto",
) -> None:
    """Compare the replies of two models to your prompts.

    Both reply greedily to each prompt, one after the other, so they need not fit together. Prints the first token that
    differs, changed answers and calls, the KL divergence of B on A's replies with an interval, speed and memory.

    A line of --prompts is {"prompt": "..."} or {"messages": [...], "tools": [...]}, with an optional id.
    """
    if max_kl is not None and not 0 < max_kl < math.inf:
        raise UsageError(f"--max-kl {max_kl} must be above 0", "for example: --max-kl 0.05")
    if limit < 1:
        raise UsageError("-n must be at least 1", "for example: -n 128")
    if plot is not None:
        require_svg(plot)
    engine = LoadFlags(device=device, dtype=dtype, kv=kv, context=ctx).resolve()
    names = (model, candidate)
    opened = [open_generative(call, name) for name in names]  # before the first is loaded
    sources, folders = [source for source, _ in opened], [folder for _, folder in opened]
    conversations = _built_in_prompts() if prompts is None else _read_prompts(prompts)
    _require_alike(names, folders, conversations)  # before minutes of replies
    from mycli.quant.comparison import compare_replies, measure_divergence
    from mycli.quant.layer_streaming import StreamedModel

    # One after the other and not together: two models that fit alone may not fit side by side.
    contention = CpuContention()
    reference, other = (_replies(call, name, engine, conversations, limit) for name in names)
    disturbance = contention.note()  # of the timed part alone
    exact = replace(engine, dtype="float32")  # half precision alone moves KL by as much as 8-bit weights do
    streamed = [StreamedModel(folder, exact.place(folder.config)) for folder in folders]
    announce_build(call, streamed[0].placement)
    with _stages(call) as progress:
        divergences = measure_divergence(streamed[0], streamed[1], reference.replies, progress)
    result = compare_replies(conversations, reference, other, divergences)
    answer = {
        "reference": sources[0].name,
        "candidate": sources[1].name,
        **asdict(result),
        "changed_replies": result.changed_replies,
        "changed_answers": result.changed_answers,
        "changed_calls": result.changed_calls,
        "verdict": comparison_verdict(result),
    }
    _show(call, sources[0].name, sources[1].name, result, answer)
    if disturbance:
        call.out.note(f"({disturbance}; the speed may be wrong, the verdict does not depend on it)")
    call.out.detail(f"measured on {pluralize(len(conversations), 'prompt')}, {streamed[0].placement.dtype_name}")
    if plot is not None:  # after the result, which a full disk must not take away
        _plot(plot, sources[0].name, sources[1].name, result)
    _check(result, max_kl, max_changed)


def _plot(path: Path, reference: str, candidate: str, result: "Comparison") -> None:
    points: Sequence[Point] = [
        Point(prompt.name, prompt.tokens, prompt.kl, "same reply" if prompt.divergence is None else "changed reply")
        for prompt in result.prompts
    ]
    title = f"{candidate} compared with {reference}"
    write_charts(path, [Chart(title, "tokens of the reply", "KL divergence", points)])
