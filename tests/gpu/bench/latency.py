"""Predict the time of one token of an 8B model launch by launch, from the constants stated here.

PYTHONPATH=.links python -m tests.gpu.bench.latency docs/results/predicted.md

A launch takes the larger of its bytes at the card's known bandwidth and its instructions, plus what no bandwidth
shortens: the gap to the previous launch, the ramp until the first product, and the tail from the last product until its
epilogue is stored. Nothing is measured here: the sweep of `second_call` prints these predictions next to measured
times.
"""

import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from mycli.runtime.kernels.triton.product import tiles
from mycli.runtime.kernels.triton.product.tiles import Chip, Tile
from mycli.runtime.kernels.triton.product.weight_layout import tile_k
from mycli.runtime.models.config import ModelConfig
from mycli.runtime.quantization.scheme import Packing
from tests.gpu.bench.shapes import INT4, LLAMA_8B

BOUNDARY = 1.0  # us from the end of a launch in a graph to the first instruction of the next
EARLY_BOUNDARY = 0.4  # us if it started earlier and waits (programmatic dependent launch)
START = 0.3  # us of instructions that find a program's share
MEMORY = 0.7  # us of memory latency
CACHE = 0.27  # us of L2 cache latency, atomics included
TAIL = 0.2  # us of instructions after the partial sums
ISSUE = 0.7  # share of issue slots that are used
INSTRUCTIONS = {8: 1.75, 16: 2.05, 32: 2.95, 64: 4.1}  # instructions per 4-bit weight, by tile rows (kernels.md)
KEYS = 64  # keys per iteration of attention


@dataclass(frozen=True)
class Card:
    """The GPU of a prediction. read: achievable GB/s; clock: GHz of its multiprocessors."""

    chip: Chip
    read: float
    clock: float

    @property
    def boundary(self) -> float:
        """Return the microseconds between two launches."""
        return EARLY_BOUNDARY if self.chip.pdl else BOUNDARY


def cards() -> Mapping[str, Card]:
    """Return the cards. H200: measured copy rate; H100: 90 % of the data sheet's 3,350; 4090: as reported by others."""
    return {
        "H200": Card(Chip((9, 0), 132, pdl=True), 4300, 1.98),
        "H100": Card(Chip((9, 0), 132, pdl=True), 3015, 1.98),
        "RTX 4090": Card(Chip((8, 9), 128), 955, 2.52),
    }


@dataclass(frozen=True)
class Launch:
    """The microseconds of one launch, and how its programs split K."""

    name: str
    parts: int
    programs: int
    body: float
    boundary: float
    ramp: float
    tail: float

    @property
    def microseconds(self) -> float:
        """Return the sum of all components."""
        return self.body + self.boundary + self.ramp + self.tail


def loads_under_way(rows: int, columns: int) -> int:
    """Return how many partial sums a thread loads at a time (`triton.split_k.add_parts`)."""
    few = 4096 // (rows * columns)
    return 16 if few >= 16 else 8 if few >= 8 else 4


def product(
    name: str, card: Card, packing: Packing, rows: int, n: int, k: int, tile: Tile, parts: int, loads: int | None = None
) -> Launch:
    """Predict a product with an epilogue. loads: partial sums loaded at a time, by default as in the kernels."""
    blocks = -(-n // tile.block_n) * -(-rows // tile.block_m)
    programs, slots = blocks * parts, card.chip.processors * tile.blocks
    nbytes = packing.bytes(n, k) + 4 * rows * n * parts
    issued = n * k * INSTRUCTIONS[tile.block_m] / 32 / (4 * card.chip.processors * card.clock * 1e3 * ISSUE)
    waves = -(-programs // slots) * slots / programs if programs > slots else 1.0
    body = max(nbytes / card.read / 1e3, issued) * waves
    at_once = tile.rows_at_once(rows, tile.block_n)
    trips = -(-parts // (loads or loads_under_way(at_once, tile.block_n))) * -(-min(rows, tile.block_m) // at_once)
    # With an early launch the first weights are in the L2 cache before the operand is ready.
    ramp = START + CACHE + (0 if card.chip.pdl else MEMORY)
    return Launch(name, parts, programs, body, card.boundary, ramp, 2 * CACHE + trips * CACHE + TAIL)


def product_microseconds(card: Card, packing: Packing, rows: int, n: int, k: int, tile: Tile, parts: int) -> float:
    """Return the microseconds of `product`."""
    return product("", card, packing, rows, n, k, tile, parts).microseconds


def attention(card: Card, config: ModelConfig, rows: int, depth: int, context: int) -> Launch:
    """Predict attention of `rows` sequences with `depth` keys each, in a cache of `context` tokens."""
    programs = rows * config.kv_heads
    parts = min(64, max(1, 2 * card.chip.processors // programs), max(1, context // (4 * KEYS)))
    nbytes = 4 * rows * depth * config.kv_heads * config.head_dim
    turns = math.ceil(math.ceil(depth / KEYS) / parts)
    latency = START + CACHE + MEMORY + turns * 0.15  # two products and the softmax of an iteration, sequentially
    tail = 2 * CACHE + -(-parts // 8) * CACHE + TAIL
    return Launch("attention", parts, programs * parts, nbytes / card.read / 1e3, card.boundary, latency, tail)


def launches(
    card: Card, config: ModelConfig, rows: int, depth: int, narrow: bool = False, loads: int | None = None
) -> Iterator[Launch]:
    """Yield the launches of each layer, then of the head."""
    kept = tile_k(INT4)
    kv, hidden, wide = config.kv_heads * config.head_dim, config.hidden_size, config.intermediate_size
    shapes = {"qkv": (hidden + 2 * kv, hidden), "o": (hidden, hidden), "gate_up": (2 * wide, hidden)}
    shapes |= {"down": (hidden, wide), "head": (config.vocab_size, hidden)}
    for name, (n, k) in shapes.items():
        tile = tiles.tile(card.chip, INT4, rows)
        parts, _ = tiles.parts(card.chip, tile, INT4, rows, n, k, kept)
        if narrow and parts > 4:
            tile = replace(tile, block_n=tile.block_n // 2, warps=tile.warps // 2)
            parts, _ = tiles.parts(card.chip, tile, INT4, rows, n, k, kept)
        yield product(name, card, INT4, rows, n, k, tile, parts, loads)
        if name == "qkv":
            yield attention(card, config, rows, depth, 8192)


def token_microseconds(card: Card, config: ModelConfig, rows: int, depth: int, **options: object) -> float:
    """Return the microseconds of a decoding step of `rows` sequences: embedding, layers, head."""
    *layer, head = launches(card, config, rows, depth, **options)  # type: ignore[arg-type]  # as `launches`
    embedding = card.boundary + START + MEMORY + TAIL
    return embedding + config.layers * sum(one.microseconds for one in layer) + head.microseconds


PAGE = """# Predicted time per token of an 8B model

**No figure on this page is measured.** They are computed from one model of latency, whose constants
are in the program:

    python -m tests.gpu.bench.latency docs/results/predicted.md

Llama-3.1-8B, int4 in groups of 128, head included; 2,048 keys of 16 bits per sequence.
"""


def page() -> str:
    """Return the report in Markdown."""
    lines = [PAGE, "## Launches of a layer, one sequence\n"]
    lines += ["| card | launch | parts of K | programs | bytes or instructions, us | boundary | ramp | tail | us |"]
    lines += ["|---|---|---:|---:|---:|---:|---:|---:|---:|"]
    for name, card in cards().items():
        for one in launches(card, LLAMA_8B, 1, 2048):
            numbers = (one.body, one.boundary, one.ramp, one.tail, one.microseconds)
            cells = " | ".join(f"{number:.2f}" for number in numbers)
            lines.append(f"| {name} | {one.name} | {one.parts} | {one.programs} | {cells} |")
    lines += ["\n## Tokens per second\n"]
    lines += [
        "*4 loads*: the sums of four parts of K are read concurrently, for any number of rows. *narrow*:",
        "half as many rows of the weight and warps per program, with half as many parts, where there are",
        "more than four.\n",
    ]
    lines += ["| card | sequences | limit of memory | predicted | with 4 loads | with narrow tiles |"]
    lines += ["|---|---:|---:|---:|---:|---:|"]
    for name, card in cards().items():
        for rows in (1, 4, 16, 64):
            *layer, head = launches(card, LLAMA_8B, rows, 2048)
            least = LLAMA_8B.layers * sum(one.body for one in layer) + head.body
            ways: tuple[dict[str, object], ...] = ({}, {"loads": 4}, {"narrow": True})
            found = (1e6 * rows / token_microseconds(card, LLAMA_8B, rows, 2048, **way) for way in ways)
            cells = " | ".join(f"{rate:.0f}" for rate in (1e6 * rows / least, *found))
            lines.append(f"| {name} | {rows} | {cells} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page(), "utf-8") if len(sys.argv) > 1 else sys.stdout.write(page())
