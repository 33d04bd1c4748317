"""Estimates how long quantizing takes on this machine, from short measurements of the work itself.

Three numbers are measured: seconds to round weights (or to solve one matrix), seconds for a token to pass a block, and
seconds to hash.
"""

import hashlib
import time
from collections.abc import Callable, Mapping

import torch

from mycli.quant.calibration.hessian import reduced_precision
from mycli.quant.calibration.output_moments import GRADIENT_WINDOWS
from mycli.quant.layer_streaming import StreamedModel
from mycli.quant.planning.mixed_precision import WINDOWS
from mycli.quant.planning.plan import QuantizationPlan, plan_low_copy
from mycli.quant.rounding.error_compensation import Moments
from mycli.quant.solving.linear_solver import LinearSolver
from mycli.quant.source_weights import SourceWeights
from mycli.runtime.device.placement import Placement, torch_dtype
from mycli.runtime.kernels.cpu.rounding import pack_codes
from mycli.runtime.models.config import ModelConfig
from mycli.runtime.quantization.scheme import Packing

_SECONDS = 0.5  # per measurement
_WIDEST = 1024  # inputs of the matrix that is solved
_HASHED = 16 << 20  # bytes
_TUNING = 10  # times as long as without tuning, measured on models of 5 to 500 million weights
# Passes of a token through a block until both models have left it: the quantized one enters a part of it again for
# each product that is observed there, unless inputs are kept.
_PASSES = 2.7
_KEEPING_PASSES = 2.0
_TRANSFORM_PASSES = 1.0  # more, where a transform observes every product of the original first
_GRADIENT_PASSES = 5  # of a token through a block: both models forward, the copy also backward
_REPORT_PASSES = 2  # of a measured token: both models
_ACTIVATION_PASSES = 1.0  # more on a CPU, whose kernels multiply by packed weights: activations of 16 and of 8 bits
_OUTPUT_PASSES = 4  # of a token for output moments: forward twice, backward, and the sums
_ROWS_IN_TURN = 2.5  # times as long as all rows in one call: an estimate


def expected_seconds(work: QuantizationPlan, placement: Placement) -> float:
    """Return seconds to quantize, hash and measure, without `choosing_seconds`, within a factor of 2; 3 with tuning."""
    return _quantizing(work, placement) * (_TUNING if work.recipe.tune else 1)


def choosing_seconds(work: QuantizationPlan, placement: Placement) -> float:
    """Return seconds to choose the widths for `target_bpw`: a copy is quantized, and the gradient passes through it."""
    copy = plan_low_copy(work)
    model = StreamedModel(work.folder, placement, work.need.at_once, dense=True)
    tokens = min(WINDOWS, work.recipe.samples) * work.seq
    return _quantizing(copy, placement) + _GRADIENT_PASSES * tokens * work.config.layers * _passing(model, work.seq)


def _quantizing(work: QuantizationPlan, placement: Placement) -> float:
    recipe, config = work.recipe, work.config
    solver = LinearSolver.of(recipe, torch_dtype(config.dtype))
    measured, calibrated = work.measured_tokens, recipe.samples * work.seq if recipe.needs_data else 0
    if calibrated:
        packing = next(iter(work.packings.values()))
        solving = _solving(config, solver, packing, calibrated, placement)
    else:
        solving = _rounding(config, solver, work.packings, SourceWeights(work.folder), placement)
    has_moments = recipe.hessian == "model"
    solving *= _ROWS_IN_TURN if has_moments else 1
    passing = 0.0
    if measured or calibrated:
        model = StreamedModel(work.folder, placement, work.need.at_once, dense=True)
        passes = _KEEPING_PASSES if work.need.keeps_inputs else _PASSES
        passes += 0 if recipe.transform is None else _TRANSFORM_PASSES
        gradients = min(GRADIENT_WINDOWS, recipe.samples) * work.seq if has_moments else 0
        reports = _REPORT_PASSES + (_ACTIVATION_PASSES if placement.device.type == "cpu" else 0)
        passing = _passing(model, work.seq) * (passes * calibrated + _OUTPUT_PASSES * gradients + reports * measured)
    # The result is hashed at the end; the source is hashed in the background.
    zeros = bytes(_HASHED)
    hashing = work.size.bytes * _seconds(lambda: hashlib.sha256(zeros)) / _HASHED
    return solving + config.layers * passing + hashing


def _seconds(task: Callable[[], object]) -> float:
    """Return the mean seconds of `task`, after one warm-up call."""
    task()
    start, count = time.perf_counter(), 0
    while time.perf_counter() - start < _SECONDS:
        task()
        count += 1
    return (time.perf_counter() - start) / count


def _rounding(
    config: ModelConfig,
    solver: LinearSolver,
    packings: Mapping[str, Packing],
    source: SourceWeights,
    placement: Placement,
) -> float:
    """Return seconds to quantize every weight without data, extrapolated from the first ones."""
    start, done = time.perf_counter(), 0
    sizes = {spec.name: spec.out_features * spec.in_features for spec in config.linears()}
    for linear, packing in packings.items():
        weight = source.read(f"{linear}.weight").to(placement.device)
        solved, _ = solver.solve_without_data(linear, weight, packing)
        pack_codes(solved.codes, packing.bits)
        done += sizes[linear]
        if time.perf_counter() - start > 2 * _SECONDS:
            break
    return (time.perf_counter() - start) * sum(sizes[linear] for linear in packings) / done


def _passing(model: StreamedModel, seq: int) -> float:
    windows = torch.randint(0, model.config.vocab_size, (max(1, model.at_once // seq), seq))
    stream, block, side_inputs = model.embed(windows), model.block(0), model.side_inputs(windows)
    with reduced_precision(model.placement.device):
        return _seconds(lambda: model.advance(block, stream, model.context(seq), side_inputs)) / windows.numel()


def _solving(config: ModelConfig, solver: LinearSolver, packing: Packing, tokens: int, placement: Placement) -> float:
    """Return seconds to observe and solve all products: those of a random matrix, scaled by multiplications."""
    width = min(config.hidden_size, _WIDEST) // 128 * 128 or config.hidden_size
    inputs = torch.randn(2 * width, width, device=placement.device)
    weight, moments = inputs[:width], Moments.zeros(width, placement.device)

    def observe() -> float:
        with reduced_precision(placement.device):
            moments.add(inputs, -inputs)
        return float(moments.hessian[0, 0])  # waits for a GPU

    observing = _seconds(observe) / (len(inputs) * width**2)
    grid, hessian = solver.grid(packing), inputs.T @ inputs
    solving = _seconds(lambda: solver.solve_matrix(weight, grid, hessian).quantized.codes[0, 0].item())
    transform = solver.transform
    if transform is not None:
        norm = config.norm()
        with reduced_precision(placement.device):
            solving += _seconds(lambda: transform.choose_scale(weight, grid, hessian, norm))
    solving /= _multiplications(width, width, 18, 1.3)
    total = 0.0
    for index in range(config.layers):
        for group in config.layer(index).products().values():
            columns, rows = group[0].in_features, sum(spec.out_features for spec in group)
            # More than the solver's own: the target of `refit`, and the errors of the outputs.
            total += tokens * columns**2 * observing + solving * _multiplications(rows, columns, 31, 3.7)
    return total


def _multiplications(rows: int, columns: int, products: float, factors: float) -> float:
    return products * rows * columns**2 + factors * columns**3
