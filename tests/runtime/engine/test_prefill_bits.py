"""Test that a whole model reads a prompt in chunks of any size with the same bits, in logits and cache.

Passes of up to 64 rows run parts of layers natively, longer ones step by step, and attention processes positions in
chunks of 256: the sizes are below and above each.
"""

import pytest
import torch
from torch import Tensor

from mycli.runtime.cache.batch import Chunk
from mycli.runtime.cache.kv_cache import KVCache, cache_dtype
from mycli.runtime.checkpoint.open_folder import open_model_folder
from mycli.runtime.device.placement import Placement
from mycli.runtime.engine.loading.loader import load_model
from mycli.runtime.engine.model_runner import ModelRunner
from mycli.runtime.models.config import KvDtype
from tests.support.native_code import VARIANTS, instruction_set
from tests.support.paths import PICO

TOKENS, BLOCK_SIZE, BLOCKS = 530, 64, (4, 0, 7, 2, 8, 1, 6, 3, 5)
CHUNKS = (1, 7, 64, 512)
KINDS: tuple[KvDtype, ...] = ("bf16", "int8", "int4")


def read(runner: ModelRunner, chunk: int) -> tuple[Tensor, list[Tensor]]:
    cache = KVCache(runner.config, len(BLOCKS), BLOCK_SIZE, runner.device, cache_dtype(runner.kv, runner.dtype))
    text = [(index * 7919 + 13) % runner.config.vocab_size for index in range(TOKENS)]
    parts = [text[start : start + chunk] for start in range(0, TOKENS, chunk)]
    chunks = [Chunk(part, index * chunk, BLOCKS, len(part)) for index, part in enumerate(parts)]
    logits = torch.cat([runner.run([one], cache) for one in chunks])
    held = [one for layer in range(runner.config.layers) for one in cache.all(layer)]
    return logits, [one.data for one in held] + [one.scales for one in held if one.scales is not None]


@pytest.mark.parametrize(
    ("variant", "kv"),
    [
        pytest.param(variant, kv, marks=[] if (variant, kv) == ("native", "int4") else pytest.mark.slow)
        for variant in VARIANTS
        for kv in KINDS
    ],
)
def test_a_prompt_in_chunks_has_the_bits_of_one_pass(
    variant: str, kv: KvDtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    instruction_set(variant, monkeypatch)
    runner = load_model(open_model_folder(PICO), Placement(torch.device("cpu"), torch.bfloat16, kv=kv))
    logits, held = read(runner, TOKENS)
    for chunk in CHUNKS:
        found, cached = read(runner, chunk)
        assert torch.equal(found, logits), chunk
        assert all(torch.equal(one, other) for one, other in zip(cached, held, strict=True)), chunk
