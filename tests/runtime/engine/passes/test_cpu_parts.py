"""Test layer parts fused into one native call: bits equal to separate steps in every family, and declined cases."""

import gc
import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import cycle
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import torch

from mycli.runtime.cache.batch import Chunk
from mycli.runtime.cache.kv_cache import KVCache
from mycli.runtime.checkpoint.open_folder import open_model_folder
from mycli.runtime.device.placement import Placement
from mycli.runtime.engine.loading.loader import load_model
from mycli.runtime.engine.model_runner import ModelRunner
from mycli.runtime.engine.passes import compile_passes
from mycli.runtime.engine.passes.base import PassInput
from mycli.runtime.engine.passes.cpu import NATIVE_ROWS
from mycli.runtime.engine.passes.cpu_parts import native_part
from mycli.runtime.errors import Declined
from mycli.runtime.kernels.cpu.layer import MAX_PRODUCTS
from mycli.runtime.kernels.registry import prepare_product
from mycli.runtime.layers.block import Attention
from mycli.runtime.layers.feed_forward import Experts, Mlp
from mycli.runtime.layers.linear import Linear, dense_matmul
from mycli.runtime.models.config import KvDtype
from mycli.runtime.models.part_spec import (
    DifferentialSpec,
    GateSpec,
    KeyBiasSpec,
    LinearSpec,
    NormSpec,
)
from mycli.runtime.quantization.packed_weight import PackedWeight, pack
from mycli.runtime.quantization.scheme import Packing
from tests.support.families import CASES, make
from tests.support.models import random_model
from tests.support.native_parts import (
    BLOCK_SIZE,
    HEAD,
    KINDS,
    PASSES,
    WIDE,
    OnlyCalled,
    load_bf16,
    need_native_code,
    plain_passes,
    run_passes,
    same_as_by_steps,
)

FP32 = Placement(torch.device("cpu"), torch.float32)


@pytest.fixture(autouse=True)
def compiled() -> None:
    need_native_code()


# Families with all features: biases; pre- and post-norms, caps and windows; shared keys and values, residual factors,
# value norms; norms over all heads; output factors; norms after rotary; interleaved rotary; partial rotary; parallel
# attention and MLP after a LayerNorm; an ungated MLP; query factors.
WHOLE: Mapping[str, Mapping[str, Any]] = {
    "llama-biases": {},
    "gemma2-mqa-low-caps-untied": HEAD,
    "gemma4-ple-shared-kv-double": {"head_dim": 32, "global_head_dim": 64},
    "olmo2-mha-tied-biases": {},
    "granite-multipliers": {},
    "hunyuan-alpha": HEAD,
    "ernie4_5-untied-biases": HEAD,
    "glm4-half-turned": {"head_dim": 64},
    "cohere2-window7-tied": HEAD,
    "arcee-yarn": HEAD,
    "ministral3-beyond": HEAD,
}
PARTS = {"gemma4-ple-shared-kv-double": ["attention", "mlp", "per-layer inputs"], "cohere2-window7-tied": ["parallel"]}


@pytest.mark.parametrize(("case", "kv"), list(zip(WHOLE, cycle(KINDS))), ids=str)
def test_parts_have_the_bits_of_their_steps(
    case: str, kv: KvDtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model_type, changes = CASES[case]
    make(tmp_path, model_type, {**WIDE, **changes, **WHOLE[case]})
    runner = load_bf16(tmp_path, kv)
    each = runner.config.layers * PARTS.get(case, ["attention", "mlp"])
    assert same_as_by_steps(runner, kv, monkeypatch) == len(PASSES) * [*each, "|"]


@pytest.mark.parametrize("case", ("gpt_neox-parallel", "falcon-40b-biases-untied"))
def test_parallel_parts_with_a_norm_each_are_declined(case: str, tmp_path: Path) -> None:
    """The native code reads one norm for both."""
    model_type, changes = CASES[case]
    make(tmp_path, model_type, {**WIDE, **changes})
    (part,) = next(load_bf16(tmp_path).model.layers()).parts
    assert native_part(part) == Declined("parallel-norms")


Change = Callable[[Any, pytest.MonkeyPatch], None]


def field(name: str, value: object) -> Change:
    return lambda part, patch: patch.setattr(part, "spec", replace(part.spec, **{name: value}))


def attribute(path: str, value: object) -> Change:
    owner, _, name = path.rpartition(".")
    return lambda part, patch: patch.setattr(attrgetter(owner)(part) if owner else part, name, value)


LINEAR, NORM, FP32_ROW = LinearSpec("linear", 4, 128), NormSpec("norm", 128, 1e-6), torch.ones(128)
CHANGES: Mapping[str, tuple[type[Any], Change, Declined]] = {
    "clip": (Attention, field("clip", 8.0), Declined("clipped-attention", {"clip": 8.0})),
    "gate": (Attention, field("gate", GateSpec(LINEAR)), Declined("attention-gate", {"linear": "linear"})),
    "differential": (
        Attention,
        field("differential", DifferentialSpec(("a", "b", "c", "d"), 0.5)),
        Declined("differential-attention"),
    ),
    "key-bias": (Attention, field("key_bias", KeyBiasSpec(LINEAR, "rate")), Declined("key-biases")),
    "narrow-values": (Attention, field("value_dim", 16), Declined("attention-values")),
    "scaled-values": (Attention, field("value_scale", 2.0), Declined("attention-values")),
    "normed-outputs": (Attention, field("inner_norm", NORM), Declined("attention-values")),
    "odd-heads": (
        Attention,
        field("head_dim", 24),
        Declined("vector-multiple", {"field": "head_dim", "count": 24, "multiple": 16}),
    ),
    "norms-by-head": (Attention, attribute("q_norm.spec", replace(NORM, heads=2)), Declined("norm-by-head")),
    "fp64-gain": (Mlp, attribute("norm.weight", FP32_ROW.double()), Declined("gain-dtype", {"dtype": "torch.float64"})),
    "strided-gain": (
        Mlp,
        attribute("norm.weight", torch.ones(256)[::2]),
        Declined("gain-dtype", {"dtype": "torch.float32"}),
    ),
    "normed-inner": (Mlp, field("inner_norm", NORM), Declined("mlp-norm")),
    "threshold": (Mlp, field("sparsity", 0.5), Declined("gate-threshold")),
    "gain-of-sum": (Mlp, attribute("gain", FP32_ROW), Declined("residual-gains")),
    "fp32-scalar": (Mlp, attribute("scalar", torch.ones(1)), Declined("scalar-dtype", {"dtype": "torch.float32"})),
    "fp32-bias": (Mlp, attribute("down.bias", FP32_ROW), Declined("bias-dtype", {"dtype": "torch.float32"})),
    "no-product": (Mlp, attribute("down.matmuls", ()), Declined("product-parts", {"count": 0, "most": MAX_PRODUCTS})),
    "many-products": (
        Mlp,
        attribute("down.matmuls", (None,) * (MAX_PRODUCTS + 1)),
        Declined("product-parts", {"count": MAX_PRODUCTS + 1, "most": MAX_PRODUCTS}),
    ),
    "weighed-inputs": (Experts, field("weigh_inputs", True), Declined("expert-inputs")),
    "projections": (Experts, attribute("enter", Linear((LINEAR,))), Declined("expert-projections")),
}


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    need_native_code()
    model_type, changes = CASES["qwen3_moe-every-other-normalized-tied"]
    make(folder := tmp_path_factory.mktemp("mixture"), model_type, {**WIDE, **changes, **HEAD})
    return load_bf16(folder)


@pytest.mark.parametrize("change", CHANGES)
def test_a_part_that_native_code_does_not_take_is_declined(
    change: str, mixture: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, changed, declined = CHANGES[change]
    part = next(part for part in mixture.model.modules() if isinstance(part, kind))
    assert not isinstance(native_part(part), Declined)
    changed(part, monkeypatch)
    assert native_part(part) == declined


def test_sinks_have_the_bits_of_their_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The experts are declined here, so each attention is a call of its own."""
    model_type, changes = CASES["gpt_oss-window7-gqa4:2"]
    make(tmp_path, model_type, {**WIDE, **changes, **HEAD})
    runner = load_bf16(tmp_path)
    ran = same_as_by_steps(runner, "bf16", monkeypatch)
    assert ran == len(PASSES) * runner.config.layers * ["attention", "|"]


@pytest.mark.slow
@pytest.mark.parametrize("kv", KINDS)
@pytest.mark.parametrize("case", [case for case in CASES if "longrope" not in case], ids=str)
def test_families_have_the_bits_of_their_steps(
    case: str, kv: KvDtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parts that native code supports run natively, the others in torch."""
    model_type, changes = CASES[case]
    make(tmp_path, model_type, {**WIDE, **changes})
    runner = load_bf16(tmp_path, kv)
    shapes = (shape for layer in range(runner.config.layers) for shape in runner.config.cache_shapes(layer))
    if kv == "int4" and any(size % 16 for _, _, size in shapes):
        pytest.skip("an int4 cache takes no such heads")
    same_as_by_steps(runner, kv, monkeypatch)


@pytest.mark.parametrize("kv", ("int8", "int4"))
def test_vectors_that_are_not_finite_are_stored_as_the_cache_stores_them(
    kv: KvDtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The keys contain infinity and NaN in some heads, and values so small that their scale is subnormal."""
    runner = load_bf16(random_model(tmp_path / "model"), kv)
    attention = next(runner.model.layers()).mixer
    weight, heads, dim = attention.qkv.weight().clone(), attention.spec.heads, attention.spec.head_dim
    weight[heads * dim, 0], weight[(heads + 1) * dim, 3] = torch.inf, torch.nan
    weight[-dim:] *= 1e-38
    attention.qkv.replace(weight)
    assert "attention" in same_as_by_steps(runner, kv, monkeypatch)


@pytest.mark.parametrize("bits", (8, 4, 3, 2))
def test_products_of_several_parts(bits: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The queries are packed while keys and values are dense; their outputs are still contiguous."""
    runner = load_bf16(random_model(tmp_path / "model", model_type="qwen2"))
    generator = torch.Generator().manual_seed(bits)
    for block in runner.model.layers():
        qkv, split = block.products["qkv"], block.spec.attention.heads * block.spec.attention.head_dim
        weight = qkv.weight()
        codes = torch.randint(0, 2**bits, (split, weight.shape[1]), dtype=torch.int32, generator=generator)
        scales = torch.rand(split, weight.shape[1] // 32, generator=generator).bfloat16() / 2**bits
        packed = PackedWeight(pack(codes, bits), scales, Packing(bits, 32), weight.shape[1])
        qkv.matmuls = (prepare_product(packed, torch.bfloat16), dense_matmul(weight[split:].clone()))
    assert same_as_by_steps(runner, "bf16", monkeypatch).count("attention") == len(PASSES) * runner.config.layers


@pytest.mark.parametrize("kind", (Attention, Mlp, Experts))
def test_a_part_is_gone_when_nobody_holds_it(kind: type[Attention] | type[Mlp] | type[Experts], tmp_path: Path) -> None:
    """The part frees its weights immediately: reading layer by layer must not hold two layers in memory."""
    model_type, changes = CASES["qwen3_moe-every-other-normalized-tied"]
    make(tmp_path, model_type, {**WIDE, **changes, **HEAD})
    runner = load_bf16(tmp_path)
    run_passes(runner.model, "bf16", runner.passes)
    gone = [weakref.ref(part) for part in runner.model.modules() if isinstance(part, kind)]
    gc.disable()
    try:
        runner.model.blocks = torch.nn.ModuleList()
        runner.passes = plain_passes(runner.model)
        assert gone and not any(part() for part in gone)
    finally:
        gc.enable()


def test_other_weights_are_multiplied_step_by_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = load_bf16(random_model(tmp_path / "model"))
    block = next(runner.model.layers())
    block.mlp.down.replace(OnlyCalled(block.mlp.down.weight()))
    ran = same_as_by_steps(runner, "bf16", monkeypatch)
    assert ran == len(PASSES) * ["attention", "|", *(runner.config.layers - 1) * ["attention", "mlp"], "|"]


def test_long_passes_and_other_dtypes_are_run_step_by_step(tmp_path: Path) -> None:
    runner = load_bf16(random_model(tmp_path / "model"))
    cache = KVCache(runner.config, 1, 2 * NATIVE_ROWS, runner.device, torch.bfloat16)

    def chosen(rows: int) -> str:
        work = PassInput([Chunk([4] * rows, 0, (0,), 1)], cache, runner.rope(2 * NATIVE_ROWS))
        way = runner.passes.choose(work)
        assert way is not None
        return way.name

    assert (chosen(NATIVE_ROWS), chosen(NATIVE_ROWS + 1)) == ("cpu", "plain")
    declined = compile_passes(load_model(open_model_folder(tmp_path / "model"), FP32).model).declined["cpu"]
    assert declined == Declined("activation-dtype", {"dtype": "float32"})
    assert compile_passes(runner.model, "auto").declined.keys() == {"cuda", "captured", "prompts"}


def test_lengths_that_do_not_fit_the_blocks_are_refused(tmp_path: Path) -> None:
    runner = load_bf16(random_model(tmp_path / "model"))
    cache = KVCache(runner.config, 2, BLOCK_SIZE, runner.device, torch.bfloat16)
    with pytest.raises(ValueError, match="fit"):
        runner.run([Chunk([4], BLOCK_SIZE, (0,), 1)], cache)
    with pytest.raises(ValueError, match="fit"):
        runner.run([Chunk([4], 0, (2,), 1)], cache)
