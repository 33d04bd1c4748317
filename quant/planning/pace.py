"""How long quantizing will take on this machine, told from seconds of the work itself.

Without data, the first weights are really read, rounded and packed. With data, tokens really pass the first block and a
matrix of the model's width is solved; the rest is counted. Writes nothing, and knows no solver by name.
"""

import hashlib
import time
from collections.abc import Callable

import torch

from mycli.quant import solvers
from mycli.quant.calibration.hessian import rough_products
from mycli.quant.layer_streaming import StreamedModel
from mycli.quant.planning.plan import QuantizationPlan, measured_tokens
from mycli.quant.rounding.error_compensation import Moments
from mycli.quant.rounding.grid import Grid
from mycli.quant.source_weights import SourceWeights
from mycli.quant.tensorwise import quantize_linear
from mycli.runtime.device.placement import Placement, torch_dtype
from mycli.runtime.kernels.cpu.rounding import pack_codes

_SECONDS = 0.5  # of each kind of work
_WIDEST = 1024  # of the matrix that is solved
_HASHED = 16 << 20
# Passes of a token through a block until both models have left it: the quantized one enters a part of it again for
# each product that is observed there.
_PASSES = 2.7


def expected_seconds(work: QuantizationPlan, placement: Placement) -> float | None:
    """Of the whole command but its start; None where that is not counted: transforms, tuning, widths by need.

    Within a factor of about 2. Raises what reading the first weights raises.
    """
    if work.recipe.tune or work.recipe.target_bpw is not None or work.recipe.transform is not None:
        return None
    measured = measured_tokens(work.report)
    passing = _passing(work, placement) if measured or work.recipe.needs_data else 0.0
    solving = _solving(work, placement) if work.recipe.needs_data else _rounding(work, placement)
    calibrated = work.recipe.samples * work.seq if work.recipe.needs_data else 0
    return solving + work.config.layers * passing * (_PASSES * calibrated + 2 * measured) + _hashing(work)


def _seconds(task: Callable[[], object]) -> float:
    """That `task` takes, after one call that does not count."""
    task()
    began, count = time.perf_counter(), 0
    while time.perf_counter() - began < _SECONDS:
        task()
        count += 1
    return (time.perf_counter() - began) / count


def _hashing(work: QuantizationPlan) -> float:
    """Seconds for the result's digest; the source's is taken beside other work."""
    piece = bytes(_HASHED)
    return work.size.bytes * _seconds(lambda: hashlib.sha256(piece)) / _HASHED


def _rounding(work: QuantizationPlan, placement: Placement) -> float:
    """Seconds to round every weight, as the first of them take."""
    source, began, done = SourceWeights(work.folder), time.perf_counter(), 0
    sizes = {spec.name: spec.out_features * spec.in_features for spec in work.config.linears()}
    for linear, packing in work.packings.items():
        solved, _ = quantize_linear(work, source, linear, placement.device)
        pack_codes(solved.codes, packing.bits)
        done += sizes[linear]
        if time.perf_counter() - began > 2 * _SECONDS:
            break
    return (time.perf_counter() - began) * sum(sizes[linear] for linear in work.packings) / done


def _passing(work: QuantizationPlan, placement: Placement) -> float:
    """Seconds for a token to pass the first block."""
    model = StreamedModel(work.folder, placement, work.need.at_once, dense=True)
    windows = torch.randint(0, work.config.vocab_size, (max(1, work.need.at_once // work.seq), work.seq))
    stream, block, sides = model.embed(windows), model.block(0), model.sides(windows)
    with rough_products(placement.device):
        return _seconds(lambda: model.advance(block, stream, model.context(work.seq), sides)) / windows.numel()


def _solving(work: QuantizationPlan, placement: Placement) -> float:
    """Seconds to observe and solve all products: as a matrix of random numbers takes, by counted multiplications."""
    width = min(work.config.hidden_size, _WIDEST) // 128 * 128 or work.config.hidden_size
    grid = Grid(next(iter(work.packings.values())), torch_dtype(work.config.dtype), work.recipe.scales)
    inputs = torch.randn(2 * width, width, device=placement.device)
    weight, moments = inputs[:width], Moments.zeros(width, placement.device)

    def observe() -> float:
        with rough_products(placement.device):
            moments.add(inputs, inputs)
        return float(moments.hessian[0, 0])  # waits for a GPU

    observing = _seconds(observe) / (len(inputs) * width**2)
    hessian, solve = inputs.T @ inputs, solvers.load(work.recipe.solver).solve
    solving = _seconds(lambda: solve(weight, grid, hessian).quantized.codes[0, 0].item()) / _solved(
        width, width, 18, 1.3
    )
    total = 0.0
    for index in range(work.config.layers):
        for group in work.config.layer(index).products().values():
            columns, rows = group[0].in_features, sum(each.out_features for each in group)
            # Beyond what a solver does: the aim at the original's outputs, and the errors of the outputs.
            total += work.recipe.samples * work.seq * columns**2 * observing + solving * _solved(rows, columns, 31, 3.7)
    return total


def _solved(rows: int, columns: int, products: float, factors: float) -> float:
    """Multiplications, of two kinds of work on a matrix."""
    return products * rows * columns**2 + factors * columns**3
