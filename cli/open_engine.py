"""An engine over a loaded model, with its draft and what it keeps over restarts.

All of it imports torch: `load.py` imports this module when the light checks have passed.
"""

from collections.abc import Callable
from pathlib import Path

from mycli.cli.command import Call
from mycli.cli.load import about
from mycli.runtime.cache.prefix_store import PrefixStore, UntrustedError
from mycli.runtime.checkpoint.model_folder import ModelFolder
from mycli.runtime.device.placement import Placement
from mycli.runtime.engine.completion import LoadedModel
from mycli.runtime.engine.config import MTP, EngineConfig
from mycli.runtime.engine.engine import Engine
from mycli.runtime.engine.kept_texts import identity
from mycli.runtime.engine.model_runner import cache_shape
from mycli.runtime.speculative.draft_length import AdaptiveDraftLength
from mycli.runtime.speculative.prediction import PredictionProposer
from mycli.runtime.speculative.prediction_head import PredictionHead
from mycli.runtime.speculative.proposers import PromptLookup, Proposer, load_draft
from mycli.runtime.speculative.speculator import ProposerSpeculator, warm_up
from mycli.runtime.tokenizer.tokenizer import Tokenizer


def open_engine(
    call: Call,
    folder: ModelFolder,
    tokenizer: Tokenizer | None,
    placement: Placement,
    engine: EngineConfig,
    draft: ModelFolder | None,
    expert_slots: int | None,
) -> tuple[LoadedModel, Engine]:
    """The model, and an engine that speculates with `draft`, a model or the head of this one, or by lookup, if asked.

    Raises ModelError for a draft of another vocabulary.
    """
    assert engine.context is not None
    running = engine.running or engine.sequences
    shape = cache_shape(engine.context, engine.sequences, running, placement.device)
    loaded = LoadedModel.load(
        folder,
        placement,
        allow_nonfinite=engine.allow_nonfinite,
        warn=call.out.warn,
        tokenizer=tokenizer,
        expert_slots=expert_slots,
    )
    speculator = None
    if engine.draft is not None:
        proposer: Proposer = PromptLookup()
        if draft is not None and engine.draft == MTP:
            proposer = PredictionProposer(PredictionHead(draft, loaded.runner), shape)
        elif draft is not None:
            with about(call, engine.draft):
                proposer = load_draft(draft, loaded.tokenizer, loaded.runner, shape)
        cost, notice = proposer.relative_cost, once(call.out.note)
        speculator = ProposerSpeculator(proposer, lambda: AdaptiveDraftLength(cost, notice))
    running = min(running, shape.blocks)
    store = None if engine.prefix_folder is None else _prefix_store(call, folder, loaded, engine, engine.prefix_folder)
    made = Engine(loaded.runner, shape, loaded.vocabulary_size, running=running, speculator=speculator, store=store)
    warm_up(made)
    return loaded, made


def _prefix_store(
    call: Call, folder: ModelFolder, loaded: LoadedModel, engine: EngineConfig, place: Path
) -> PrefixStore | None:
    """What keeps texts in the folder `place`; None, and why, where they cannot be kept or the folder not be trusted."""
    assert engine.context is not None
    made = identity(folder, loaded.runner, engine.context)
    try:
        return PrefixStore(place, made, engine.prefix_bytes, call.out.warn)
    except UntrustedError as error:
        call.out.warn(f"nothing is kept over restarts: {error.message}; {error.hint}")
        return None


def once(tell: Callable[[str], None]) -> Callable[[str], None]:
    """`tell`, for the first text only."""
    told: list[str] = []

    def first(text: str) -> None:
        if not told:
            told.append(text)
            tell(text)

    return first
