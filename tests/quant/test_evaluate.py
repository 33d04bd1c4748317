"""Test scores against their definitions in float64 on the logits of the whole model, and the known score of pico."""

import json
import math
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from mycli.quant import evaluate as module
from mycli.quant.evaluate import Evaluation, TokenWindows, cut, evaluate, held_out_text, read_text
from mycli.quant.layer_streaming import StreamedModel
from mycli.quant.resident_model import ResidentModel
from mycli.runtime.checkpoint.open_folder import open_model_folder
from mycli.runtime.device.placement import Placement
from mycli.runtime.engine.loading.loader import load_model
from mycli.runtime.errors import ModelError, NotFoundError, UsageError
from mycli.runtime.tokenizer.tokenizer import Tokenizer
from tests.support.engines import whole
from tests.support.grids import chosen
from tests.support.native_code import instruction_set
from tests.support.native_parts import need_native_code
from tests.support.paths import PICO

FP32 = Placement(torch.device("cpu"), torch.float32)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(PICO, 4096)


@pytest.fixture(scope="module")
def noisy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "noisy"
    shutil.copytree(PICO, folder)
    tensors = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    for name, tensor in tensors.items():
        if "proj" in name:
            tensors[name] = tensor + (torch.randn(tensor.shape, generator=generator) * 0.02).bfloat16()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def log_probabilities(folder: Path, windows: Tensor) -> np.ndarray:
    model = load_model(open_model_folder(folder), FP32).model
    return whole(model, windows)[:, :-1].double().log_softmax(-1).numpy()


@pytest.fixture
def small_slices(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(module, "LOGITS_AT_ONCE", 7 * 4096)
    monkeypatch.setattr(module, "STREAM_BYTES", 2 * 64 * 2 * 256 * 4)
    yield


@pytest.mark.usefixtures("small_slices")
def test_scores_follow_their_definitions(tokenizer: Tokenizer, noisy: Path) -> None:
    text = cut(held_out_text(), tokenizer, 64, 5 * 64)
    result = evaluate(StreamedModel(open_model_folder(noisy), FP32), text, StreamedModel(open_model_folder(PICO), FP32))

    q, p = log_probabilities(noisy, text.windows), log_probabilities(PICO, text.windows)
    targets = text.windows[:, 1:].numpy()
    at = np.take_along_axis(q, targets[..., None], -1)[..., 0], np.take_along_axis(p, targets[..., None], -1)[..., 0]
    kl = (np.exp(p) * (p - q)).sum(-1)

    assert (result.windows, result.context, result.scored_tokens) == (5, 64, 5 * 63)
    assert result.perplexity.value == pytest.approx(math.exp(-at[0].mean()), rel=1e-4)
    spread = at[0].mean(1).std(ddof=1) / math.sqrt(5)
    assert result.perplexity.error == pytest.approx(math.exp(-at[0].mean()) * spread, rel=1e-3)
    found = result.divergence
    assert found is not None
    assert found.reference_perplexity.value == pytest.approx(math.exp(-at[1].mean()), rel=1e-4)
    assert found.kl.value == pytest.approx(kl.mean(), rel=1e-3)
    assert found.kl.error == pytest.approx(kl.mean(1).std(ddof=1) / math.sqrt(5), rel=1e-3)
    assert found.kl_median == pytest.approx(np.quantile(kl, 0.5, method="inverted_cdf"), rel=1e-3)
    assert found.kl_p99 == pytest.approx(np.quantile(kl, 0.99, method="inverted_cdf"), rel=1e-3)
    assert found.kl_max == pytest.approx(kl.max(), rel=1e-3)
    assert found.same_top1.value == pytest.approx((q.argmax(-1) == p.argmax(-1)).mean(), abs=1e-9)
    assert found.rms_dp == pytest.approx(np.sqrt(np.square(np.exp(at[0]) - np.exp(at[1])).mean()), rel=1e-3)
    assert kl.mean() > 1e-3, "the noise must matter, or nothing was tested"


def test_pico_has_the_perplexity_it_was_published_with(tokenizer: Tokenizer) -> None:
    text = cut(held_out_text(), tokenizer, 512, 16384)
    result = evaluate(StreamedModel(open_model_folder(PICO), FP32), text)
    assert (result.windows, result.begins_with_bos, result.dtype) == (32, False, "float32")
    assert result.perplexity.value == pytest.approx(37.51, abs=0.005)
    assert result.divergence is None


def test_a_model_does_not_diverge_from_itself(tokenizer: Tokenizer) -> None:
    model = StreamedModel(open_model_folder(PICO), FP32)
    result = evaluate(model, cut(held_out_text(), tokenizer, 64, 64), model)
    assert result.divergence is not None and result.perplexity.error is None
    assert result.divergence.kl.value < 1e-6 and result.divergence.kl_max < 1e-5
    assert result.divergence.same_top1.value == 1 and result.divergence.rms_dp == 0


def test_windows_do_not_overlap_and_the_tail_is_dropped(tokenizer: Tokenizer) -> None:
    text = "One day Leo lost a key. " * 20
    ids = tokenizer.encode(text, add_special=True)
    windows = cut(text, tokenizer, 16).windows
    assert windows.flatten().tolist() == ids[: len(ids) // 16 * 16]
    assert cut(text, tokenizer, 16, 40).windows.shape == (2, 16)


def test_what_cannot_be_scored_is_refused(tokenizer: Tokenizer, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="fewer than one window of 512"):
        cut("too short", tokenizer, 512)
    with pytest.raises(UsageError, match="each needs two"):
        cut("too short", tokenizer, 1)
    model = StreamedModel(open_model_folder(PICO), FP32)
    with pytest.raises(UsageError, match="windows of 4096 tokens exceed the model's context of 2048"):
        evaluate(model, TokenWindows(torch.zeros(1, 4096, dtype=torch.int64), False, ""))
    with pytest.raises(NotFoundError, match="none.txt"):
        read_text(tmp_path / "none.txt")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    with pytest.raises(UsageError, match="not UTF-8 at byte 3"):
        read_text(tmp_path / "latin.txt")


def test_the_shortest_and_the_longest_windows_are_scored(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cut("One day Leo lost a key.", tokenizer, 2, 2).windows.shape == (1, 2)
    with pytest.raises(UsageError, match="a limit of 15 tokens is less than one window of 16"):
        cut("One day Leo lost a key. " * 9, tokenizer, 16, 15)
    text = "One day Leo lost a key. " * 20
    monkeypatch.setattr(module, "MAX_TEXT", 100)  # a long text is tokenized in parts, of which only one begins it
    parts = [tokenizer.encode(text[at : at + 100], add_special=at == 0) for at in range(0, len(text), 100)]
    assert cut(text, tokenizer, 16).windows.flatten().tolist() == sum(parts, [])[: sum(map(len, parts)) // 16 * 16]
    folder = open_model_folder(PICO)
    model = StreamedModel(folder, FP32)
    model.config = replace(folder.config, max_context=16)
    assert evaluate(model, cut(text, tokenizer, 16, 16)).context == 16


def test_a_text_has_the_line_ends_of_a_file_in_text_mode(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_bytes(b"one\r\ntwo\rthree\n")
    assert read_text(tmp_path / "text.txt") == "one\ntwo\nthree\n"


def test_vocabularies_must_agree(tmp_path: Path) -> None:
    folder = tmp_path / "wider"
    shutil.copytree(PICO, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": 4097}))
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"] = torch.cat(
        [tensors["model.embed_tokens.weight"], torch.zeros(1, 256).bfloat16()]
    )
    save_file(tensors, folder / "model.safetensors")
    text = TokenWindows(torch.zeros(1, 8, dtype=torch.int64), False, "")
    with pytest.raises(UsageError, match="4096 and 4097"):
        evaluate(StreamedModel(open_model_folder(PICO), FP32), text, StreamedModel(open_model_folder(folder), FP32))


@pytest.mark.parametrize("fault", ["E3-activations-not-finite"])
def test_logits_that_are_not_finite_end_it(tmp_path: Path, fault: str) -> None:
    folder = tmp_path / "overflowing"
    shutil.copytree(PICO, folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.5.mlp.down_proj.weight"].fill_(3e38)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelError, match="not finite in torch.float32"):
        evaluate(StreamedModel(open_model_folder(folder), FP32), TokenWindows(torch.arange(8).view(1, 8), False, ""))


@pytest.mark.parametrize("variant", chosen(["avx2", "avx512", "avx512vnni", "emulated-amx"], ["avx2"]))
def test_portable_scores_have_the_bits_of_this_machine(
    variant: str, tokenizer: Tokenizer, noisy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    need_native_code()
    portable = replace(FP32, dtype=torch.bfloat16, portable=True)
    text = cut(held_out_text(), tokenizer, 90, 3 * 90)

    def scores() -> Evaluation:
        model, reference = (ResidentModel(open_model_folder(path), portable) for path in (noisy, PICO))
        return evaluate(model, text, reference)

    here = scores()
    instruction_set(variant, monkeypatch)
    assert scores() == here


def test_portable_scores_are_those_of_the_model(tokenizer: Tokenizer, noisy: Path) -> None:
    need_native_code()
    text = cut(held_out_text(), tokenizer, 90, 3 * 90)
    bf16 = replace(FP32, dtype=torch.bfloat16)
    folders = [open_model_folder(path) for path in (noisy, PICO)]
    model, reference = (ResidentModel(folder, replace(bf16, portable=True)) for folder in folders)
    found = evaluate(model, text, reference)
    expected = evaluate(StreamedModel(folders[0], bf16), text, StreamedModel(folders[1], bf16))
    assert found.perplexity.value == pytest.approx(expected.perplexity.value, rel=2e-3)
    assert found.divergence is not None and expected.divergence is not None
    assert found.divergence.kl.value == pytest.approx(expected.divergence.kl.value, rel=2e-2)
    assert found.divergence.rms_dp == pytest.approx(expected.divergence.rms_dp, rel=2e-2)
    assert found.divergence.kl_max == pytest.approx(expected.divergence.kl_max, rel=0.1)
