"""Test latent attention: a native call equals its steps bit for bit under any chunking, batch, block size and cache."""

import random
from collections.abc import Mapping
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mycli.runtime.cache.batch import Chunk
from mycli.runtime.cache.kv_cache import KVCache, cache_dtype
from mycli.runtime.checkpoint.open_folder import open_model_folder
from mycli.runtime.device.placement import Placement
from mycli.runtime.engine.engine import Engine
from mycli.runtime.engine.loading.loader import load_model
from mycli.runtime.engine.model_runner import ModelRunner
from mycli.runtime.engine.sequence import Request
from mycli.runtime.memory.cache_shape import CacheShape
from mycli.runtime.models.config import KvDtype
from mycli.runtime.sampling.params import SamplingParams
from tests.support.engines import together
from tests.support.families import CASES, make
from tests.support.family_parts import SMALL
from tests.support.grids import chosen
from tests.support.native_parts import KINDS, PASSES, WIDE, load_bf16, need_native_code, same_as_by_steps

ROPE = {"qk_rope_head_dim": 32, "q_lora_rank": 64, "max_position_embeddings": 1024}
WHOLE_VECTORS = {**ROPE, "q_lora_rank": None, "kv_lora_rank": 64, "qk_nope_head_dim": 32, "v_head_dim": 32}
# Experts run natively only if their sizes are multiples of the vector width.
CHANGES: Mapping[str, Mapping[str, Any]] = {
    "deepseek_v2-groups-odd-sizes-biases-tied": {**WHOLE_VECTORS, "n_routed_experts": 32, "mlp_bias": False},
    "deepseek_v3-groups-yarn": {**ROPE, "n_routed_experts": 32},
    "minicpm3-tied": ROPE,
    "youtu-odd-sizes-half-split-biases-untied": WHOLE_VECTORS,
    "mistral4-beyond": {**ROPE, "n_routed_experts": 32},
}


@pytest.fixture(autouse=True)
def compiled() -> None:
    need_native_code()


def saved(folder: Path, case: str) -> Path:
    model_type, changes = CASES[case]
    make(folder, model_type, {**WIDE, **changes, **CHANGES[case]})
    return folder


@pytest.mark.parametrize(("case", "kv"), list(zip(CHANGES, cycle(KINDS), strict=False)), ids=str)
def test_the_part_has_the_bits_of_its_steps(
    case: str, kv: KvDtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = load_bf16(saved(tmp_path, case), kv)
    ran = same_as_by_steps(runner, kv, monkeypatch)
    assert ran.count("latent") == len(PASSES) * runner.config.layers


TOKENS, BLOCK_SIZE, BLOCKS = 530, 64, (4, 0, 7, 2, 8, 1, 6, 3, 5)
CASE = "deepseek_v3-groups-yarn"


def read(runner: ModelRunner, chunk: int) -> list[Tensor]:
    """Return the logits of a prompt read `chunk` tokens at a time in shuffled blocks, and the cache afterwards."""
    cache = KVCache(runner.config, len(BLOCKS), BLOCK_SIZE, runner.device, cache_dtype(runner.kv, runner.dtype))
    tokens = [4 + index * 7919 % (SMALL["vocab_size"] - 4) for index in range(TOKENS)]
    parts = [tokens[start : start + chunk] for start in range(0, TOKENS, chunk)]
    logits = [runner.run([Chunk(part, i * chunk, BLOCKS, len(part))], cache) for i, part in enumerate(parts)]
    stored = [part for layer in range(runner.config.layers) for part in cache.all(layer)]
    scales = [part.scales for part in stored if part.scales is not None]
    return [torch.cat(logits), *(part.data for part in stored), *scales]


@pytest.mark.parametrize(
    ("kv", "heads"), chosen([(kv, heads) for kv in KINDS for heads in (4, 40)], quick=[("int8", 4)]), ids=str
)
def test_a_prompt_in_chunks_has_the_bits_of_one_pass(kv: KvDtype, heads: int, tmp_path: Path) -> None:
    """The chunks are below and above the row limit of native calls and the attention chunk size; few and many heads."""
    model_type, changes = CASES[CASE]
    make(tmp_path, model_type, {**WIDE, **changes, **CHANGES[CASE], "num_attention_heads": heads})
    runner = load_bf16(tmp_path, kv)
    expected = read(runner, TOKENS)
    for chunk in (1, 7, 64, 512):
        assert all(torch.equal(one, other) for one, other in zip(read(runner, chunk), expected, strict=True)), chunk


@pytest.mark.parametrize(
    ("dtype", "kv"),
    chosen(
        [(torch.bfloat16, "auto"), (torch.float32, "int8"), (torch.bfloat16, "int4")], quick=[(torch.bfloat16, "int4")]
    ),
    ids=str,
)
def test_replies_are_the_same_alone_and_among_others(dtype: torch.dtype, kv: KvDtype, tmp_path: Path) -> None:
    """There are so few blocks that some requests are preempted, and prefixes are shared."""
    placement = Placement(torch.device("cpu"), dtype, kv=kv)
    runner = load_model(open_model_folder(saved(tmp_path, CASE)), placement)
    chance, vocab, context = random.Random(0), runner.config.vocab_size, 96
    begin = tuple(chance.randrange(4, vocab) for _ in range(18))
    requests = [
        Request((*begin[: 18 * (i % 2)], *range(4, 6 + 3 * i)), SamplingParams(0.8 * (i % 3), seed=i), limit=14)
        for i in range(8)
    ]
    alone = [together(Engine(runner, CacheShape.contiguous(context), vocab), [request])[0] for request in requests]
    engine = Engine(runner, CacheShape(context, 16, 8), vocab, running=6, chunk=11)
    assert together(engine, requests) == alone
    assert together(engine, requests) == alone
    assert engine.stats.preemptions > 0 and engine.stats.prefix_hits > 0
