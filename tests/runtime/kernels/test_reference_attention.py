"""Test the plain attention kernels against written-out arithmetic."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from mycli.runtime.cache.kv_cache import Stored, quantize_vectors
from mycli.runtime.kernels import reference_attention
from mycli.runtime.kernels.reference_attention import attend_dense
from mycli.runtime.layers.attention import attention_mask

CPU = torch.device("cpu")


def written_out(
    query: Tensor, key: Tensor, value: Tensor, window: int | None, scale: float, softcap: float | None
) -> Tensor:
    """Compute one query, head and sequence at a time in fp64."""
    batch, tokens, heads, head_dim = query.shape
    length, copies = key.shape[2], heads // key.shape[1]
    out = torch.zeros(batch, tokens, heads, head_dim, dtype=torch.float64)
    for sequence in range(batch):
        for token in range(tokens):
            position = length - tokens + token
            first = 0 if window is None else max(0, position - window + 1)
            for head in range(heads):
                keys = key[sequence, head // copies, first : position + 1].double()
                scores = keys @ query[sequence, token, head].double() * scale
                if softcap is not None:
                    scores = softcap * torch.tanh(scores / softcap)
                weights = scores.softmax(0)
                out[sequence, token, head] = weights @ value[sequence, head // copies, first : position + 1].double()
    return out.flatten(2)


@pytest.mark.parametrize("softcap", [None, 0.7], ids=["uncapped", "cap0.7"])
@pytest.mark.parametrize("window", [None, 5], ids=["full", "window5"])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "tokens", "start"),
    [(4, 2, 1, 9), (4, 4, 7, 0), (2, 2, 2, 0), (6, 1, 4, 9), (2, 2, 3, 2)],
    ids=str,
)
@pytest.mark.parametrize("codes", [False, True], ids=["values", "int8"])
def test_scores_are_scaled_and_capped(
    heads: int, kv_heads: int, tokens: int, start: int, window: int | None, softcap: float | None, codes: bool
) -> None:
    generator = torch.Generator().manual_seed(heads + tokens)
    query = torch.randn(2, tokens, heads, 24, generator=generator)
    key, value = (torch.randn(2, kv_heads, start + tokens, 24, generator=generator) for _ in range(2))
    stored = [Stored(*quantize_vectors(each)) if codes else Stored(each) for each in (key, value)]
    key, value = (each.dense(torch.float32) for each in stored)
    mask = attention_mask(start, tokens, window, CPU)
    found = attend_dense(query, stored[0], stored[1], mask, window, 0.31, softcap)
    expected = written_out(query, key, value, window, 0.31, softcap)
    assert (found - expected).abs().max() < 1e-5


def test_capped_scores_have_gradients() -> None:
    """The tuning code differentiates through them."""
    query, key, value = (torch.randn(1, 3, 2, 8).requires_grad_() for _ in range(3))
    out = attend_dense(query, Stored(key.transpose(1, 2)), Stored(value.transpose(1, 2)), None, None, 0.3, 0.7)
    out.square().sum().backward()  # type: ignore[no-untyped-call]  # torch's stub
    assert all(each.grad is not None and bool(each.grad.abs().sum() > 0) for each in (query, key, value))


def test_on_a_gpu_heads_of_a_multiple_of_8_may_take_flash_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """The operator takes no others; without a GPU only the choice is tested."""
    checked: list[int] = []
    monkeypatch.setattr(reference_attention, "SDPAParams", lambda query, *_: checked.append(query.shape[3]))
    monkeypatch.setattr(reference_attention, "can_use_flash_attention", lambda params: False)
    for head_dim in (64, 60, 72, 128):
        tensor: Any = SimpleNamespace(is_cuda=True, shape=(1, 2, 3, head_dim))
        assert reference_attention._flash(tensor, tensor, tensor, None) is None
    assert checked == [64, 72, 128]
