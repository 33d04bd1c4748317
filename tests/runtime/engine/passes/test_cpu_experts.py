"""Test expert layers fused into one native call: the bits equal those of the plain pass."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from mycli.runtime.kernels.cpu.table import TableMatmul
from mycli.runtime.kernels.registry import prepare_product
from mycli.runtime.layers.linear import dense_matmul
from mycli.runtime.quantization.packed_weight import PackedWeight, pack
from mycli.runtime.quantization.scheme import Packing
from tests.support.families import CASES, make
from tests.support.native_parts import (
    HEAD,
    PASSES,
    WIDE,
    load_bf16,
    need_native_code,
    pack_linear,
    same_as_by_steps,
)


@pytest.fixture(autouse=True)
def compiled() -> None:
    need_native_code()


# Experts and the layers that have them: weights from all scores, or from the chosen ones with dense layers between;
# a gated shared expert; output factors; norms for router, experts and shared expert, with weight factors; an ungated
# shared expert; corrections of sigmoid or softmax scores, expert groups, a factor for all weights.
EXPERTS: Mapping[str, tuple[Mapping[str, Any], Sequence[str]]] = {
    "qwen3_moe-8top2": (HEAD, ["experts"] * 3),
    "qwen3_moe-every-other-normalized-tied": (HEAD, ["mlp", "experts", "mlp", "mlp"]),
    "qwen2_moe-shared": ({}, ["experts"] * 3),
    "granitemoe-8top2": ({}, ["experts"] * 3),
    "gemma4-8top2": ({"head_dim": 32, "global_head_dim": 64}, ["experts"] * 3),
    "gpt_oss-window7-gqa4:2": ({**HEAD, "num_local_experts": 16}, ["experts"] * 4),
    "glm4_moe-groups-norms-two-shared-tied": ({"head_dim": 64}, ["mlp", "experts", "experts"]),
    "ernie4_5_moe-8top3-tied": (HEAD, ["mlp", "experts", "experts"]),
    "dots1-8top2": (HEAD, ["experts"] * 3),
}


@pytest.mark.parametrize("bits", (None, 4), ids=("dense", "int4"))
@pytest.mark.parametrize("case", EXPERTS)
def test_experts_have_the_bits_of_their_steps(
    case: str, bits: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The passes give an expert no, one, few and many rows, packed or dense."""
    model_type, changes = CASES[case]
    more, parts = EXPERTS[case]
    make(tmp_path, model_type, {**WIDE, **changes, **more})
    runner = load_bf16(tmp_path)
    packed = bits is not None and model_type != "gpt_oss"  # experts are stored in MXFP4
    for index, block in enumerate(runner.model.layers()):
        for seed, linear in enumerate(block.mlp.products if packed else ()):
            pack_linear(linear, bits or 4, 32, seed + 100 * index)
    assert same_as_by_steps(runner, "bf16", monkeypatch) == len(PASSES) * [
        *(part for kind in parts for part in ("attention", kind)),
        "|",
    ]


def test_experts_of_tables_have_the_bits_of_their_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model_type, changes = CASES["qwen3_moe-8top2"]
    make(tmp_path, model_type, {**WIDE, **changes, **HEAD})
    runner, generator = load_bf16(tmp_path), torch.Generator().manual_seed(0)
    for linear in (linear for block in runner.model.layers() for linear in block.mlp.products):
        shape, packing = (linear.out_features, linear.in_features), Packing(4, 32, codes="nf4")
        codes = torch.randint(0, 16, shape, generator=generator).to(torch.uint8)
        scales = torch.rand(shape[0], packing.groups(shape[1]), generator=generator).bfloat16() / 8
        linear.replace(prepare_product(PackedWeight(pack(codes, 4), scales, packing, shape[1]), torch.bfloat16))
        assert isinstance(linear.matmul, TableMatmul)
    assert same_as_by_steps(runner, "bf16", monkeypatch) == len(PASSES) * [*("attention", "experts") * 3, "|"]


def test_routers_that_read_the_input_of_the_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention is native, experts are not, and the router runs before both."""
    model_type, changes = CASES["smallthinker-layouts-softmax-tied"]
    make(tmp_path, model_type, {**WIDE, **changes, **HEAD, "intermediate_size": 64})
    assert same_as_by_steps(load_bf16(tmp_path), "bf16", monkeypatch) == len(PASSES) * 3 * ["attention", "|"]


@pytest.mark.parametrize("changed", ("expert", "bias", "shape", "parts"))
def test_experts_of_other_layouts(changed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run experts of one layout in one call and others product by product, with the same bits."""
    model_type, changes = CASES["qwen2_moe-shared"]
    make(tmp_path, model_type, {**WIDE, **changes, "num_hidden_layers": 1})
    runner = load_bf16(tmp_path)
    experts = next(runner.model.layers()).mlp
    last = experts.products[-2]
    weight = last.weight()
    if changed == "bias":
        for linear in experts.products[-1::-2]:
            linear.bias = torch.ones(linear.out_features, dtype=torch.bfloat16)
    elif changed == "shape":
        pack_linear(last, 4, 32)
    elif changed == "parts":
        last.matmuls = tuple(dense_matmul(part.clone()) for part in (weight * 2).chunk(2))
    else:
        last.replace(weight * 2)
    ran = same_as_by_steps(runner, "bf16", monkeypatch)
    assert ran.count("experts") == (len(PASSES) if changed in ("expert", "bias") else 0)
