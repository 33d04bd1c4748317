"""Test that a server of recurrent and latent models gives the same replies through the captured pass as without it.

A recording replaces the CUDA graph. Requests share prefixes, arrive late, are cancelled and preempted.
"""

import random
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import cast

import pytest
import torch

from mycli.runtime.checkpoint.open_folder import open_model_folder
from mycli.runtime.engine.engine import Engine
from mycli.runtime.engine.model_runner import ModelRunner
from mycli.runtime.engine.passes import Passes
from mycli.runtime.engine.passes.base import PassInput
from mycli.runtime.engine.passes.captured import CapturedStep
from mycli.runtime.engine.passes.cuda import CudaPass
from mycli.runtime.engine.passes.plain import PlainPass
from mycli.runtime.engine.sequence import Request
from mycli.runtime.engine.speculation import DraftRequest, Speculator
from mycli.runtime.errors import Declined
from mycli.runtime.kernels.paged import KEY_BLOCK
from mycli.runtime.layers.transformer import Transformer
from mycli.runtime.memory.cache_shape import CacheShape, window_blocks
from mycli.runtime.sampling.params import SamplingParams
from mycli.runtime.speculative.draft_length import FixedDraftLength
from mycli.runtime.speculative.mtp import MtpHead, MtpProposer
from mycli.runtime.speculative.proposers import DraftModel, Proposer
from mycli.runtime.speculative.speculator import ProposerSpeculator
from tests.runtime.engine.test_random_walk import Oracle
from tests.support.families import CASES, make
from tests.support.graphs import recording
from tests.support.grids import chosen
from tests.support.native_parts import WIDE, load_bf16, need_native_code
from tests.support.prediction import make_with_head


class Noting(CudaPass):
    """Counts decode passes, and those with drafts, by the reason for declining them."""

    counts: Counter[str]
    drafted: Counter[str]

    def takes(self, work: PassInput) -> Declined | None:
        declined = super().takes(work)
        drafted = any(chunk.drafted for chunk in work.chunks)
        if drafted or work.rows == len(work.chunks):
            (self.drafted if drafted else self.counts)["taken" if declined is None else declined.code] += 1
        return declined


class Recorded(ProposerSpeculator):
    """Records the drafted tokens, which an MTP head reads from the hidden states of captured passes."""

    proposals: list[list[list[int]]]

    def propose(self, requests: Sequence[DraftRequest]) -> list[list[int]]:
        proposed = super().propose(requests)
        self.proposals = [*getattr(self, "proposals", []), proposed]
        return proposed


def drawn(number: int) -> Request:
    drawing = random.Random(f"request {number}")
    prompt = [7, 9, 11] * drawing.choice([0, 23, 30]) + [drawing.randrange(3, 90) for _ in range(9)]
    sampling = SamplingParams(temperature=drawing.choice([0.0, 1.0]), seed=number)
    return Request(tuple(prompt), sampling, drawing.randrange(1, 70))


def replies(
    model: Transformer, captured: bool, speculator: Speculator | None = None
) -> tuple[dict[int, list[int]], Noting, int]:
    """Return the tokens of all requests, the pass with its counts, and the number of preemptions or accepted drafts."""
    step, plain = CapturedStep(model), PlainPass(model)
    way = Noting(step, plain, recording, pytest.fail, name="captured")
    way.counts, way.drafted, accepted = Counter(), Counter(), 0
    passes = Passes((way, plain) if captured else (plain,), {})
    passes.makes_tokens = False
    engine = Engine(
        ModelRunner(model, passes=passes),
        CacheShape(192, 7, KEY_BLOCK, window_blocks(model.config, 1, 6, 512) or 0),
        model.config.vocab_size,
        running=6,
        speculator=speculator,
    )
    drawing, tokens, submitted = random.Random(5), dict[int, list[int]](), 0
    while submitted < 20 or engine.has_work:
        for _ in range(drawing.randrange(3) if submitted < 20 else 0):
            engine.submit(drawn(submitted))
            submitted += 1
        if drawing.random() < 0.03 and submitted:
            engine.cancel(drawing.randrange(submitted))
        for output in engine.step():
            tokens.setdefault(output.sequence, []).extend(output.tokens)
            accepted += output.accepted
    return tokens, way, engine.stats.preemptions if speculator is None else accepted


@pytest.mark.parametrize(
    "case",
    chosen(
        ["qwen3_5-delta", "kimi_linear-8top3", "falcon_h1-multipliers", "deepseek_v2-yarn", "gemma3-window7-tied"],
        quick=["qwen3_5-delta", "deepseek_v2-yarn", "gemma3-window7-tied"],
    ),
)
def test_replies_of_a_busy_server_are_the_plain_ones(case: str, tmp_path: Path) -> None:
    need_native_code()
    model_type, changes = CASES[case]
    make(tmp_path, model_type, {**WIDE, **changes, "max_position_embeddings": 256})
    model = load_bf16(tmp_path).model
    with torch.inference_mode():
        expected, _, preemptions = replies(model, False)
        found, way, _ = replies(model, True)
    assert found == expected and preemptions > 0
    assert way.counts["taken"] > 50 and way.counts["taken"] >= 0.95 * way.counts.total(), way.counts


@pytest.mark.parametrize(
    ("case", "kind"),
    [
        pytest.param("qwen3_5-delta", "draft", marks=pytest.mark.slow),
        ("kimi_linear-8top3", "oracle"),
        ("qwen3_5-delta", "mtp"),
        ("cohere2-window7-tied", "oracle"),
        pytest.param("falcon_h1-multipliers", "draft", marks=pytest.mark.slow),
    ],
)
def test_drafts_of_a_busy_server_are_captured(case: str, kind: str, tmp_path: Path) -> None:
    need_native_code()
    model_type, changes = CASES[case]
    sizes = {**WIDE, "max_position_embeddings": 256}
    if kind == "mtp":
        make_with_head(tmp_path / "model", case, **sizes)
    else:
        make(tmp_path / "model", model_type, {**sizes, **changes})
    make(tmp_path / "draft", "llama", sizes)
    model, draft = (load_bf16(tmp_path / name).model for name in ("model", "draft"))
    with torch.inference_mode():
        known = replies(model, False)[0] if kind == "oracle" else {}
        oracle = Oracle([(*drawn(number).prompt, *tokens) for number, tokens in known.items()])
        found = []
        for captured in (False, True):
            shape, proposer = CacheShape(192, 7, KEY_BLOCK), cast(Proposer, oracle)
            if kind == "draft":
                proposer = DraftModel(ModelRunner(draft), shape, model.nbytes)
            if kind == "mtp":
                head = open_model_folder(tmp_path / "model").mtp_head
                assert head is not None
                proposer = MtpProposer(MtpHead(head, ModelRunner(model)), shape)
            speculator = Recorded(proposer, partial(FixedDraftLength, 5))
            tokens, way, accepted = replies(model, captured, speculator)
            found.append((tokens, accepted, speculator.proposals))
    passes = way.counts + way.drafted
    assert found[0] == found[1] and (accepted > 60 or kind != "oracle")
    assert way.drafted["taken"] > 25 and passes["taken"] >= 0.95 * passes.total(), passes
