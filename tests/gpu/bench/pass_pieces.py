"""Times the fused pass of an 8B without one of its launches, and with other tiles.

Launches overlap, so that their times alone tell little. `second_call` runs both parts. A launch is left out by a
function that only allocates its result.
"""

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch

from mycli.runtime.cache.batch import Chunk
from mycli.runtime.cache.kv_cache import KVCache
from mycli.runtime.engine.passes import fused
from mycli.runtime.engine.passes.graphs import StepInput
from mycli.runtime.kernels.triton import residual
from mycli.runtime.kernels.triton.product import tiles as triton_tiles
from mycli.runtime.kernels.triton.product.tiles import Tile
from mycli.runtime.layers.linear import Linear
from mycli.runtime.layers.rope import Rope
from mycli.runtime.layers.transformer import Transformer
from tests.gpu.bench.timing import Context, in_turns, replay

CONTEXT = 2560
DEPTHS = (64, 2048)
ROWS = (1, 8, 16, 32, 64)
# block_n, warps, block_k, stages, blocks
SHAPES = [(256, 8, 256, 3, 2), (256, 4, 128, 3, 4), (128, 4, 128, 3, 4), (128, 4, 128, 3, 7), (128, 4, 256, 3, 4)]
WIDE_SHAPES = [(128, 4, 128, 3, 2), (128, 4, 128, 3, 3), (128, 8, 128, 3, 1), (256, 8, 128, 3, 1)]
Patches = Mapping[str, Callable[..., Any]]


def _no_project(x: Any, product: Any, projection: Any, rotation: Any, lengths: Any, table: Any, *rest: Any) -> Any:
    cache, dtype = rest[:2]
    shape = len(table), x.values.shape[0] // len(table), projection.heads, cache.head_dim
    return torch.empty(shape, dtype=dtype, device=table.device)


def _no_attention(query: Any, cache: Any, lengths: Any, table: Any, scoring: Any, product: Any, *rest: Any) -> Any:
    return product.activation(query.shape[0] * query.shape[1])


def _no_add(x: Any, product: Any, stream: Any, norm: Any, counters: Any, tile: Any = None, **options: Any) -> Any:
    return residual.residual_arguments(stream, norm, x.tile, tile, **options)[2]


def _no_activate(x: Any, product: Any, dtype: Any, following: Any, *rest: Any) -> Any:
    return following.activation(x.values.shape[0])


def _left_out(hidden: int) -> Mapping[str, Patches]:
    """Return what takes the place of each launch; `add` is called for O, whose input is `hidden` wide, and for down."""

    def add(without_o: bool) -> Callable[..., Any]:
        real = fused.add
        return lambda x, product, *rest, **more: (_no_add if (product.k == hidden) == without_o else real)(
            x, product, *rest, **more
        )

    return {
        "qkv": {"project": _no_project},
        "attention": {"decode_attention": _no_attention},
        "o": {"add": add(True)},
        "gate_up": {"activate": _no_activate},
        "down": {"add": add(False)},
    }


def _run(model: Transformer, rows: int, depth: int) -> Callable[[], object]:
    step, device = fused.FusedStep.compile(model), model.device
    assert isinstance(step, fused.FusedStep), step
    positions = min(CONTEXT, model.config.max_context)
    cache = KVCache(model.config, rows, positions, device, torch.bfloat16)
    rope = Rope(model.config, positions, device, torch.bfloat16)
    inputs = StepInput.zeros(rows, 1, 1, device)
    inputs.fill([Chunk([row], min(depth, positions) - 1, (row,), 1) for row in range(rows)])
    return lambda: step(inputs, rope, cache, last=True)


def _timed(
    model: Transformer, run: Callable[[], object], context: Context, cases: Mapping[str, Sequence[Any]]
) -> dict[str, float]:
    """Return microseconds per layer of `run` under the patches of each case, captured one after another."""
    timed = {}
    with torch.inference_mode():
        for name, patches in cases.items():
            with ExitStack() as stack:
                for one in patches:
                    stack.enter_context(one)
                run()
                timed[name] = replay([run], context)
        found = in_turns(timed, context.rounds)
    return {name: statistics.median(samples) * 1e6 / model.config.layers for name, samples in found.items()}


def pieces(model: Transformer, context: Context, rows: Sequence[int] = ROWS) -> Iterator[dict[str, Any]]:
    """Yield the microseconds of a layer, and how many fewer they are without each launch."""
    left = _left_out(model.config.hidden_size)
    for count in rows:
        for depth in DEPTHS:
            cases = {"whole": []} | {
                name: [patch.object(fused, place, one) for place, one in patches.items()]
                for name, patches in left.items()
            }
            found = _timed(model, _run(model, count, depth), context, cases)
            saved = {name: found["whole"] - time for name, time in found.items() if name != "whole"}
            yield {"rows": count, "keys": depth, "us per layer": found["whole"], **saved}


def tiles(model: Transformer, context: Context, rows: Sequence[int] = ROWS) -> Iterator[dict[str, Any]]:
    """Yield the microseconds of a layer with the tile of the table and with others of as many rows."""
    chosen_by = triton_tiles.tile
    matmul: Any = next(module for module in model.modules() if isinstance(module, Linear)).matmul
    for count in rows:
        chosen = chosen_by(matmul.chip, matmul.packing, count)
        names = ("block_n", "warps", "block_k", "stages", "blocks")
        shapes = SHAPES if count <= 8 else WIDE_SHAPES
        others = [replace(chosen, **dict(zip(names, shape, strict=True))) for shape in shapes]  # type: ignore[arg-type]
        # Reason: all fields are integers.

        def only(tile: Tile) -> Any:
            return patch.object(triton_tiles, "tile", lambda *_: tile)

        found = _timed(
            model,
            _run(model, count, DEPTHS[0]),
            context,
            {str(tile): [only(tile)] for tile in dict.fromkeys([chosen, *others])},
        )
        for tile in dict.fromkeys([chosen, *others]):
            shape = {name: getattr(tile, name) for name in names}
            yield {"rows": count, **shape, "us per layer": found[str(tile)], "chosen": tile == chosen}
