"""`mycli template check`: what a chat template loses, refuses and costs."""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

from mycli.cli.command import Call, command
from mycli.cli.flags import options
from mycli.cli.flags.records import TemplateFlags
from mycli.cli.output import Column
from mycli.runtime.errors import GateError, NotFoundError, UsageError
from mycli.runtime.hub.names import is_hub_name
from mycli.runtime.utils.units import pluralize

if TYPE_CHECKING:  # the help needs none of these
    from mycli.runtime.checkpoint.model_folder import ModelFolder
    from mycli.runtime.tokenizer.template_check.finding import Finding
    from mycli.runtime.tokenizer.template_check.probe import Probe

EXAMPLES = (
    "mycli template check pico",
    "mycli template check pico --strict",
    "mycli template check pico --template-arg enable_thinking=false --json",
)
_COLUMNS = (
    Column("characters", lambda report: f"{report['characters']:,}"),
    Column("tool calls", lambda report: report["tool_format"] or "none"),
    Column("arguments", lambda report: ", ".join(report["arguments"]) or "none"),
    Column("continued replies", lambda report: "as rendered" if report["continues"] else "with another opening"),
    Column("256 messages", lambda report: report["costs"] and f"{report['costs']['seconds'] * 1e3:.1f} ms"),
    Column("tokens", lambda report: _tokens(report["costs"])),
)
_COSTS = {
    "start": "before the first question",
    "exchange": "around a question and its reply",
    "opening": "to open a reply",
    "tool": "for one tool",
}


def _tokens(costs: Mapping[str, Any] | None) -> str | None:
    parts = [f"{costs[name]} {text}" for name, text in _COSTS.items() if costs and costs[name] is not None]
    return ", ".join(parts) or None


@command
def template_check(
    call: Call,
    model: Annotated[
        str, options.argument("MODEL|FILE", "A model, or a file with a Jinja template.", options.complete_model)
    ],
    strict: Annotated[bool, options.flag("--strict", "Also exit with 6 for warnings.")] = False,
    *,
    templates: TemplateFlags,
) -> None:
    """Check what a chat template loses, refuses and costs.

    Renders planted conversations as clients send them: several turns, system prompts, tools, calls, results, reasoning.
    Checks that the prompt of a turn is the beginning of the next one (otherwise the prefix cache is lost), that every
    text and tool reaches the model, that calls can be read back, that replies end with a stop token, and how long
    rendering takes. The template of a FILE, or of a model that is only on the hub, is checked without tokens.

    Errors exit with 6: the model gets other text than was sent, or its reply cannot be read. Warnings: requests that
    are refused, or a cache that is lost every turn. Notes: limits that clients usually cope with.
    """
    from mycli.runtime.tokenizer.template_check.checker import check_template
    from mycli.runtime.tokenizer.template_check.finding import Severity

    report = check_template(_probe(call, model, templates))
    findings = sorted(report.findings, key=lambda finding: get_args(Severity).index(finding.severity))
    counts = Counter(finding.severity for finding in findings)
    answer = {"template": model, **report.fields(), "findings": [_described(finding) for finding in findings]}
    if not call.out.answered(answer):
        call.out.show(answer, _COLUMNS, title=model)
        for finding in answer["findings"]:
            _show(call, finding)
    fatal: tuple[Severity, ...] = ("error", "warning") if strict else ("error",)
    failing = [kind for kind in fatal if counts[kind]]
    if failing:
        kinds = " and ".join(pluralize(counts[kind], kind) for kind in failing)
        raise GateError(f"the chat template has {kinds}", "correct it, or use another: --chat-template FILE")


def _described(finding: "Finding") -> dict[str, Any]:
    from mycli.cli.template_messages import template_message, template_remedy

    return {
        "severity": finding.severity,
        "code": finding.code,
        "message": template_message(finding),
        "remedy": template_remedy(finding) or None,
        **finding.data,
    }


def _show(call: Call, finding: Mapping[str, Any]) -> None:
    call.out.result(f"{finding['severity']}: {finding['message']}")
    if "before" in finding:
        for name in ("before", "expected", "actual"):
            call.out.result(f"    {name:8}  {finding[name]!r}")
    if finding["remedy"]:
        call.out.result(f"    {finding['remedy']}")


def _probe(call: Call, name: str, templates: TemplateFlags) -> "Probe":
    from mycli.runtime.tokenizer.chat_template import MAX_TEMPLATE_BYTES, ChatTemplate
    from mycli.runtime.tokenizer.template_check.probe import Probe
    from mycli.runtime.utils.files import read_input

    chosen = templates.resolve()
    if name.endswith((".jinja", ".jinja2", ".j2")):
        try:
            source = read_input(Path(name), MAX_TEMPLATE_BYTES).decode()
        except UnicodeDecodeError:
            raise UsageError(f"{name}: not UTF-8 text", "convert it to UTF-8") from None
        # The special tokens of a file are unknown; most templates write bos_token and eos_token.
        tokens = {"bos_token": "<s>", "eos_token": "</s>"}
        return Probe(ChatTemplate({"default": source}, tokens).with_options(chosen))
    folder = _local_folder(call, name)
    if folder is not None:
        return _model_probe(folder, name, templates)
    from mycli.runtime.hub.client import Hub
    from mycli.runtime.hub.model_info import fetch_model_info

    with Hub.connect(call.out.note) as hub:
        info = fetch_model_info(hub, name)
    if info.template is None:
        raise UsageError(f"{name} has no chat template", "add --chat-template FILE")
    return Probe(ChatTemplate({"default": info.template}, {}).with_options(chosen))


def _local_folder(call: Call, name: str) -> "ModelFolder | None":
    from mycli.runtime.hub.resolve import resolve

    try:
        return resolve(name, offline=call.offline).open()
    except NotFoundError:
        if call.offline or not is_hub_name(name):
            raise
        return None


def _model_probe(folder: "ModelFolder", name: str, templates: TemplateFlags) -> "Probe":
    from mycli.runtime.models.generation_config import stop_ids
    from mycli.runtime.tokenizer.template_check.probe import Probe

    tokenizer = folder.tokenizer()
    tokenizer.use_template(templates.resolve())
    if tokenizer.template is None:
        raise UsageError(f"{name} has no chat template", "add --chat-template FILE")
    defaults, _ = folder.generation
    ids, _ = stop_ids(defaults.eos, folder.config.eos, tokenizer.eos, folder.config.vocab_size)
    return Probe(tokenizer.template, tokenizer=tokenizer, stop_ids=frozenset(ids))
