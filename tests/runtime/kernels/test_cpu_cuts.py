"""Test that a row has the same bits wherever a prompt is cut into passes, for operations of any size and for models."""

import random
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import Tensor

from mycli.runtime.cache.batch import Chunk
from mycli.runtime.cache.kv_cache import KVCache, Stored
from mycli.runtime.engine.model_runner import ModelRunner
from mycli.runtime.kernels.cpu.library.build import Native
from mycli.runtime.kernels.paged import KEY_BLOCK, Ragged, Scoring
from mycli.runtime.kernels.registry import (
    ACTIVATION,
    DENSE_PRODUCT,
    HEAD_PRODUCT,
    LATENT_ATTENTION,
    LAYER_NORM,
    PAGED_ATTENTION,
    RMS_NORM,
    ROTATION,
    ROW_WEIGHTS,
)
from tests.support.families import CASES, make
from tests.support.grids import chosen
from tests.support.native_code import VECTORS
from tests.support.native_parts import WIDE, load_bf16, need_native_code, plain_passes
from tests.support.random_tensors import normal

pytestmark = pytest.mark.usefixtures("vectors")
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
BLOCK_SIZE = 16


def cuts(length: int, seed: int) -> list[list[tuple[int, int]]]:
    """Return ways of cutting `length` rows: random ones, and the last row, few rows and many rows by themselves."""
    choice = random.Random(seed)
    ends = [[length - 1], [length - 17], [length // 2], *(choice.sample(range(1, length), 3) for _ in range(3))]
    bounds = [[0, *sorted(inner), length] for inner in ends]
    return [list(zip(bound, bound[1:], strict=False)) for bound in bounds]


@torch.inference_mode()
def same_however_cut(operation: Callable[[int, int], Tensor], length: int, seed: int = 0) -> None:
    """Compare `operation(first, end)`, the result of these rows, with that of all rows."""
    whole = operation(0, length)
    for pieces in cuts(length, seed):
        assert torch.equal(torch.cat([operation(*piece) for piece in pieces]), whole), pieces


def stored(length: int, heads: int, size: int, dtype: torch.dtype, seed: int) -> Stored:
    """Return random vectors in blocks, one after another."""
    blocks = -(-length // BLOCK_SIZE)
    return Stored(normal(blocks, heads, BLOCK_SIZE, size, seed=seed).to(dtype))


def ragged(first: int, end: int) -> Ragged:
    """Return a pass over the tokens [first, end) of one sequence."""
    table = torch.arange(-(-end // BLOCK_SIZE), dtype=torch.int32)[None]
    starts, lengths = torch.tensor([0, end - first], dtype=torch.int32), torch.tensor([end], dtype=torch.int32)
    return Ragged(starts, lengths, table)


@DTYPES
@pytest.mark.parametrize("more", [{}, {"softcap": 2.0}, {"window": 16}, {"chunk": 64}], ids=str)
@pytest.mark.parametrize(("kv_heads", "group", "head_dim"), [(1, 4, 24), (2, 2, 20), (1, 4, 64), (2, 1, 72)], ids=str)
def test_attention(kv_heads: int, group: int, head_dim: int, more: dict[str, int], dtype: torch.dtype) -> None:
    for seed, length in enumerate((60, 200, 271, 400)):
        query = (2 * normal(length, kv_heads * group, head_dim, seed=seed)).to(dtype)
        keys, values = (stored(length, kv_heads, head_dim, dtype, seed + 10 * kind) for kind in (1, 2))
        sinks = normal(kv_heads * group, seed=3) if seed % 2 else None
        scoring = Scoring(head_dim**-0.5, sinks=sinks, **more)

        def attend(first: int, end: int) -> Tensor:
            return PAGED_ATTENTION(query[first:end], keys, values, ragged(first, end), scoring)  # noqa: B023

        same_however_cut(attend, length, seed)


@DTYPES
@pytest.mark.parametrize(("heads", "rank", "rope_dim"), [(4, 20, 6), (3, 24, 8), (4, 64, 32)], ids=str)
def test_latent_attention(heads: int, rank: int, rope_dim: int, dtype: torch.dtype) -> None:
    length = 300
    query, rotated_query = (normal(length, heads, size, seed=size).to(dtype) for size in (rank, rope_dim))
    latents, rotated = (stored(length, 1, size, dtype, 5) for size in (rank, rope_dim))

    def attend(first: int, end: int) -> Tensor:
        rows = slice(first, end)
        return LATENT_ATTENTION(query[rows], rotated_query[rows], latents, rotated, ragged(first, end), 0.2)

    same_however_cut(attend, length)


@DTYPES
@pytest.mark.parametrize("inputs", [1, 4, 12, 24, 40, 100, 128])
def test_products(inputs: int, dtype: torch.dtype) -> None:
    x, weight = normal(200, inputs).to(dtype), normal(45, inputs, seed=1).to(dtype)
    same_however_cut(lambda first, end: DENSE_PRODUCT(x[first:end], weight), 200)
    heads, by_head = normal(200, 3, inputs, seed=2).to(dtype), normal(3, 20, inputs, seed=3).to(dtype)
    same_however_cut(lambda first, end: HEAD_PRODUCT(heads[first:end], by_head), 200)


@DTYPES
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("size", [12, 24, 88, 1000, 1024])
def test_activations_and_norms(size: int, threads: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    gate_up = (3 * normal(200, 2 * size)).to(dtype)
    x, gate, gain = gate_up[:, :size], gate_up[:, size:], (1 + normal(size, seed=1) / 4).to(dtype)
    cos, sin = (normal(200, size // 2, seed=seed).to(dtype) for seed in (2, 3))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for activation in ACTIVATION.values():
            same_however_cut(lambda first, end, run=activation: run(gate_up[first:end]), 200)  # type: ignore[misc]
        same_however_cut(lambda first, end: ROW_WEIGHTS(x[first:end], gate[first:end]), 200)
        same_however_cut(lambda first, end: ROW_WEIGHTS(x[first:end], gate[first:end, :1]), 200)
        same_however_cut(lambda first, end: RMS_NORM(x[first:end], gain, 1e-5), 200)
        same_however_cut(lambda first, end: LAYER_NORM(x[first:end], gain, 1e-5, gain), 200)
        one_head = x.unsqueeze(1)
        same_however_cut(
            lambda first, end: ROTATION(one_head[None, first:end], cos[first:end], sin[first:end], False)[0], 200
        )
    finally:
        torch.set_num_threads(before)


MODELS = (
    "gemma2-mqa-low-caps-untied",
    "glm4_moe-8top3-scaled",
    "mellum-dense-tied-biases",
    "mistral4-groups-odd-sizes-unnormalized-tied",
    "qwen3_next-odd-heads-every-other-unnormalized-tied",
    "falcon_h1-normed-odd-sizes-biases-tied",
    "mistral-window7",
)


def last_logits(runner: ModelRunner, tokens: Sequence[int], pieces: Sequence[tuple[int, int]]) -> Tensor:
    cache = KVCache(runner.config, 12, KEY_BLOCK, runner.device, runner.dtype, slots=3)
    runner.rope(6 * KEY_BLOCK)
    for first, end in pieces:
        logits = runner.run([Chunk(list(tokens[first:end]), first, (7, 2, 9, 4, 0, 11), 1, 2)], cache).clone()
    return logits


# Every model with this machine's own vectors, and two kinds of layers with the oldest ones.
RUNS = product(MODELS, VECTORS)
QUICK_RUNS = [
    *((case, "native") for case in MODELS if not case.startswith("qwen3_next")),
    *((case, "avx2") for case in (MODELS[0], MODELS[3])),
]


@pytest.mark.parametrize(("case", "vectors"), chosen(RUNS, QUICK_RUNS), indirect=["vectors"])
def test_models(case: str, vectors: Native, tmp_path: Path) -> None:
    need_native_code()
    model_type, changes = CASES[case]
    make(tmp_path, model_type, {**WIDE, **changes, "max_position_embeddings": 512})
    model = load_bf16(tmp_path).model
    runner = ModelRunner(model, "auto", plain_passes(model))
    tokens = torch.randint(3, model.config.vocab_size, (300,), generator=torch.Generator().manual_seed(1)).tolist()
    for seed, length in enumerate((67, 210, 290)):
        whole = last_logits(runner, tokens, [(0, length)])
        for pieces in cuts(length, seed):
            assert torch.equal(last_logits(runner, tokens, pieces), whole), pieces
