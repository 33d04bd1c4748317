"""The tests of the vLLM comparison without vLLM: on synthetic logits, and on a copy that transformers reads."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from mycli.runtime.checkpoint.open_folder import open_model_folder
from tests.benchmarks.vllm_families import (
    differing_weights,
    judge,
    judged,
    quantized,
    round_inputs,
    rounded_rows,
    unpacked_model,
)

pytestmark = pytest.mark.usefixtures("short_calibration_text")

TOKENS, VOCABULARY = 256, 50


def noisy(logits: Tensor, spread: float, seed: int) -> Tensor:
    return logits + spread * torch.randn(logits.shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def truth() -> Tensor:
    return 2 * torch.randn(TOKENS, VOCABULARY, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("spread", "ok"), [(0.0, True), (0.05, True), (0.3, True), (0.9, False), (3.0, False)], ids=str
)
def test_as_near_as_rounded_inputs_is_near_enough(truth: Tensor, spread: float, ok: bool) -> None:
    """Noise up to the size of the rounding passes; noise three times as large does not."""
    verdict = judge(truth, noisy(truth, 0.3, 1), noisy(truth, spread, 2).argmax(-1))
    assert verdict.ok is ok
    assert (verdict.same == TOKENS) is (spread == 0.0) and verdict.tokens == TOKENS


def test_a_bar_of_nothing_takes_the_truth_alone(truth: Tensor) -> None:
    """Where rounding changes no token, a few tokens far below the best are more than chance."""
    best = truth.argmax(-1)
    assert judge(truth, truth, best).ok
    chosen = best.clone()
    chosen[::32] = truth[::32].argmin(-1)
    verdict = judge(truth, truth, chosen)
    assert not verdict.ok and verdict.same == TOKENS - TOKENS // 32 and verdict.allowed == 0


def test_rows_are_rounded_alone() -> None:
    rows = torch.tensor([[127.0, 0.4, -63.6], [1.27, 0.004, -0.636], [0.0, 0.0, 0.0]])
    wanted = torch.tensor([[127.0, 0.0, -64.0], [1.27, 0.0, -0.64], [0.0, 0.0, 0.0]])
    torch.testing.assert_close(rounded_rows(rows, 8), wanted)


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return quantized(tmp_path_factory.mktemp("qwen3_moe"), "qwen3_moe", "rtn")


def test_inputs_of_every_packed_product_are_rounded(copy: Path) -> None:
    """Rounding to 8 bits changes the logits; with 20 bits they equal those of transformers' own experts."""
    folder, tokens = open_model_folder(copy), torch.arange(3, 43).view(2, 20)
    found = {}
    with torch.no_grad():
        for bits in (0, 8, 20):
            model = nn.Module.float(unpacked_model(copy))
            if bits:
                round_inputs(model, folder, bits)
            found[bits] = model(tokens).logits
    size = found[0].norm()
    assert (found[20] - found[0]).norm() < 1e-3 * size
    assert 0.01 * size < (found[8] - found[0]).norm() < 0.5 * size


def test_replies_are_judged_and_weights_compared(copy: Path) -> None:
    """Greedy tokens of the reference pass, others fail; a differing weight is reported by name."""
    prompts = torch.randint(3, 4096, (4, 8), generator=torch.Generator().manual_seed(0))
    model = unpacked_model(copy)
    assert not differing_weights(open_model_folder(copy), model)
    model.model.layers[1].mlp.experts.down_proj.data[3, 0, 0] += 1
    assert differing_weights(open_model_folder(copy), model) == ["model.layers.1.mlp.experts.3.down_proj"]
    model = nn.Module.float(unpacked_model(copy))
    with torch.no_grad():
        tokens = prompts
        for _ in range(12):
            tokens = torch.cat((tokens, model(tokens).logits[:, -1:].argmax(-1)), dim=1)
    replies = tokens[:, prompts.shape[1] :]
    verdict, differing = judged(copy, prompts.tolist(), replies.tolist())
    assert verdict.ok and verdict.same == verdict.tokens == 48 and not differing
    verdict, _ = judged(copy, prompts.tolist(), (replies % 4000 + 7).tolist())
    assert not verdict.ok
