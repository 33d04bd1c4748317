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
from itertools import product as product_of
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
# Instructions per 4-bit weight by compute capability and tile rows, as counted in docs/results/kernels.md.
INSTRUCTIONS = {
    (8, 9): {8: 1.52, 16: 1.79, 32: 2.59, 64: 5.05},
    (9, 0): {8: 1.45, 16: 1.95, 32: 2.35, 64: 3.89},
    (12, 0): {8: 1.53, 16: 1.85, 32: 2.68, 64: 5.31},
}
KEYS = 64  # keys per iteration of attention
# Tokens per second by card, keys and sequences, from docs/results/h200.md; the mean over the 128 tokens of a reply.
MEASURED = {("H200", 0, 1): 522, ("H200", 0, 16): 6760, ("H200", 2048, 1): 474}


@dataclass(frozen=True)
class Card:
    """The GPU of a prediction. read: achievable GB/s; clock: GHz of its multiprocessors.

    delay: microseconds added to the gap between two launches; tail: of instructions after the partial sums.
    """

    chip: Chip
    read: float
    clock: float
    delay: float = 0.0
    tail: float = TAIL

    @property
    def boundary(self) -> float:
        """Return the microseconds between two launches."""
        return self.delay + (EARLY_BOUNDARY if self.chip.pdl else BOUNDARY)

    def cautious(self) -> "Card":
        """Return the card with less bandwidth, and longer gaps and tails, as issue cycles of compiled code suggest."""
        return replace(self, read=0.97 * self.read, delay=0.35, tail=0.6)


def cards() -> Mapping[str, Card]:
    """Return the cards. H200: measured copy rate; H100, 5090: 90 % of the data sheet; 4090: as reported by others."""
    return {
        "H200": Card(Chip((9, 0), 132, pdl=True), 4300, 1.98),
        "H100": Card(Chip((9, 0), 132, pdl=True), 3015, 1.98),
        "RTX 4090": Card(Chip((8, 9), 128), 955, 2.52),
        "RTX 5090": Card(Chip((12, 0), 170, pdl=True), 1613, 2.41),
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
    counted = INSTRUCTIONS[card.chip.capability][tile.block_m]
    issued = n * k * counted / 32 / (4 * card.chip.processors * card.clock * 1e3 * ISSUE)
    waves = -(-programs // slots) * slots / programs if programs > slots else 1.0
    body = max(nbytes / card.read / 1e3, issued) * waves
    at_once = tile.rows_at_once(rows)
    trips = -(-parts // (loads or loads_under_way(at_once, tile.block_n)))
    # With an early launch the first weights are in the L2 cache before the operand is ready.
    ramp = START + CACHE + (0 if card.chip.pdl else MEMORY)
    own = 0.0 if tile.epilogue_in_product else card.boundary  # of a second launch
    return Launch(name, parts, programs, body, card.boundary + own, ramp, 2 * CACHE + trips * CACHE + card.tail)


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
    tail = 2 * CACHE + -(-parts // 8) * CACHE + card.tail
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
        parts, _ = tiles.split(card.chip, tile, INT4.bits, rows, n, k, kept)
        if narrow and parts > 4:
            tile = replace(tile, block_n=tile.block_n // 2, warps=tile.warps // 2)
            parts, _ = tiles.split(card.chip, tile, INT4.bits, rows, n, k, kept)
        yield product(name, card, INT4, rows, n, k, tile, parts, loads)
        if name == "qkv":
            yield attention(card, config, rows, depth, 8192)


def token_microseconds(card: Card, config: ModelConfig, rows: int, depth: int, **options: object) -> float:
    """Return the microseconds of a decoding step of `rows` sequences: embedding, layers, head."""
    *layer, head = launches(card, config, rows, depth, **options)  # type: ignore[arg-type]  # as `launches`
    embedding = card.boundary + START + MEMORY + card.tail
    return embedding + config.layers * sum(one.microseconds for one in layer) + head.microseconds


PAGE = """# Predicted time per token of an 8B model

Computed from one model of latency, whose constants are in the program and were written before any
measurement; the last column has what an H200 did ([h200.md](h200.md)). The model is too hopeful: on
the H200 a launch takes about 4 us longer than it says.

    python -m tests.gpu.bench.latency docs/results/predicted.md

Llama-3.1-8B, int4 in groups of 128, head included; keys of 16 bits. Made 2026-11-27.
"""


COLUMNS = """- *limit*: bytes and instructions alone.
- *cautious*: .35 us more between two launches, .6 instead of .2 us of instructions in a tail, as
  the issue cycles of compiled code suggest, and 3 % less bandwidth.
- *narrow tiles*: half as many rows of the weight and warps per program, with half as many parts,
  where there are more than four.
"""


def page() -> str:
    """Return the report in Markdown."""
    lines = [PAGE, "## Launches of a layer, one sequence with 2,048 keys\n"]
    lines += ["| card | launch | parts of K | programs | bytes or instructions, us | boundary | ramp | tail | us |"]
    lines += ["|---|---|---:|---:|---:|---:|---:|---:|---:|"]
    for name, card in cards().items():
        for one in launches(card, LLAMA_8B, 1, 2048):
            numbers = (one.body, one.boundary, one.ramp, one.tail, one.microseconds)
            cells = " | ".join(f"{number:.2f}" for number in numbers)
            lines.append(f"| {name} | {one.name} | {one.parts} | {one.programs} | {cells} |")
    lines += ["\n## Tokens per second\n", COLUMNS]
    lines += ["| card | keys | sequences | limit | predicted | cautious | narrow tiles | measured |"]
    lines += ["|---|---:|---:|---:|---:|---:|---:|---:|"]
    for name, card in cards().items():
        for depth, rows in product_of((0, 2048), (1, 8, 16, 64)):
            *layer, head = launches(card, LLAMA_8B, rows, depth)
            least = LLAMA_8B.layers * sum(one.body for one in layer) + head.body
            ways: tuple[tuple[Card, bool], ...] = ((card, False), (card.cautious(), False), (card, True))
            times = [token_microseconds(one, LLAMA_8B, rows, depth, narrow=narrow) for one, narrow in ways]
            cells = " | ".join(f"{1e6 * rows / time:.0f}" for time in (least, *times))
            lines.append(f"| {name} | {depth} | {rows} | {cells} | {MEASURED.get((name, depth, rows), '')} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page(), "utf-8") if len(sys.argv) > 1 else sys.stdout.write(page())
