"""Test Mamba-1 and Mamba-2: a native call equals its steps bit for bit, for any chunking of the prompt."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mycli.runtime.cache.batch import Chunk
from mycli.runtime.cache.kv_cache import KVCache
from mycli.runtime.engine.model_runner import ModelRunner
from tests.support.families import CASES, make
from tests.support.family_parts import SMALL
from tests.support.native_parts import PASSES, WIDE, load_bf16, need_native_code, same_as_by_steps

GRANITE, NEMOTRON = "granitemoehybrid-8top3", "nemotron_h-every-kind"
# Attention beside Mamba-2, whose output has no norm, or one after the gate.
FALCON, NORMED_FALCON = "falcon_h1-multipliers", "falcon_h1-normed-after-gate-multipliers-biases"
FALCON_SIZES = {**WIDE, "head_dim": 32, "mamba_d_ssm": 128, "mamba_d_head": 32}
SIXTEEN_HEADS = {"mamba_n_heads": 16, "mamba_d_ssm": 256, "mamba_d_head": 16}
RANKED = {**WIDE, "time_step_rank": 32, "state_size": 16}
CHANGES: dict[str, dict[str, Any]] = {
    GRANITE: {**WIDE, "mamba_n_heads": 8, "num_local_experts": 32, "shared_intermediate_size": 64},
    NEMOTRON: {**WIDE, "n_routed_experts": 32},
    FALCON: FALCON_SIZES,
    NORMED_FALCON: {**FALCON_SIZES, **SIXTEEN_HEADS},
    "jamba-8top3": {**WIDE, "num_experts": 32, "mamba_dt_rank": 32, "num_attention_heads": 4},
    "mamba-odd-sizes-biases-untied": {**RANKED, "use_conv_bias": True},
    "falcon_mamba-tied": RANKED,
}
TOKENS = 150


@pytest.fixture(params=CHANGES)
def runner(request: pytest.FixtureRequest, tmp_path: Path) -> ModelRunner:
    need_native_code()
    model_type, changes = CASES[request.param]
    make(tmp_path, model_type, {**changes, **CHANGES[request.param]})
    return load_bf16(tmp_path)


def test_the_part_has_the_bits_of_its_steps(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """The case includes drafts: states do not advance over rejected tokens."""
    mixers = sum(spec.recurrent is not None for spec in runner.config.layer_specs)
    parts = same_as_by_steps(runner, "bf16", monkeypatch)
    assert parts.count("mamba-1") + parts.count("mamba") + parts.count("attention and mamba") == len(PASSES) * mixers
    assert parts.count("|") == len(PASSES), "one call"


def read(runner: ModelRunner, chunk: int) -> list[Tensor]:
    """Return the logits of a prompt read `chunk` tokens at a time, and the states afterwards."""
    cache = KVCache(runner.config, 1, TOKENS, runner.device, torch.bfloat16)
    tokens = [4 + index * 7919 % (SMALL["vocab_size"] - 4) for index in range(TOKENS)]
    parts = [tokens[start : start + chunk] for start in range(0, TOKENS, chunk)]
    logits = [runner.run([Chunk(part, i * chunk, (0,), len(part))], cache) for i, part in enumerate(parts)]
    recurrent = [spec.index for spec in runner.config.layer_specs if spec.recurrent is not None]
    return [torch.cat(logits), *(state for layer in recurrent for state in cache.states.layer(layer))]


def test_a_prompt_in_chunks_has_the_bits_of_one_pass(runner: ModelRunner) -> None:
    expected = read(runner, TOKENS)
    for chunk in (1, 7, 64, 100):
        assert all(torch.equal(one, other) for one, other in zip(read(runner, chunk), expected, strict=True)), chunk
