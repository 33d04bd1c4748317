"""Test block-by-block calibration and solving: which inputs are observed, in which order, and what is reported."""

from contextlib import nullcontext
from threading import Event
from typing import Any

import pytest
import torch
from torch import Tensor

from mycli.quant.calibration import hessian as observe
from mycli.quant.calibration.hessian import HELD_OUT_EVERY, ObservedBlock, finish_block, product_input
from mycli.quant.layer_streaming import StreamedModel
from mycli.quant.output.work_folder import Solved
from mycli.quant.recipe import Recipe
from mycli.quant.rounding.error_compensation import Moments
from mycli.quant.rounding.grid import Grid, dequantize_codes, round_to_grid
from mycli.quant.rounding.rows import split_rows
from mycli.quant.solvers import Solution, gptq
from mycli.quant.solving.blockwise import BlockSolver, CopyTask, OriginalBlocks, quantize_blocks, solve_copies
from mycli.quant.solving.linear_solver import LinearSolver, SolvedProduct
from mycli.runtime.checkpoint.open_folder import open_model_folder
from mycli.runtime.errors import ModelError, ResourceError
from mycli.runtime.kernels.cpu.rounded import rounds
from mycli.runtime.kernels.registry import ACTIVATION
from mycli.runtime.layers.block import Block
from mycli.runtime.layers.linear import Linear
from mycli.runtime.quantization.scheme import Packing
from tests.support.models import CPU
from tests.support.paths import DRAFT
from tests.support.rounding import problem


@pytest.fixture(scope="module")
def model() -> StreamedModel:
    return StreamedModel(open_model_folder(DRAFT), CPU)


@pytest.fixture(scope="module")
def windows() -> Tensor:
    return torch.randint(0, 4096, (10, 16), generator=torch.Generator().manual_seed(0))


def close(found: Tensor, wanted: Tensor) -> bool:
    return bool((found - wanted).norm() < 5e-3 * wanted.norm())


@torch.no_grad()
@pytest.mark.parametrize("settled", [False, True])
def test_inputs_are_what_each_product_of_the_block_gets(model: StreamedModel, windows: Tensor, settled: bool) -> None:
    block, context, x = model.block(1), model.context(16, exact=True), model.embed(windows)
    attention, mlp = block.mixer, block.mlp
    assert attention.norm is not None and mlp.norm is not None
    state = ObservedBlock(block, x.clone(), settled)
    got = {product: product_input(state, product, slice(0, 10), context, CPU.device).x for product in block.products}
    assert torch.equal(got["qkv"], attention.norm(x))
    between = x + attention.o(got["o"])
    assert torch.equal(got["gate_up"], mlp.norm(between))
    assert torch.equal(got["down"], ACTIVATION["silu", True](mlp.gate_up(got["gate_up"])))
    after = block(x, context)
    assert torch.equal(between + mlp.down(got["down"]), after)
    assert torch.equal(state.streams[0], after if settled else x)
    if not settled:
        finish_block(model, state, context)
        assert torch.equal(state.streams[0], after), "to the bit, or a run that goes on would differ"


@torch.no_grad()
def test_kept_inputs_change_no_bit(model: StreamedModel, windows: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where products round their inputs to bf16, the inputs of o and down are kept, and qkv and gate_up run once."""
    context, ended = model.context(16, exact=True), list[Tensor]()
    runs: list[list[str]] = []
    forward = Linear.forward

    def counted(linear: Linear, x: Tensor) -> Tensor:
        runs[-1].append(linear.specs[0].name.rpartition(".")[2])
        return forward(linear, x)

    monkeypatch.setattr(Linear, "forward", counted)
    for keeps, reduced in ((True, True), (False, True), (True, False)):
        block, runs = model.block(1), [*runs, []]
        state = ObservedBlock(block, model.embed(windows), keeps=keeps)
        with observe.reduced_precision(CPU.device) if reduced else nullcontext():
            for product in block.products:
                product_input(state, product, slice(0, 10), context, CPU.device)
                block.products[product].replace(block.products[product].weight().round(decimals=2))
            finish_block(model, state, context)
        ended.append(state.streams[0])
    assert torch.equal(ended[0], ended[1])
    assert runs[0] == (["q_proj", "o_proj", "gate_proj", "down_proj"] if rounds() else runs[1])
    assert runs[1] == runs[2] == ["q_proj", "q_proj", "o_proj", "gate_proj", "gate_proj", "down_proj"]


def test_every_token_counts_once(model: StreamedModel, windows: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "at_once", 3 * 16)
    block, context = model.block(0), model.context(16, exact=True)
    stream = model.embed(windows)
    other = stream * 1.5 + 0.1
    fitted, held, _ = observe.observe(model, ObservedBlock(block, stream), ObservedBlock(block, other), "o", context)
    x, y = (
        product_input(ObservedBlock(block, each), "o", slice(0, 10), context, CPU.device).x for each in (stream, other)
    )
    chosen = torch.arange(10) % HELD_OUT_EVERY == HELD_OUT_EVERY - 1
    for moments, rows in ((fitted, ~chosen), (held, chosen)):
        a, b = x[rows].flatten(0, 1), y[rows].flatten(0, 1)
        assert close(moments.hessian, a.T @ a) and close(moments.drift, (b - a).T @ a)


def test_each_product_sees_what_was_quantized_before_it(
    model: StreamedModel, windows: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The Hessian of the last product is computed with all earlier products quantized."""
    packings = Recipe("rtn", 3, 64, head="keep").packings(model.config)
    seen: dict[str, Tensor] = {}
    solver = LinearSolver("rtn", torch.bfloat16, "mse")
    solve = solver.solve

    def watch(weights: dict[str, Tensor], packing: Packing, fitted: Moments, held: Moments, outputs: None) -> object:
        seen[next(iter(weights))] = fitted.hessian + held.hessian
        return solve(weights, packing, fitted, held, outputs)

    monkeypatch.setattr(solver, "solve", watch)
    restored: dict[str, Tensor] = {}

    def sink(solved: Solved) -> None:
        for name, quantized in solved.linears.items():
            restored[name] = dequantize_codes(quantized, Grid(packings[name], torch.bfloat16)).bfloat16().float()

    layers = quantize_blocks(BlockSolver(OriginalBlocks(model, windows), packings, solver), sink)
    assert [layer.name for layer in layers] == list(packings) == list(restored)
    stream, context = model.embed(windows), model.context(16, exact=True)
    for index in range(model.config.layers):
        block = model.block(index)
        state = ObservedBlock(block, stream)
        for product, linear in block.products.items():
            x = product_input(state, product, slice(0, 10), context, CPU.device).x.flatten(0, 1)
            assert close(seen[linear.specs[0].name], x.T @ x)
            linear.replace(torch.cat([restored[spec.name] for spec in linear.specs]))
        model.advance(block, stream, context)


def test_copies_solved_together_are_those_solved_alone(
    model: StreamedModel, windows: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The original passes once for all, and each copy has the same codes, scales and other tensors."""
    passes: list[str] = []
    product_input = observe.product_input

    def counted(state: ObservedBlock, product: str, *rest: Any) -> object:
        passes.extend([product] if state.final else [])
        return product_input(state, product, *rest)

    monkeypatch.setattr(observe, "product_input", counted)
    kinds = [("gptq", 4, None), ("rtn", 3, "awq"), ("gptq", 2, None)]

    def solved(chosen: list[tuple[str, int, str | None]]) -> list[list[Solved]]:
        original, found = OriginalBlocks(model, windows), list[list[Solved]]()
        tasks = list[CopyTask]()
        for name, bits, transform in chosen:
            solver = LinearSolver(name, torch.bfloat16, transform=transform)
            packings = Recipe("rtn", bits, 64, head="keep").packings(model.config)
            found.append([])
            tasks.append(CopyTask(BlockSolver(original, packings, solver), found[-1].append))
        solve_copies(tasks)
        return found

    together, at_once = solved(kinds), len(passes)
    assert at_once == 2 * 4 * model.config.layers, "once for scales, once for moments"
    for copy, kind in zip(together, kinds, strict=True):
        for one, other in zip(copy, solved([kind])[0], strict=True):
            assert one.layers == other.layers and set(one.changed) == set(other.changed)
            assert all(torch.equal(one.changed[name], other.changed[name]) for name in one.changed)
            for name, linear in one.linears.items():
                assert torch.equal(linear.codes, other.linears[name].codes)
                assert torch.equal(linear.scales, other.linears[name].scales)
    assert together[1][0].changed and not together[0][0].changed


@pytest.mark.parametrize("fault", ["E3-nan-activations"])
def test_activations_that_are_not_finite_name_layer_and_windows(
    model: StreamedModel, windows: Tensor, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model, "at_once", 4 * 16)
    stream = model.embed(windows)
    stream[5, 3] = float("nan")
    state = ObservedBlock(model.block(1), stream)
    with pytest.raises(ModelError, match=r"model.layers.1.self_attn.q_proj: .* in calibration windows 4 to 7"):
        observe.observe(model, state, state, "qkv", model.context(16))


def half(hessian: Tensor) -> Moments:
    return Moments(hessian / 2, torch.zeros_like(hessian), len(hessian))


@pytest.mark.parametrize("has_moments", [False, True])
@pytest.mark.parametrize("fault", ["E8-worse-than-rounding"])
def test_the_better_of_solution_and_rounding_is_kept(
    fault: str, has_moments: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight, hessian = problem(16, 64)
    good, bad = weight[:8], weight[8:]

    class Unlucky:
        @staticmethod
        def solve(weight: Tensor, grid: Grid, hessian: Tensor | None, outputs: Tensor | None) -> Solution:
            solution = gptq.solve(weight, grid, hessian)
            solution.quantized.codes[8:] = 0
            return solution

    monkeypatch.setattr("mycli.quant.solvers.load", lambda _: Unlucky)
    packing = Packing(4, 32)
    solved, layers, _ = LinearSolver("any", torch.bfloat16, "mse").solve(
        {"a": good, "b": bad}, packing, half(hessian), half(hessian), coupled_rows(16, 400) if has_moments else None
    )
    assert [layer.fallback for layer in layers] == [None, "plain rounding is better"]
    assert layers[0].output_error is not None and layers[0].rounding_output_error is not None
    assert layers[0].output_error < layers[0].rounding_output_error
    assert torch.equal(solved["b"].codes, round_to_grid(bad, solved["b"].scales, Grid(packing, torch.bfloat16)))


def coupled_rows(count: int, rank: int) -> Tensor:
    """Return moments of the gradients by `count` outputs, which have `rank` directions."""
    rows = split_rows(torch.randn(count, rank, generator=torch.Generator().manual_seed(1)))
    return rows @ rows.transpose(1, 2)


def test_solutions_are_judged_by_what_their_errors_do_together() -> None:
    """The loss sees one direction of the outputs: errors of two linears cancel there, though each is large."""
    weight, hessian = problem(24, 64)
    moments, packing, given = coupled_rows(24, 1), Packing(3, None), (half(hessian), half(hessian))
    solver = LinearSolver("gptq", torch.bfloat16, "mse")
    linears = {"a": weight[:8], "b": weight[8:]}
    alone = solver.solve(linears, packing, *given)
    joint = solver.solve(linears, packing, *given, moments)
    assert all(layer.fallback is None for layer in joint.layers)

    def lost(solved: SolvedProduct) -> float:
        grid = Grid(packing, torch.bfloat16)
        errors = [dequantize_codes(solved.linears[name], grid) - part for name, part in linears.items()]
        rows = split_rows(torch.cat(errors))
        return float(((rows @ hessian @ rows.transpose(1, 2)) * moments).sum())

    rounded = solver.round({"a": linears["a"]}, packing)
    mixed = joint._replace(linears={**joint.linears, **rounded.linears})
    assert lost(joint) < 0.5 * min(lost(alone), lost(mixed))


@pytest.mark.parametrize("fault", ["E1-counted"])
def test_a_hessian_that_cannot_be_factored_is_counted(fault: str) -> None:
    weight, hessian = problem(8, 64)
    hessian[3, 5] = hessian[5, 3] = 1e12
    solver, given = LinearSolver("gptq", torch.bfloat16, "mse"), (half(hessian), half(hessian))
    _, layers, _ = solver.solve({"a": weight}, Packing(4, 32), *given)
    assert layers[0].fallback is not None and layers[0].damping is None


def test_a_block_is_written_while_the_next_is_solved_and_the_one_after_read_ahead(
    model: StreamedModel, windows: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first write waits for the next solve to begin: without overlap, the test would time out."""
    begun, expected, written = [Event() for _ in range(model.config.layers)], list[int](), list[str]()
    block = model.block

    def watched(index: int) -> Block:
        begun[index].set()
        return block(index)

    def sink(solved: Solved) -> None:
        following = int(solved.layers[0].name.split(".")[2]) + 1
        assert following == len(begun) or begun[following].wait(20)
        written.extend(solved.linears)

    monkeypatch.setattr(model, "block", watched)
    monkeypatch.setattr(model, "prefetch", expected.append)
    packings, solver = Recipe("rtn", 4, 64, head="keep").packings(model.config), LinearSolver("rtn", torch.bfloat16)
    quantize_blocks(BlockSolver(OriginalBlocks(model, windows), packings, solver), sink)
    assert written == list(packings) and expected == list(range(1, model.config.layers))


@pytest.mark.parametrize("block", [0, 1])
def test_what_cannot_be_written_ends_the_work(model: StreamedModel, windows: Tensor, block: int) -> None:
    """A write error of the last block, which no other follows, also ends the work."""
    written: list[Solved] = []

    def sink(solved: Solved) -> None:
        if len(written) == block:
            raise ResourceError("disk full")
        written.append(solved)

    packings, solver = Recipe("rtn", 4, 64, head="keep").packings(model.config), LinearSolver("rtn", torch.bfloat16)
    with pytest.raises(ResourceError, match="disk full"):
        quantize_blocks(BlockSolver(OriginalBlocks(model, windows), packings, solver), sink)
    assert len(written) == block
