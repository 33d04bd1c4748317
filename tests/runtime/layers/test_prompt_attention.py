"""Test sequence-by-sequence attention of prompt chunks, as where no kernel reads blocks, against whole prompts."""

from dataclasses import replace

import pytest
import torch

from mycli.runtime.cache.batch import Batch, Chunk
from mycli.runtime.cache.kv_cache import KVCache
from mycli.runtime.kernels import reference_attention
from mycli.runtime.layers import attention
from mycli.runtime.layers.attention import PagedAttention, PromptAttention
from mycli.runtime.models.part_spec import AttentionSpec, LinearSpec
from tests.support.prefix_model import CONFIG, CPU
from tests.support.random_tensors import normal

TOKENS, HEADS, KV_HEADS, HEAD_DIM = 50, 4, 2, 16


@pytest.mark.parametrize("sinks", [False, True], ids=["plain", "sinks"])
@pytest.mark.parametrize("window", [None, 1, 7, 20, 64], ids=str)
def test_chunks_see_what_whole_prompts_see(window: int | None, sinks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mask is never wider than the window, and torch gets no mask without a window."""
    qkv, o = LinearSpec("qkv", 1, 1), LinearSpec("o", 1, 1)
    spec = AttentionSpec(HEADS, KV_HEADS, HEAD_DIM, window, None, (qkv,), None, None, o)
    config = replace(CONFIG, heads=HEADS, kv_heads=KV_HEADS, head_dim=HEAD_DIM)
    query = normal(1, TOKENS, HEADS, HEAD_DIM)
    key, value = (normal(1, TOKENS, KV_HEADS, HEAD_DIM, seed=seed) for seed in (1, 2))
    extra = normal(HEADS, seed=3) if sinks else None
    expected = PromptAttention().attend(0, query, (key, value), spec, extra)
    widths, attend = set(), reference_attention.attend_dense

    def watched(*arguments: object) -> torch.Tensor:
        mask = arguments[3]
        widths.add(mask.shape[1] if isinstance(mask, torch.Tensor) else None)
        return attend(*arguments)  # type: ignore[arg-type]  # passed on

    monkeypatch.setattr(attention, "ATTENTION", watched)
    cache, start = KVCache(config, 4, 16, CPU, torch.float32), 0
    for count in (1, 12, 3, 20, 14):
        chunk = Chunk([0] * count, start, (2, 0, 3, 1), 0)
        part = slice(start, start + count)
        context = PagedAttention(Batch.of([chunk], 16, CPU), cache, portable=False)
        context.attend(0, query[:, part], (key[:, part], value[:, part]), spec, extra)  # writes the cache
        found = context._attend_gathered(0, query[:, part], spec, extra)
        assert torch.allclose(found, expected[:, part], atol=1e-5), (start, count)
        start += count
    if window is None or window >= TOKENS:
        assert widths == {None}
    else:
        assert max(width or 0 for width in widths) <= window + 19
