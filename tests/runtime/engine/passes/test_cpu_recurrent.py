"""Test recurrent layers in one native call with the parts around them: bits equal to separate steps, and states too."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from mycli.runtime.cache.batch import Chunk
from mycli.runtime.cache.kv_cache import KVCache
from mycli.runtime.engine.passes.cpu_parts import native_part
from mycli.runtime.errors import Declined
from mycli.runtime.layers.block import Recurrent
from tests.support.families import CASES, make
from tests.support.native_parts import (
    BLOCK_SIZE,
    HEAD,
    PASSES,
    WIDE,
    OnlyCalled,
    load_bf16,
    need_native_code,
    pack_linear,
    same_as_by_steps,
)


@pytest.fixture(autouse=True)
def compiled() -> None:
    need_native_code()


# Heads that share keys; projections in order, from two products or grouped by key head, next to gated attention;
# convolutions with biases.
QUARTER = {"head_dim": 128}  # a quarter of it is rotated


RECURRENT: Mapping[str, tuple[Mapping[str, Any], Sequence[str]]] = {
    "qwen3_5-delta": (QUARTER, ["delta", "mlp"] * 3 + ["attention", "mlp"]),
    "qwen3_5_moe-8top3": (QUARTER, ["delta", "experts"] * 3 + ["attention", "experts"]),
    "qwen3_next-8top3": (QUARTER, ["delta", "experts"] * 3 + ["attention", "experts"]),
    "kimi_linear-8top3": (
        {"linear_head_dim": 32},
        ["kimi delta", "mlp", "latent", "experts", "kimi delta", "experts"],
    ),
    "bailing_hybrid-8top3": (
        {"num_hidden_layers": 3, "n_group": 1, "qk_rope_head_dim": 32},
        ["kimi delta", "mlp", "latent", "mlp", "kimi delta", "experts"],
    ),
    "lfm2-tied": (HEAD, ["convolution", "mlp", "attention", "mlp", "convolution", "mlp"]),
    "lfm2-untied-biases": (HEAD, ["attention", "mlp"] + ["convolution", "mlp"] * 2),
}


@pytest.mark.parametrize("bits", (None, 4), ids=("dense", "int4"))
@pytest.mark.parametrize("case", RECURRENT)
def test_recurrent_parts_have_the_bits_of_their_steps(
    case: str, bits: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The states are equal too; they advance by the accepted draft tokens."""
    model_type, changes = CASES[case]
    more, parts = RECURRENT[case]
    make(tmp_path, model_type, {**WIDE, **changes, **more})
    runner = load_bf16(tmp_path)
    mixers = [layer.mixer for layer in runner.model.layers() if isinstance(layer.mixer, Recurrent)]
    for seed, linear in enumerate(linear for mixer in mixers if bits for linear in mixer.products):
        pack_linear(linear, bits or 4, 32, seed)
    assert same_as_by_steps(runner, "bf16", monkeypatch) == len(PASSES) * [*parts, "|"]


def test_a_recurrent_layer_that_native_code_does_not_take_stands_between_two_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The states of this layer and its neighbours start with a prompt and wait for the accepted draft tokens."""
    model_type, changes = CASES["qwen3_5-delta"]
    make(tmp_path, model_type, {**WIDE, **changes, **QUARTER})
    runner = load_bf16(tmp_path)
    mixer = next(layer for layer in runner.model.layers() if layer.spec.index == 1).mixer
    mixer.mixer.out.replace(OnlyCalled(mixer.mixer.out.weight()))
    whole = ["delta", "mlp", "|", "mlp", "delta", "mlp", "attention", "mlp", "|"]
    assert same_as_by_steps(runner, "bf16", monkeypatch) == len(PASSES) * whole


def test_a_gain_in_fp32_is_declined(tmp_path: Path) -> None:
    model_type, changes = CASES["qwen3_5-delta"]
    make(tmp_path, model_type, {**WIDE, **changes, **QUARTER})
    mixer = next(load_bf16(tmp_path).model.layers()).mixer
    mixer.mixer.norm.weight = mixer.mixer.norm.weight.float()
    assert native_part(mixer) == Declined("recurrent-gain-dtype", {"dtype": "torch.float32"})


def test_slots_that_there_are_not_are_refused(tmp_path: Path) -> None:
    """The call must not read or write outside of the states."""
    model_type, changes = CASES["lfm2-tied"]
    make(tmp_path, model_type, {**WIDE, **changes, **HEAD})
    runner = load_bf16(tmp_path)
    cache = KVCache(runner.config, 6, BLOCK_SIZE, runner.device, torch.bfloat16, slots=2)
    both = Chunk([4], 1, (0,), 1, 1), Chunk([5], 1, (1,), 1, 1)
    for chunks in (both, [Chunk([4], 1, (0,), 1, 2)], [Chunk([4], 1, (0,), 1, -1)]):
        with pytest.raises(ValueError, match="slot"):
            runner.run(chunks, cache)
