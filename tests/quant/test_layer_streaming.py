"""Check that a streamed model computes the same as the whole model, with one layer in memory."""

import os
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mycli.quant.layer_streaming import RememberedModel, StreamedModel
from mycli.runtime.cache.kv_cache import cache_dtype
from mycli.runtime.checkpoint.manifest import Manifest
from mycli.runtime.checkpoint.open_folder import open_model_folder
from mycli.runtime.device.placement import Placement
from mycli.runtime.engine.loading.loader import load_model
from mycli.runtime.layers.block import Block
from mycli.runtime.models.config import KvDtype
from tests.support.engines import whole
from tests.support.families import CASES, make
from tests.support.paths import PICO

FP32 = Placement(torch.device("cpu"), torch.float32)


@pytest.mark.parametrize("kv", ["auto", "bf16", "int8", "int4"])
def test_logits_equal_those_of_the_whole_model(kv: KvDtype) -> None:
    tokens = torch.randint(0, 4096, (5, 40), generator=torch.Generator().manual_seed(0))
    placement = replace(FP32, kv=kv)
    runner = load_model(open_model_folder(PICO), placement)
    expected = whole(runner.model, tokens, kind=cache_dtype(kv, torch.float32))
    exact = whole(runner.model, tokens)
    model = StreamedModel(open_model_folder(PICO), placement, at_once=80)  # two windows, then one
    with torch.inference_mode():  # as in generation, so that the same code multiplies in fp32
        logits = model.logits(model.hidden(tokens).flatten(0, 1)).view(5, 40, -1)
    if kv == "auto":
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    else:  # another summation order moves a few keys across a rounding boundary
        assert (logits - expected).norm() < 0.1 * (expected - exact).norm(), "the cache's rounding must be seen"


def test_tokens_without_per_layer_inputs_take_the_first_row(tmp_path: Path) -> None:
    model_type, changes = CASES["gemma3n-sparse-shared-kv"]
    # Two residual streams are the fewest.
    make(tmp_path, model_type, {**changes, "vocab_size_per_layer_input": 90, "altup_num_inputs": 2})
    folder = open_model_folder(tmp_path)
    tokens = torch.arange(57, 97)[None]
    model = StreamedModel(folder, FP32)
    expected = whole(load_model(folder, FP32).model, tokens)
    torch.testing.assert_close(model.logits(model.hidden(tokens)[0])[None], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("quick_configs")
def test_shared_keys_and_values_of_any_windows(tmp_path: Path) -> None:
    """Batches hold two windows; a layer that reads no other layer has no shared keys."""
    make(tmp_path, *CASES["gemma3n-sparse-shared-kv"])
    model = StreamedModel(open_model_folder(tmp_path), FP32, at_once=2 * 16)
    tokens = torch.randint(0, model.config.vocab_size, (5, 16), generator=torch.Generator().manual_seed(0))
    stream, side_inputs, context = model.embed(tokens), model.side_inputs(tokens), model.context(16)
    assert side_inputs is not None
    for layer in range(model.config.layers):
        model.advance(model.block(layer), stream, context, side_inputs)
    readers = [layer for layer in model.config.layer_specs if getattr(layer.mixer, "kv_source", None) is not None]
    assert readers and not side_inputs.shared_by_window(torch.tensor([0]), model.config.layer(0))
    for reader in readers:
        ((source, both),) = side_inputs.shared_by_window(torch.tensor([4, 1, 2]), reader).items()
        batches = [side_inputs.shared(batch)[source] for batch in model.batches(stream)]
        for part, stored in enumerate(both):
            every = torch.cat([batch[part].data for batch in batches])
            assert torch.equal(stored.data, every[[4, 1, 2]])


def test_one_layer_is_in_memory_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    alive: list[weakref.ref[Block]] = []
    load = Block.load

    def watched(self: Block, *arguments: object) -> None:
        assert not any(ref() is not None for ref in alive), "a layer was kept while the next was read"
        alive.append(weakref.ref(self))
        load(self, *arguments)  # type: ignore[arg-type]  # passed through

    monkeypatch.setattr(Block, "load", watched)
    calls: list[tuple[str, int, int]] = []
    StreamedModel(open_model_folder(PICO), FP32).hidden(
        torch.zeros(1, 4, dtype=torch.int64), lambda *step: calls.append(step)
    )
    assert len(alive) == 6
    assert calls == [("layers", layer, 6) for layer in range(7)]


@pytest.mark.parametrize(("twice", "runs"), [(False, [1, 1, 1, 1, 2]), (True, [1, 1, 2, 2, 3])])
def test_a_remembered_result_is_computed_once_or_for_two_readers(twice: bool, runs: list[int]) -> None:
    model = RememberedModel(open_model_folder(PICO), FP32, None, twice=twice)
    ends, counts = list[int](), list[int]()
    for token in (0, 0, 0, 0, 1):
        tokens = torch.full((1, 2), token)
        hidden = model.hidden(tokens, lambda _, done, total: ends.append(done) if done == total else None)
        assert torch.equal(hidden, StreamedModel(model.folder, FP32).hidden(tokens))
        counts.append(len(ends))
    assert counts == runs


def test_a_layer_is_read_ahead_where_it_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "posix_fadvise", lambda _, offset, count, how: asked.append((offset, count)))
    model = StreamedModel(open_model_folder(PICO), Placement(torch.device("cpu"), torch.float32))
    model.prefetch(2)
    entries = Manifest.open(PICO).tensors
    wanted = [entry for name, entry in entries.items() if name.startswith("model.layers.2.")]
    assert sorted(asked) == sorted((entry.offset, entry.nbytes) for entry in wanted) and len(asked) == 9
    monkeypatch.setattr(os, "open", lambda *_: (_ for _ in ()).throw(FileNotFoundError("gone")))
    model.prefetch(2)
    assert len(asked) == 9
