"""Test products of experts: which weights multiply, and which rows."""

from pathlib import Path

import torch

from mycli.runtime.checkpoint.open_folder import open_model_folder
from mycli.runtime.device.placement import Placement
from mycli.runtime.engine.loading.loader import load_model
from mycli.runtime.kernels.routed import Route
from mycli.runtime.layers.feed_forward import Experts
from mycli.runtime.layers.linear import PACKED_ROWS, RoutedProduct
from tests.support.models import SMALL
from tests.support.packed_folder import write_packed


def _experts(folder: Path) -> Experts:
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "head_dim": 32}
    fields = {**SMALL, "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], **sizes}
    placement = Placement(torch.device("cpu"), torch.bfloat16, prompt_copy="16bit")
    model = load_model(open_model_folder(write_packed(folder, fields, {"": 4})), placement).model
    experts = next(model.layers()).mlp
    assert isinstance(experts, Experts)
    return experts


def _route(counts: dict[int, int]) -> Route:
    starts = torch.tensor([0, *counts.values()]).cumsum(0).int()
    nothing = torch.empty(0)
    return Route(list(counts), starts, torch.arange(int(starts[-1])).int(), nothing, nothing)


def test_an_expert_with_a_copy_for_prompts_multiplies_many_rows_by_it(tmp_path: Path) -> None:
    linears = _experts(tmp_path / "model").gate_up
    many, few = PACKED_ROWS + 1, 2
    for linear in linears:
        assert linear.prompt_copy is not None
        linear.prompt_copy.dequantize().zero_()
    x = torch.ones(many + few, linears[0].in_features, dtype=torch.bfloat16)
    y = RoutedProduct(linears, _route({1: many, 2: few}), gathers=False)(x)
    assert not y[:many].any() and torch.equal(y[many:], linears[2](x[many:])) and y[many:].any()


def test_an_expert_without_tokens_has_no_rows(tmp_path: Path) -> None:
    linears, x = _experts(tmp_path / "model").gate_up, torch.arange(3.0)[:, None]
    for gathers in (False, True):
        product = RoutedProduct(linears, _route({0: 1, 3: 2}), gathers)
        assert [product.rows(x, expert).flatten().tolist() for expert in range(4)] == [[0], [], [], [1, 2]]
