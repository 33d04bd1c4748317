"""Parts of layers in one native call: the bits of their steps one by one, in every family, and what is declined."""

import gc
import weakref
from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from mycli.runtime.cache.block_table import Chunk
from mycli.runtime.cache.kv_cache import KVCache, cache_dtype
from mycli.runtime.checkpoint.model_folder import ModelFolder
from mycli.runtime.device.placement import Placement
from mycli.runtime.engine.loader import load_model
from mycli.runtime.engine.model_runner import ModelRunner
from mycli.runtime.kernels.cpu import build
from mycli.runtime.kernels.cpu.layer import (
    CAttentionPart,
    CChain,
    CConvolutionPart,
    CDeltaPart,
    CExpertsPart,
    CMlpPart,
    CParallelPart,
    CToldPart,
)
from mycli.runtime.kernels.registry import prepare_product
from mycli.runtime.layers import transformer
from mycli.runtime.layers.batch import Batch
from mycli.runtime.layers.block import Attention, Recurrent
from mycli.runtime.layers.feed_forward import Experts, Mlp
from mycli.runtime.layers.linear import Linear, dense_matmul
from mycli.runtime.layers.native import NATIVE_ROWS, NativePass
from mycli.runtime.layers.rope import Rope
from mycli.runtime.models.config import Kv
from mycli.runtime.quantization.packed_weight import PackedWeight, pack
from mycli.runtime.quantization.scheme import Packing
from tests.support.families import CASES, make
from tests.support.models import random_model

CONTEXT, BLOCK_SIZE = 32, 8
WIDE = {"hidden_size": 128, "intermediate_size": 96}  # whole vectors in every head and MLP
KINDS: tuple[Kv, ...] = ("bf16", "int8", "int4")
# Two sequences in blocks and states that lie anywhere: read in part, one after the other, together, cut back by one.
PASSES: Sequence[Sequence[Chunk]] = (
    [Chunk(list(range(4, 17)), 0, (3, 1), 13, 2)],
    [Chunk([40], 13, (3, 1), 1, 2), Chunk(list(range(50, 59)), 0, (5, 2), 9)],
    [Chunk([41, 42], 14, (3, 1), 2, 2, drafted=1), Chunk([60], 9, (5, 2), 1, 0, drafted=1)],
    [Chunk([43], 15, (3, 1), 1, 2), Chunk([61], 9, (5, 2), 1)],
)
STAND = {2: 1, 0: 0}  # of the tokens that the third pass drafted, by state


@pytest.fixture(autouse=True)
def compiled() -> None:
    if isinstance(found := build.native(), str):
        pytest.skip(f"no native code here: {found}")


NAMES = {
    CAttentionPart: "attention",
    CMlpPart: "mlp",
    CExpertsPart: "experts",
    CParallelPart: "parallel",
    CToldPart: "told",
    CDeltaPart: "delta",
    CConvolutionPart: "convolution",
}


class OnlyCalled:
    """A weight that nobody but its own code multiplies by."""

    def __init__(self, weight: Tensor) -> None:
        self._weight = weight
        self.nbytes = weight.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        return functional.linear(x, self._weight)

    def dequantize(self) -> Tensor:
        return self._weight


def load(folder: Path, kv: Kv = "bf16") -> ModelRunner:
    return load_model(ModelFolder.open(folder), Placement(torch.device("cpu"), torch.bfloat16, kv))


def by_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NativePass, "make", lambda *_: None)
    monkeypatch.setattr(transformer, "native_code", lambda *_: None)


def run(runner: ModelRunner, kv: Kv) -> list[Tensor]:
    """Logits of `PASSES` and all that the cache holds after them."""
    cache = KVCache(runner.config, 6, BLOCK_SIZE, runner.device, cache_dtype(kv, runner.dtype), slots=4)
    rope = Rope(runner.config, CONTEXT, runner.device, runner.dtype)
    logits = []
    for chunks in PASSES:
        logits.append(runner.model(Batch.of(chunks, BLOCK_SIZE, runner.device), rope, cache))
        for slot, count in STAND.items():
            cache.states.settle(slot, count)
    parts = [part for layer in range(runner.config.layers) for part in cache.all(layer)]
    scales = [part.scales for part in parts if part.scales is not None]
    recurrent = [spec.index for spec in runner.config.layer_specs if spec.recurrent is not None]
    states = [state for layer in recurrent for state in cache.states.layer(layer)]
    return [one.nan_to_num(77) for one in (*logits, *(part.data for part in parts), *scales, *states)]


def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kinds of parts that native code runs, as they come; "|" after those of one call."""
    found: list[str] = []
    plain = CChain.__call__

    def counting(self: CChain, *arguments: Any) -> Tensor:
        found.extend([*(NAMES[type(part)] for part in self.parts), "|"])
        return plain(self, *arguments)

    monkeypatch.setattr(CChain, "__call__", counting)
    return found


def same_as_by_steps(runner: ModelRunner, kv: Kv, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Compares; the parts that were run natively."""
    with monkeypatch.context() as patch:
        ran = counted(patch)
        whole = run(runner, kv)
    with monkeypatch.context() as patch:
        by_steps(patch)
        stepwise = run(runner, kv)
    for index, (one, other) in enumerate(zip(whole, stepwise, strict=True)):
        assert torch.equal(one, other), index
    return ran


HEAD = {"head_dim": 32}
# Those that have everything: biases; norms before and after, caps and windows; layers that lend, factors on the sum,
# norms of values; norms of all heads at once; factors on what is added; norms after the rotation; neighbours turned;
# heads turned in part; attention and MLP side by side after a LayerNorm; an MLP without a gate; factors of queries.
WHOLE: Mapping[str, Mapping[str, Any]] = {
    "llama-biases": {},
    "gemma2-mqa-low-caps-untied": HEAD,
    "gemma4-told-lent-double": {"head_dim": 32, "global_head_dim": 64},
    "olmo2-mha-tied-biases": {},
    "granite-multipliers": {},
    "hunyuan-alpha": HEAD,
    "ernie4_5-untied-biases": HEAD,
    "glm4-half-turned": {"head_dim": 64},
    "cohere2-window7-tied": HEAD,
    "arcee-yarn": HEAD,
    "ministral3-beyond": HEAD,
}
PARTS = {"gemma4-told-lent-double": ["attention", "mlp", "told"], "cohere2-window7-tied": ["parallel"]}


@pytest.mark.parametrize(("case", "kv"), list(zip(WHOLE, cycle(KINDS))), ids=str)
def test_parts_have_the_bits_of_their_steps(case: str, kv: Kv, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model_type, changes = CASES[case]
    make(tmp_path, model_type, {**WIDE, **changes, **WHOLE[case]})
    runner = load(tmp_path, kv)
    each = runner.config.layers * PARTS.get(case, ["attention", "mlp"])
    assert same_as_by_steps(runner, kv, monkeypatch) == len(PASSES) * [*each, "|"]


def test_sinks_have_the_bits_of_their_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside experts that are not taken: a call for each attention."""
    model_type, changes = CASES["gpt_oss-window7-gqa4:2"]
    make(tmp_path, model_type, {**WIDE, **changes, **HEAD})
    runner = load(tmp_path)
    ran = same_as_by_steps(runner, "bf16", monkeypatch)
    assert ran == len(PASSES) * runner.config.layers * ["attention", "|"]


# Experts, and which layers have them: weighted over all scores, or among the chosen beside layers without; a shared one
# behind a gate; factors on what is added; norms for router, experts and the shared one, and factors of their weights.
EXPERTS: Mapping[str, tuple[Mapping[str, Any], Sequence[str]]] = {
    "qwen3_moe-8top2": (HEAD, ["experts"] * 3),
    "qwen3_moe-every-other-normalized-tied": (HEAD, ["mlp", "experts", "mlp", "mlp"]),
    "qwen2_moe-shared": ({}, ["experts"] * 3),
    "granitemoe-8top2": ({}, ["experts"] * 3),
    "gemma4-8top2": ({"head_dim": 32, "global_head_dim": 64}, ["experts"] * 3),
}


def pack_linear(linear: Linear, bits: int, group: int, seed: int = 0) -> None:
    """Random codes in the layout of our own code."""
    generator = torch.Generator().manual_seed(seed)
    shape = linear.out_features, linear.in_features
    codes = torch.randint(0, 1 << bits, shape, generator=generator).to(torch.uint8)
    scales = torch.rand(shape[0], shape[1] // group, generator=generator).bfloat16() / (8 << bits)
    weight = PackedWeight(pack(codes, bits), scales, Packing(bits, group), shape[1])
    linear.replace(prepare_product(weight, torch.bfloat16))


# Heads that share keys, what is projected in order, of two products or key head by key head, beside gated attention;
# and convolutions, with biases.
QUARTER = {"head_dim": 128}  # of which a quarter is turned
RECURRENT: Mapping[str, tuple[Mapping[str, Any], Sequence[str]]] = {
    "qwen3_5-delta": (QUARTER, ["delta", "mlp"] * 3 + ["attention", "mlp"]),
    "qwen3_5_moe-8top3": (QUARTER, ["delta", "experts"] * 3 + ["attention", "experts"]),
    "qwen3_next-8top3": (QUARTER, ["delta", "experts"] * 3 + ["attention", "experts"]),
    "lfm2-tied": (HEAD, ["convolution", "mlp", "attention", "mlp", "convolution", "mlp"]),
    "lfm2-untied-biases": (HEAD, ["attention", "mlp"] + ["convolution", "mlp"] * 2),
}


@pytest.mark.parametrize("bits", (None, 4), ids=("dense", "int4"))
@pytest.mark.parametrize("case", RECURRENT)
def test_recurrent_parts_have_the_bits_of_their_steps(
    case: str, bits: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And their states, which go on by what stands of a draft."""
    model_type, changes = CASES[case]
    more, parts = RECURRENT[case]
    make(tmp_path, model_type, {**WIDE, **changes, **more})
    runner = load(tmp_path)
    mixers = [layer.mixer for layer in runner.model.layers() if isinstance(layer.mixer, Recurrent)]
    for seed, linear in enumerate(linear for mixer in mixers if bits for linear in mixer.products):
        pack_linear(linear, bits or 4, 32, seed)
    assert same_as_by_steps(runner, "bf16", monkeypatch) == len(PASSES) * [*parts, "|"]


def test_a_recurrent_layer_that_native_code_does_not_take_stands_between_two_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its states, and those of the layers before and after, begin with a text and wait for what stands of a draft."""
    model_type, changes = CASES["qwen3_5-delta"]
    make(tmp_path, model_type, {**WIDE, **changes, **QUARTER})
    runner = load(tmp_path)
    mixer = next(layer for layer in runner.model.layers() if layer.spec.index == 1).mixer
    mixer.mixer.out.replace(OnlyCalled(mixer.mixer.out.weight()))
    whole = ["delta", "mlp", "|", "mlp", "delta", "mlp", "attention", "mlp", "|"]
    assert same_as_by_steps(runner, "bf16", monkeypatch) == len(PASSES) * whole


def test_slots_that_there_are_not_are_refused(tmp_path: Path) -> None:
    """Nothing is read or written outside of the states."""
    model_type, changes = CASES["lfm2-tied"]
    make(tmp_path, model_type, {**WIDE, **changes, **HEAD})
    runner = load(tmp_path)
    cache = KVCache(runner.config, 6, BLOCK_SIZE, runner.device, torch.bfloat16, slots=2)
    both = Chunk([4], 1, (0,), 1, 1), Chunk([5], 1, (1,), 1, 1)
    for chunks in (both, [Chunk([4], 1, (0,), 1, 2)], [Chunk([4], 1, (0,), 1, -1)]):
        with pytest.raises(ValueError, match="slots"):
            runner.run(chunks, cache)


@pytest.mark.parametrize("bits", (None, 4), ids=("dense", "int4"))
@pytest.mark.parametrize("case", EXPERTS)
def test_experts_have_the_bits_of_their_steps(
    case: str, bits: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Passes in which an expert has no, one, few and many rows, packed or dense."""
    model_type, changes = CASES[case]
    more, parts = EXPERTS[case]
    make(tmp_path, model_type, {**WIDE, **changes, **more})
    runner = load(tmp_path)
    for index, block in enumerate(runner.model.layers()):
        for seed, linear in enumerate(block.mlp.products if bits else ()):
            pack_linear(linear, bits or 4, 32, seed + 100 * index)
    assert same_as_by_steps(runner, "bf16", monkeypatch) == len(PASSES) * [
        *(part for kind in parts for part in ("attention", kind)),
        "|",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("kv", KINDS)
@pytest.mark.parametrize("case", [case for case in CASES if "longrope" not in case], ids=str)
def test_families_have_the_bits_of_their_steps(
    case: str, kv: Kv, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever of them is run natively, beside what is not."""
    model_type, changes = CASES[case]
    make(tmp_path, model_type, {**WIDE, **changes})
    runner = load(tmp_path, kv)
    if kv == "int4" and any(runner.config.cached(layer)[1] % 16 for layer in range(runner.config.layers)):
        pytest.skip("an int4 cache takes no such heads")
    same_as_by_steps(runner, kv, monkeypatch)


@pytest.mark.parametrize("kv", ("int8", "int4"))
def test_vectors_that_are_not_finite_are_stored_as_the_cache_stores_them(
    kv: Kv, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Infinity and NaN in some heads' keys, and values so small that a step of their scale is no normal number."""
    runner = load(random_model(tmp_path / "model"), kv)
    attention = next(runner.model.layers()).mixer
    weight, heads, dim = attention.qkv.weight().clone(), attention.spec.heads, attention.spec.head_dim
    weight[heads * dim, 0], weight[(heads + 1) * dim, 3] = torch.inf, torch.nan
    weight[-dim:] *= 1e-38
    attention.qkv.replace(weight)
    assert "attention" in same_as_by_steps(runner, kv, monkeypatch)


@pytest.mark.parametrize("bits", (8, 4, 3, 2))
def test_products_of_several_parts(bits: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries packed, keys and values dense: their outputs lie side by side all the same."""
    runner = load(random_model(tmp_path / "model", model_type="qwen2"))
    generator = torch.Generator().manual_seed(bits)
    for block in runner.model.layers():
        qkv, split = block.products["qkv"], block.spec.attention.heads * block.spec.attention.head_dim
        weight = qkv.weight()
        codes = torch.randint(0, 2**bits, (split, weight.shape[1]), dtype=torch.int32, generator=generator)
        scales = torch.rand(split, weight.shape[1] // 32, generator=generator).bfloat16() / 2**bits
        packed = PackedWeight(pack(codes, bits), scales, Packing(bits, 32), weight.shape[1])
        qkv.matmuls = (prepare_product(packed, torch.bfloat16), dense_matmul(weight[split:].clone()))
    assert same_as_by_steps(runner, "bf16", monkeypatch).count("attention") == len(PASSES) * runner.config.layers


def test_what_is_replaced_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part that was made ready runs by its new weights and gains, not by memory that was theirs."""
    runner = load(random_model(tmp_path / "model"))
    before = run(runner, "bf16")[0]
    block = next(runner.model.layers())
    for linear in block.products.values():
        linear.replace(linear.weight() * 2)
    for norm in block.norms:
        norm.replace(norm.weight * 0.5)
    assert not torch.equal(run(runner, "bf16")[0], before)
    same_as_by_steps(runner, "bf16", monkeypatch)


@pytest.mark.parametrize("replaced", ("expert", "router", "bias", "shape", "parts"))
def test_experts_that_are_replaced_are_noticed(replaced: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of many: its new weights multiply, in one call where native code takes them, else step by step."""
    model_type, changes = CASES["qwen2_moe-shared"]
    make(tmp_path, model_type, {**WIDE, **changes, "num_hidden_layers": 1})
    runner = load(tmp_path)
    before = run(runner, "bf16")[0]
    experts = next(runner.model.layers()).mlp
    last = experts.products[-2]
    weight = last.weight()
    if replaced == "router":
        experts.router.replace(experts.router.weight().flip(0).contiguous())
    elif replaced == "bias":
        for linear in experts.products[-1::-2]:
            linear.bias = torch.ones(linear.out_features, dtype=torch.bfloat16)
            linear.replace(linear.weight())
    elif replaced == "shape":
        pack_linear(last, 4, 32)
    elif replaced == "parts":
        last._multiply_by(tuple(dense_matmul(part.clone()) for part in (weight * 2).chunk(2)))
    else:
        last.replace(weight * 2)
    assert not torch.equal(run(runner, "bf16")[0], before)
    ran = same_as_by_steps(runner, "bf16", monkeypatch)
    assert ran.count("experts") == (len(PASSES) if replaced in ("expert", "router") else 0)


@pytest.mark.parametrize("kind", (Attention, Mlp, Experts))
def test_a_part_is_gone_when_nobody_holds_it(kind: type[Attention] | type[Mlp] | type[Experts], tmp_path: Path) -> None:
    """At once, and its weights with it: of a model that is read layer by layer two would be in memory."""
    model_type, changes = CASES["qwen3_moe-every-other-normalized-tied"]
    make(tmp_path, model_type, {**WIDE, **changes, **HEAD})
    runner = load(tmp_path)
    run(runner, "bf16")
    gone = [weakref.ref(part) for part in runner.model.modules() if isinstance(part, kind)]
    gc.disable()
    try:
        runner.model.blocks = torch.nn.ModuleList()
        assert gone and not any(part() for part in gone)
    finally:
        gc.enable()


def test_other_weights_are_multiplied_step_by_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = load(random_model(tmp_path / "model"))
    block = next(runner.model.layers())
    block.mlp.down.replace(OnlyCalled(block.mlp.down.weight()))
    ran = same_as_by_steps(runner, "bf16", monkeypatch)
    assert ran == len(PASSES) * ["attention", "|", *(runner.config.layers - 1) * ["attention", "mlp"], "|"]


def test_long_passes_and_other_dtypes_are_run_step_by_step(tmp_path: Path) -> None:
    runner = load(random_model(tmp_path / "model"))
    cache = KVCache(runner.config, 1, 2 * NATIVE_ROWS, runner.device, torch.bfloat16)
    rope = Rope(runner.config, 2 * NATIVE_ROWS, runner.device, runner.dtype)

    def taken(rows: int, cache: KVCache, dtype: torch.dtype = torch.bfloat16) -> bool:
        batch = Batch.of([Chunk([4] * rows, 0, (0,), 1)], cache.block_size, runner.device)
        with torch.inference_mode():
            x = torch.zeros(1, rows, runner.config.hidden_size, dtype=dtype)
            return NativePass.make(x, batch, cache, rope) is not None

    assert taken(NATIVE_ROWS, cache) and not taken(NATIVE_ROWS + 1, cache)
    assert not taken(1, cache, torch.float32)
    assert not taken(1, KVCache(runner.config, 1, 8, runner.device, torch.float32))


def test_lengths_that_do_not_fit_the_blocks_are_refused(tmp_path: Path) -> None:
    runner = load(random_model(tmp_path / "model"))
    cache = KVCache(runner.config, 2, BLOCK_SIZE, runner.device, torch.bfloat16)
    with pytest.raises(ValueError, match="fit"):
        runner.run([Chunk([4], BLOCK_SIZE, (0,), 1)], cache)
    with pytest.raises(ValueError, match="fit"):
        runner.run([Chunk([4], 0, (2,), 1)], cache)
