"""Test that a server of recurrent and latent models gives the same replies through the captured pass as without it.

A recording replaces the CUDA graph. Requests share prefixes, arrive late, are cancelled and preempted.
"""

import random
from collections import Counter
from pathlib import Path

import pytest
import torch

from mycli.runtime.engine.engine import Engine
from mycli.runtime.engine.model_runner import CacheShape, ModelRunner
from mycli.runtime.engine.passes import Passes
from mycli.runtime.engine.passes.base import PassInput
from mycli.runtime.engine.passes.captured import CapturedStep
from mycli.runtime.engine.passes.cuda import CudaPass
from mycli.runtime.engine.passes.plain import PlainPass
from mycli.runtime.engine.sequence import Request
from mycli.runtime.errors import Declined
from mycli.runtime.kernels.paged import KEY_BLOCK
from mycli.runtime.layers.transformer import Transformer
from mycli.runtime.sampling.params import SamplingParams
from tests.support.families import CASES, make
from tests.support.graphs import recording
from tests.support.native_parts import WIDE, load_bf16, need_native_code


class Noting(CudaPass):
    """Counts decode passes by the reason for declining them."""

    counts: Counter[str]

    def takes(self, work: PassInput) -> Declined | None:
        declined = super().takes(work)
        if work.rows == len(work.chunks):
            self.counts["taken" if declined is None else declined.code] += 1
        return declined


def replies(model: Transformer, captured: bool) -> tuple[dict[int, list[int]], Counter[str], int]:
    """Return the tokens of all requests, the decode passes taken, and the number of preemptions."""
    step, plain = CapturedStep(model), PlainPass(model)
    way = Noting(step, plain, recording, pytest.fail, name="captured")
    way.counts = Counter()
    passes = Passes((way, plain) if captured else (plain,), {})
    passes.makes_tokens = False
    engine = Engine(
        ModelRunner(model, passes=passes), CacheShape(192, 7, KEY_BLOCK), model.config.vocab_size, running=6
    )
    drawing, tokens, submitted = random.Random(5), dict[int, list[int]](), 0
    while submitted < 16 or engine.has_work:
        for _ in range(drawing.randrange(3) if submitted < 16 else 0):
            prompt = [7, 9, 11] * drawing.choice([0, 23, 30]) + [drawing.randrange(3, 90) for _ in range(9)]
            sampling = SamplingParams(temperature=drawing.choice([0.0, 1.0]), seed=submitted)
            engine.submit(Request(tuple(prompt), sampling, drawing.randrange(1, 60)))
            submitted += 1
        if drawing.random() < 0.03 and submitted:
            engine.cancel(drawing.randrange(submitted))
        for output in engine.step():
            tokens.setdefault(output.sequence, []).extend(output.tokens)
    return tokens, way.counts, engine.stats.preemptions


@pytest.mark.parametrize("case", ["qwen3_5-delta", "kimi_linear-8top3", "falcon_h1-multipliers", "deepseek_v2-yarn"])
def test_replies_of_a_busy_server_are_the_plain_ones(case: str, tmp_path: Path) -> None:
    need_native_code()
    model_type, changes = CASES[case]
    make(tmp_path, model_type, {**WIDE, **changes, "max_position_embeddings": 256})
    model = load_bf16(tmp_path).model
    with torch.inference_mode():
        expected, _, preemptions = replies(model, False)
        found, counts, _ = replies(model, True)
    assert found == expected and preemptions > 0
    assert counts["taken"] > 50 and counts["taken"] >= 0.95 * counts.total(), counts
