"""Converts between the options of `mycli run` and the receipts that `mycli replay` reads."""

import secrets
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mycli.cli.flags.records import LoadFlags
from mycli.runtime.errors import ModelError, UsageError
from mycli.runtime.hub.names import is_path
from mycli.runtime.sampling.params import SamplingParams
from mycli.runtime.utils.dtypes import FLOATS

if TYPE_CHECKING:
    from mycli.cli.replies.generation import Generator
    from mycli.runtime.diagnostics.receipt import Receipt
    from mycli.runtime.engine.replies.completion import Completion
    from mycli.runtime.engine.replies.opened_model import OpenedModel

_DRAFTS = ("none", "ngram", "mtp")  # a draft model has files that the receipt does not cover
# Settings of the engine that may change a token. Threads and memory limits change none.
_SETTINGS = (
    "dtype",
    "kv",
    "activations",
    "portable_bits",
    "shadow",
    "fp8_prompts",
    "draft",
    "context",
    "allow_nonfinite",
)
_LATER = {"fp8_prompts": False, "portable_bits": False}  # settings that the first receipts do not have


@dataclass(frozen=True)
class ReplyFormat:
    """The options of a reply's format.

    `schema`: the text itself; `raw`: it continues the prompt; `reasoning_budget`: tokens of reasoning, None for any
    number.
    """

    schema: str | None = None
    regex: str | None = None
    json_mode: bool = False
    extra_properties: bool = False
    raw: bool = False
    reasoning_budget: int | None = None


def check_receipt(
    path: Path, loading: LoadFlags, note: Callable[[str], None], *, single: bool, template: bool, deadline: bool
) -> None:
    """Raise UsageError for options that a receipt cannot describe, and a path that cannot or should not be replaced."""
    from mycli.runtime.utils.files import require_writable

    if not single:
        raise UsageError("--receipt describes one reply", "omit --batch, --samples and --beams")
    if loading.adapter is not None or loading.draft not in _DRAFTS:
        raise UsageError("--receipt covers the files of one model", "omit --adapter and the name of a draft model")
    if template:
        raise UsageError("--receipt covers the model's own chat template", "omit --chat-template and its arguments")
    if deadline:
        raise UsageError("--receipt does not cover --deadline: it ends replies by the clock", "omit --deadline")
    require_writable(path)
    if path.exists() and path.stat().st_size:
        from mycli.runtime.diagnostics.receipt import Receipt

        try:
            Receipt.read(path)
        except ModelError:
            message = f"--receipt {path}: the file is not a valid receipt and was not replaced"
            raise UsageError(message, "name another file") from None
        note(f"(the receipt in {path} is replaced)")


def with_seed(params: SamplingParams) -> SamplingParams:
    """Return `params` with a random seed if one is needed and missing, so that `replay` draws the same numbers."""
    return params if params.greedy or params.seed is not None else replace(params, seed=secrets.randbits(62))


def write_receipt(
    path: Path, generator: "Generator", reply: "Completion", loading: LoadFlags, formats: Mapping[str, Any]
) -> None:
    """Write the receipt of `reply`; `formats`: the options of its grammar, with the text of the schema."""
    from mycli.runtime.diagnostics.receipt import Receipt, describe_program, file_hashes, template_hash

    opened = generator.loaded
    Receipt(
        model=_name(opened),
        files=file_hashes(opened.source.open().source_files()),
        template=template_hash(opened),
        program=describe_program(opened),
        settings=_settings(opened, loading),
        sampling=reply.request.sampling,
        format=asdict(ReplyFormat(**formats, raw=generator.raw, reasoning_budget=generator.reasoning.budget)),
        stops=generator.stops,
        limit=reply.request.limit,
        prompt=tuple(reply.request.prompt),
        tokens=tuple(reply.tokens),
        finish_reason=str(reply.finish_reason),
    ).write(path)


def _name(opened: "OpenedModel") -> str:
    source = opened.source
    if source.repo is not None:
        return f"{source.repo}@{source.revision}" if source.revision else source.repo
    # Absolute: `replay` may run in another folder.
    return str(Path(source.name).absolute()) if is_path(source.name) else source.name


def _settings(opened: "OpenedModel", loading: LoadFlags) -> dict[str, Any]:
    # The choices that "auto" made: another machine may make others, and a difference would then have the wrong cause.
    chosen = opened.placement.dtype_name
    short = next(short for short, name in FLOATS.items() if name == chosen)
    fixed = replace(loading, dtype=short, context=opened.engine.context)
    return {"device": opened.placement.device.type, **{name: getattr(fixed, name) for name in _SETTINGS}}


def loading_of(receipt: "Receipt") -> LoadFlags:
    """Return the options to load the model of a receipt. Raises ModelError for values that are never written."""
    defaults = LoadFlags(context=1)
    settings: dict[str, Any] = {name: receipt.settings.get(name, _LATER.get(name)) for name in ("device", *_SETTINGS)}
    for name, value in settings.items():
        if type(value) is not type(getattr(defaults, name)):
            raise _unknown("settings", name, value)
    if settings["draft"] not in _DRAFTS:
        raise _unknown("settings", "draft", settings["draft"])
    return replace(defaults, **settings)


def format_of(receipt: "Receipt") -> ReplyFormat:
    values = {name: receipt.format.get(name) for name in asdict(ReplyFormat())}
    values["raw"] = receipt.format.get("raw", False)  # the first receipts do not have it
    for name, value in values.items():
        kind = {"schema": str, "regex": str, "reasoning_budget": int}.get(name, bool)
        if not (type(value) is kind or (value is None and kind is not bool)):
            raise _unknown("format", name, value)
    return ReplyFormat(**values)  # type: ignore[arg-type]  # checked above


def _unknown(part: str, name: str, value: object) -> ModelError:
    return ModelError(f"the receipt's {part}: {name} is {value!r:.40}", "make a new receipt")
