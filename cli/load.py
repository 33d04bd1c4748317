"""Opens a model for a command and prints what a user should know about it."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from mycli.cli.command import Call, subject_of
from mycli.cli.text.format import experts_in_memory
from mycli.cli.text.progress import LINE_SECONDS
from mycli.runtime.checkpoint.model_folder import ModelFolder
from mycli.runtime.checkpoint.open_folder import MODELOPT_CONFIG, with_older_section
from mycli.runtime.engine.config import EngineConfig
from mycli.runtime.engine.replies.opened_model import OpenedModel
from mycli.runtime.errors import Declined, NotFoundError
from mycli.runtime.hub.names import is_hub_name, split_file, split_name, split_quant
from mycli.runtime.hub.resolve import Source, resolve
from mycli.runtime.hub.store import state_dir
from mycli.runtime.open import OpenReport, add_adapter, open_model
from mycli.runtime.utils.json_fields import MAX_JSON_BYTES, Fields, parse_object

if TYPE_CHECKING:  # torch takes a second to import; light commands share this module's callers
    from mycli.runtime.device.placement import Placement
    from mycli.runtime.diagnostics.golden_record import GoldenRecord
    from mycli.runtime.engine.model_runner import ModelRunner
    from mycli.runtime.memory.plan import MemoryPlan
    from mycli.runtime.models.config import ModelConfig


class _Announcements(OpenReport):
    """Prints on stderr; builds the CPU kernels before weights are loaded, so that the pause is announced."""

    def __init__(self, call: Call, config: EngineConfig | None = None) -> None:
        self._call, self._config = call, config
        self._placement: Placement | None = None

    def warn(self, warning: str | Declined) -> None:
        self._call.out.warn(warning)

    def note(self, text: str) -> None:
        self._call.out.note(text)

    def placed(self, placement: "Placement") -> None:
        self._placement = placement
        announce_placement(self._call, placement)

    def planned(self, folder: ModelFolder, plan: "MemoryPlan") -> None:
        longest = folder.config.max_context
        if self._config is not None and self._config.context is None and plan.context < longest:
            self.note(f"context: {plan.context} of the model's {longest} tokens; --ctx N sets another")
        announce_experts(self._call, plan)
        assert self._placement is not None
        announce_build(self._call, self._placement)


def load_engine(call: Call, model: str, config: EngineConfig) -> OpenedModel:
    """Open a model and print on stderr where it runs and what could not be done as asked."""
    opened = open_model(model, config, offline=call.offline, report=_Announcements(call, config))
    call.out.subject = replace(call.out.subject, longest_context=opened.longest_context)
    announce_passes(call, opened.model.runner)
    remind(call, opened)
    return opened


def warm_up_engine(call: Call, loaded: OpenedModel) -> int:
    """Compile the kernels that requests of a model need; return the number of passes, 0 where nothing is compiled."""
    from mycli.runtime.engine.warm_up import compiles, count_passes, warm_up_passes
    from mycli.runtime.sampling.params import SamplingParams, recommended

    if not compiles(loaded.model.runner):
        return 0
    models = recommended(loaded.model.defaults)
    # With a bias, which suppressed tokens need, no pass samples by itself.
    settings = dict.fromkeys((SamplingParams(), *([] if models.logit_bias else [models])))
    total = count_passes(loaded.engine, len(settings))
    # In a log too: the first start after an installation takes minutes, which must not look like a hang.
    with call.out.progress("compiling GPU kernels", total, "passes", line_seconds=LINE_SECONDS) as progress:
        done = 0

        def report(passes: int, total: int) -> None:
            nonlocal done
            progress.advance(passes - done)
            done = passes

        return warm_up_passes(loaded.engine, list(settings), report)


def record_path(opened: "OpenedModel") -> Path:
    name = re.sub(r"[^\w.-]+", "--", opened.source.label)
    return state_dir() / "golden" / f"{name}-{opened.placement.device.type}.json"


def due_record(opened: "OpenedModel") -> "GoldenRecord | None":
    """Return the record of a model if another version made it and this one was not compared with it."""
    path = record_path(opened)
    if not path.is_file():
        return None
    from mycli.runtime.diagnostics.golden_record import GoldenRecord, current_version

    stored = GoldenRecord.read(path)
    return stored if stored is not None and stored.is_new(current_version()) else None


def remind(call: Call, opened: "OpenedModel") -> None:
    """After an update, say once for each model with a record how to compare with it."""
    stored = due_record(opened)
    if stored is None:
        return
    from mycli.runtime.diagnostics.golden_record import current_version, version_line

    version = current_version()
    if version in stored.reminded:
        return
    call.out.note(
        f"this is the first run with {version}; replies and speed were saved with"
        f" {version_line(stored.versions)}. To compare: mycli doctor {opened.source.name} --compare"
    )
    stored.with_reminded(version).write(record_path(opened))


def announce_passes(call: Call, runner: "ModelRunner") -> None:
    """With -v, print which pass runs which work of a model, and why faster ones do not."""
    if not call.out.verbose:
        return
    from mycli.cli.reasons import pass_rows
    from mycli.runtime.engine.pass_choices import pass_choices

    for row in pass_rows(pass_choices(runner)):
        call.out.detail(row.text)


def announce_slow_passes(call: Call, runner: "ModelRunner") -> None:
    """Print the work other than prompts that no fast pass of this device takes; -v prints the rest."""
    if call.out.verbose:  # `load_engine` has printed all
        return
    from mycli.cli.reasons import pass_rows
    from mycli.runtime.engine.pass_choices import pass_choices

    for row in pass_rows(pass_choices(runner)):
        if row.slow:
            call.out.note(row.text)


def require_generative(config: "ModelConfig") -> None:
    """Raise UsageError for a model that computes embeddings or scores, and predicts no tokens."""
    if config.bidirectional:
        from mycli.runtime.models.config import not_generative

        raise not_generative(config)


def open_generative(call: Call, model: str, adapter: str | None = None) -> tuple[Source, ModelFolder]:
    """Open one of several models that a command names and check its headers; the hints of its errors are about it."""
    with about(call, model):
        source = resolve(model, offline=call.offline)
        folder = adapted(call, source.open(), model, adapter)
        require_generative(folder.config)
        folder.checked_manifest()
    return source, folder


def adapted(call: Call, folder: ModelFolder, model: str, adapter: str | None) -> ModelFolder:
    """Return `folder` with `adapter`, or as it is if `adapter` is None."""
    if adapter is None:
        return folder
    return add_adapter(folder, model, adapter, offline=call.offline, report=_Announcements(call))


def open_config(call: Call, model: str, fetch: bool = True) -> ModelFolder:
    """Open a model's folder; with `fetch`, of a model that is only on the hub its configs alone are downloaded."""
    try:
        return resolve(model, offline=call.offline).open()
    except NotFoundError:
        if not fetch or call.offline or not is_hub_name(model):
            raise
    repo, revision = split_name(model)
    from mycli.runtime.hub.client import Hub

    with Hub.connect(call.out.note) as hub:
        if split_file(model)[1] is not None or split_quant(model)[1] is not None:
            from mycli.runtime.hub.download import plan_download
            from mycli.runtime.hub.model_info import fetch_gguf

            return fetch_gguf(hub, plan_download(hub, model))
        commit = hub.commit(repo, revision)

        def read(name: str) -> Fields:
            return parse_object(hub.read(repo, commit, name, 0, MAX_JSON_BYTES + 1), f"{repo}: {name}")

        raw = with_older_section(
            read("config.json"),
            lambda: read(MODELOPT_CONFIG) if MODELOPT_CONFIG in hub.tree(repo, commit).values else None,
        )
    return ModelFolder.from_config(raw)


@contextmanager
def about(call: Call, model: str) -> Iterator[None]:
    """Word the remedies of errors raised inside for `model`, not for the model that the command names."""
    before, call.out.subject = call.out.subject, subject_of(model)
    yield
    call.out.subject = before


def announce_placement(call: Call, placement: "Placement") -> None:
    """Print the device and dtype if they are not what a user expects."""
    for note in placement.notes:
        call.out.note(note)
    for detail in placement.details:
        call.out.detail(detail)


def announce_experts(call: Call, plan: "MemoryPlan") -> None:
    """Print how many experts are in memory if not all are."""
    if plan.expert_slots is not None:
        call.out.note(f"experts: {experts_in_memory(plan)}")


def announce_build(call: Call, placement: "Placement") -> None:
    """Build the CPU kernels if they have not been built yet, and say so first: it takes up to a minute."""
    from mycli.runtime.kernels.cpu.library.build import build_reason, native

    if placement.device.type != "cpu":
        return
    if problem := build_reason():
        cause = "" if problem == "is missing" else f" ({problem})"
        call.out.note(f"building the CPU kernels, once: this takes about a minute{cause}")
    if isinstance(declined := native(), Declined):  # also without a compiler, where nothing is built
        from mycli.cli.reasons import reason  # a long table that is needed only here

        call.out.warn(f"the CPU kernels could not be built, so replies are slower: {reason(declined)}")
