"""What `run` and `chat` do before the first token: resolve, place, check memory, load, and announce each choice."""

from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from mycli.cli.command import Call
from mycli.runtime.errors import UsageError
from mycli.runtime.models.config import Dtype, Kv, load_config

if TYPE_CHECKING:  # torch takes a second to import; light commands share this module's callers
    from mycli.runtime.device.placement import Placement
    from mycli.runtime.engine.completion import Assistant
    from mycli.runtime.engine.generate import Session
    from mycli.runtime.hub.resolve import Source
    from mycli.runtime.models.generation_config import GenerationDefaults
    from mycli.runtime.sampling.params import SamplingParams

DTYPES: dict[str, Dtype | None] = {"auto": None, "bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}

KINDS: tuple[Kv, ...] = ("auto", "bf16", "int8")


@dataclass(frozen=True)
class Loaded:
    """A model that can answer, and the memory of one conversation with it."""

    source: "Source"
    placement: "Placement"
    assistant: "Assistant"
    session: "Session"


def parse_dtype(name: str) -> Dtype | None:
    """The dtype that `--dtype` asks for, None for the model's own. Raises UsageError."""
    if name not in DTYPES:
        raise UsageError(f"--dtype {name}: not a precision", f"choose from {', '.join(DTYPES)}")
    return DTYPES[name]


def parse_kv(name: str) -> Kv:
    """The kind of cache that `--kv` asks for. Raises UsageError."""
    for kind in KINDS:
        if kind == name:
            return kind
    raise UsageError(f"--kv {name}: not a kind of cache", f"choose from {', '.join(KINDS)}")


def load(
    call: Call,
    model: str,
    *,
    device: str,
    dtype: str,
    kv: str = "auto",
    shadow: bool = False,
    context: int | None,
    sequences: int = 1,
    draft: str = "none",
    allow_nonfinite: bool = False,
) -> Loaded:
    """Load MODEL with room for `context` tokens; None: the model's own context, or as much as fits.

    The session has one sequence; memory is checked for `sequences`, for a command that branches it. It speculates with
    `draft`: a model, "ngram" or "none".
    Says on stderr where it runs and what could not be done as asked.
    """
    from mycli.runtime.checkpoint.prefetch import read_ahead
    from mycli.runtime.hub.resolve import resolve

    source = resolve(model, offline=call.offline)
    read_ahead(source.folder)  # before torch is imported, which takes as long
    import torch

    from mycli.runtime.device.placement import place
    from mycli.runtime.engine.loader import out_of_memory, plan_memory

    second = resolve(draft, offline=call.offline) if draft not in ("none", "ngram") else None
    config = load_config(source.folder)
    placement = place(config, device, parse_dtype(dtype), parse_kv(kv), shadow=shadow)
    for note in placement.notes:
        call.out.note(note)
    capacity = plan_memory(source.folder, placement, context, sequences, second.folder if second else None)
    if context is None and capacity < config.max_context:
        call.out.note(f"context {capacity} of the model's {config.max_context} tokens: --ctx asks for more")
    announce_build(call, placement)
    with suppress(torch.OutOfMemoryError):
        return _load(call, source, placement, capacity, second, draft == "ngram", allow_nonfinite)
    # Here nothing of what was loaded is held any more, so what is free is what another try would find.
    raise out_of_memory(source.folder, placement, capacity, sequences, second.folder if second else None)


def _load(
    call: Call,
    source: "Source",
    placement: "Placement",
    capacity: int,
    draft: "Source | None",
    ngram: bool,
    allow_nonfinite: bool,
) -> Loaded:
    from mycli.runtime.engine.completion import Assistant

    assistant = Assistant.load(source.folder, placement, allow_nonfinite=allow_nonfinite)
    for warning in assistant.warnings:
        call.out.warn(warning)
    return Loaded(source, placement, assistant, make_session(call, assistant, capacity, draft, ngram=ngram))


def announce_build(call: Call, placement: "Placement") -> None:
    """Build the CPU's native code where that has not been done, and say so: it takes seconds."""
    from mycli.runtime.kernels.cpu.build import must_be_built, native

    if placement.device.type == "cpu" and must_be_built():
        call.out.note("building the CPU kernel, once")
        native()


def make_session(
    call: Call, assistant: "Assistant", capacity: int, draft: "Source | None", *, ngram: bool = False
) -> "Session":
    """A session that speculates with the model `draft` or by lookup, or a plain one where neither is asked for.

    Raises ModelError for a draft of another vocabulary.
    """
    from mycli.runtime.engine.generate import Session
    from mycli.runtime.speculative.decode import SpeculativeSession
    from mycli.runtime.speculative.draft_length import AdaptiveDraftLength
    from mycli.runtime.speculative.proposers import PromptLookup, Proposer, load_draft

    if draft is None and not ngram:
        return Session(assistant.model, capacity)
    proposer: Proposer = PromptLookup()
    if draft is not None:
        proposer = load_draft(draft.folder, assistant.tokenizer, assistant.model, capacity)
    session = SpeculativeSession(
        assistant.model, capacity, proposer, AdaptiveDraftLength(proposer.relative_cost, call.out.note)
    )
    session.warm_up()
    return session


def choose_sampling(
    defaults: "GenerationDefaults", **flags: float | int | tuple[tuple[int, float], ...] | None
) -> "SamplingParams":
    """Flags over the model's generation_config over greedy. `flags` are named as the fields of SamplingParams."""
    from mycli.runtime.sampling.params import SamplingParams

    chosen = SamplingParams()
    if defaults.do_sample is not False:
        # A file that recommends only top-p or top-k samples at temperature 1, as transformers does.
        recommended = {
            "temperature": defaults.temperature
            if defaults.temperature is not None
            else float(bool(defaults.do_sample)),
            "top_k": defaults.top_k,
            "top_p": defaults.top_p,
            "min_p": defaults.min_p,
            "repetition_penalty": defaults.repetition_penalty,
        }
        chosen = replace(chosen, **{name: value for name, value in recommended.items() if value is not None})  # type: ignore[arg-type]  # names are fields
    return replace(chosen, **{name: value for name, value in flags.items() if value is not None})  # type: ignore[arg-type]  # names are fields
