"""Test the promise of test_exactness.py for layers unlike Llama's: latent attention, state spaces, several streams.

Logits are compared bit for bit: each reply alone, among others in chunks of any size, after prefix hits and
preemptions, and with drafts of which some are rejected.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mycli.runtime.engine.sequence import Request
from mycli.runtime.memory.cache_shape import CacheShape, window_blocks
from mycli.runtime.models.config import KvDtype
from mycli.runtime.sampling.params import SamplingParams
from tests.runtime.engine.test_exactness import CONTEXT, Drawing, Recorded, recorded, requests, with_logits
from tests.runtime.engine.test_recurrent import Scripted
from tests.support.families import CASES, make
from tests.support.grids import chosen
from tests.support.native_parts import WIDE, need_native_code

# Products and vectors that native code multiplies: only they promise bits.
LATENT = {"qk_rope_head_dim": 32, "n_routed_experts": 32}
WHOLE = {"qk_rope_head_dim": 32, "q_lora_rank": None, "kv_lora_rank": 64, "qk_nope_head_dim": 32, "v_head_dim": 32}
CHANGES: Mapping[str, Mapping[str, Any]] = {
    "deepseek_v2-yarn": LATENT,
    "deepseek_v3-groups-yarn": LATENT,
    "glm4_moe_lite-8top3": LATENT,
    "mistral4-beyond": LATENT,
    "youtu-odd-sizes-half-split-biases-untied": WHOLE,
    "granitemoehybrid-8top3": {"mamba_n_heads": 8, "num_local_experts": 32, "shared_intermediate_size": 64},
    "bamba-2-groups": {"mamba_n_heads": 8},
    "mamba2-2-groups": {"hidden_size": 64},
    "nemotron_h-every-kind": {"n_routed_experts": 32},
    "jamba-8top3": {"mamba_dt_rank": 32, "num_experts": 32},
    "falcon_mamba-tied": {"time_step_rank": 32},
    "falcon_h1-multipliers": {"mamba_d_ssm": 128, "mamba_d_head": 32},
    "kimi_linear-8top3": {"qk_rope_head_dim": 32, "num_local_experts": 32},
    "bailing_hybrid-8top3": {"qk_rope_head_dim": 32, "num_experts": 32},
    "gemma3n-sparse-shared-kv": {"vocab_size_per_layer_input": 4096, "head_dim": 32, "laurel_rank": 32},
    "diffllama-gqa4:2": {},
    "smallthinker-layouts-softmax-tied": {"head_dim": 32, "intermediate_size": 64, "num_local_experts": 32},
    "doge-gqa4:2-window7-tied-biases": {"head_dim": 32},
    "gpt_oss-window7-gqa4:2": {"num_local_experts": 32},
    "gemma3-window7-tied": {},
    "llama4-chunk16-4top1": {"num_local_experts": 32},
}
BF16: tuple[KvDtype, ...] = ("auto", "int8", "int4")
# With experts in unpacked fp32 as well, Kimi Delta Attention does not have this promise yet.
WITHOUT_FP32 = ("kimi_linear-8top3", "bailing_hybrid-8top3")
GRID = [
    *((case, torch.bfloat16, kv) for case in CHANGES for kv in BF16),
    *((case, torch.float32, "auto") for case in CHANGES if case not in WITHOUT_FP32),
]
Replies = list[tuple[list[int], list[int]]]  # tokens, and hashes of the logits that each was drawn from
# Kimi Delta Attention, latent attention with gates, and experts in groups.
# And layers with a sliding window, which have cache blocks of their own.
QUICK = [("bailing_hybrid-8top3", torch.bfloat16, "int8")]


def drawing(runner: Recorded, shape: CacheShape, running: int, chunk: int, speculator: Scripted | None) -> Drawing:
    return Drawing(runner, shape, runner.config.vocab_size, running=running, chunk=chunk, speculator=speculator)


def windows(runner: Recorded, running: int, chunk: int) -> int:
    return window_blocks(runner.config, 1, running, chunk, 8) or 0


def each_alone(
    runner: Recorded, asked: Sequence[Request], chunk: int = 64, speculator: Scripted | None = None
) -> Replies:
    shape = CacheShape.contiguous(CONTEXT)
    return [with_logits(drawing(runner, shape, 1, chunk, speculator), [one])[0] for one in asked]


def preempted(runner: Recorded, asked: Sequence[Request], chunk: int, speculator: Scripted | None = None) -> Replies:
    engine = drawing(runner, CacheShape(CONTEXT, 12, 8, windows(runner, 6, chunk)), 6, chunk, speculator)
    found = with_logits(engine, asked)
    assert engine.stats.preemptions > 0
    return found


def check_after_hits(runner: Recorded, asked: Sequence[Request], texts: Replies, chunk: int) -> None:
    engine = drawing(runner, CacheShape(CONTEXT, 36, 8, windows(runner, 2, chunk)), 2, chunk, None)
    for one, (tokens, bits) in zip(asked, texts, strict=True):
        assert with_logits(engine, [one]) == [(tokens, bits)]
        before = engine.stats.prefix_hits
        second = replace(one, prompt=(*one.prompt, *tokens, 305, 306), limit=6)
        assert with_logits(engine, [second]) == each_alone(runner, [second])
        assert engine.stats.prefix_hits > before


@pytest.mark.parametrize(("case", "dtype", "kv"), chosen(GRID, quick=QUICK), ids=str)
def test_replies_have_the_bits_of_each_alone(case: str, dtype: torch.dtype, kv: KvDtype, tmp_path: Path) -> None:
    need_native_code()
    model_type, changes = CASES[case]
    make(tmp_path, model_type, {**WIDE, **changes, "vocab_size": 4096, "max_position_embeddings": 128, **CHANGES[case]})
    runner, asked = recorded(dtype, kv, tmp_path), requests(7, seed=1, most=24)
    expected = each_alone(runner, asked)
    assert each_alone(runner, asked, chunk=5) == expected
    for chunk in (3, 64):
        assert preempted(runner, asked, chunk) == expected
    check_after_hits(runner, asked, expected, 7)
    greedy = [replace(one, sampling=SamplingParams()) for one in asked]
    expected = each_alone(runner, greedy)
    texts = {one.prompt: tokens for one, (tokens, _) in zip(greedy, expected, strict=True)}
    drafts = Scripted(texts, 4, 3)
    assert each_alone(runner, greedy, speculator=drafts) == expected
    assert preempted(runner, greedy, 11, drafts) == expected
    assert drafts.accepted and drafts.refused
