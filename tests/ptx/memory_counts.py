"""Count the memory costs of the kernels' main loops on the emulator: bank conflicts, and sectors partly used.

PYTHONPATH=.links python -m tests.ptx.memory_counts FOLDER [80 90 120]

Prints the table; FOLDER caches what is compiled. Small matrices suffice: each iteration of a loop does the same.
The exit code is 1 if a count is above `MOST`.
"""

import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from mycli.runtime.cache.kv_cache import PACKED, Stored
from mycli.runtime.kernels.paged import Ragged, Scoring
from mycli.runtime.kernels.triton.attention import decode_attention
from mycli.runtime.kernels.triton.latent import launch_latent_attention
from mycli.runtime.kernels.triton.layer_cache import LayerCache
from mycli.runtime.kernels.triton.product.dense import DenseProduct
from mycli.runtime.kernels.triton.product.matmul import FewRowsProduct, TritonMatmul
from mycli.runtime.kernels.triton.product.tiles import Chip
from mycli.runtime.kernels.triton.prompt_attention import launch_prompt_attention
from mycli.runtime.kernels.triton.residual import add
from mycli.runtime.quantization.scheme import Packing
from tests.ptx.emulated import device, emulate
from tests.ptx.emulator.run import Cost
from tests.support.random_tensors import normal, weight

CAPABILITIES = (80, 90, 120)
SIZE, COLUMNS = 128, 8192  # of a weight: one program runs most iterations
CACHES = {"": torch.bfloat16, " int8": torch.int8, " int4": PACKED}  # by suffix of a name
PROMPT = 200  # tokens of a prompt
MOST = 1.1  # times the minimum that a launch may cost
GROUPS = ("shared", "global reads", "global writes")


@dataclass(frozen=True)
class Launch:
    """The kernel and its launch. rows: of activations, or sequences; kv: of the cache; tokens: of each sequence."""

    name: str
    packing: Packing | None = Packing(4, 128)  # None: a weight of 16 bits
    rows: int = 1
    kv: torch.dtype | None = None
    tokens: int = 1
    head_dim: int = 128
    latent: bool = False

    def __str__(self) -> str:
        return self.name


LAUNCHES = [
    *(Launch(f"multiply int4-g128 rows {rows} add", rows=rows) for rows in (1, 8, 16, 32, 64)),
    *(Launch(f"multiply int{bits}-g64 rows {rows} add", Packing(bits, 64), rows) for bits, rows in ((8, 16), (3, 8))),
    Launch("multiply int3-g128 rows 16 add", Packing(3, 128), 16),
    Launch("multiply int2-g128 rows 16 add", Packing(2, 128), 16),
    *(Launch(f"multiply bf16 rows {rows} add", None, rows) for rows in (1, 8, 16, 32)),
    *(Launch(f"attend{name}", rows=2, kv=kind) for name, kind in CACHES.items()),
    *(Launch(f"attend{name} to 8", rows=2, kv=kind, tokens=8) for name, kind in CACHES.items()),
    *(
        Launch(f"attend prompt{name} of {size}", kv=kind, tokens=PROMPT, head_dim=size)
        for size in (128, 256)
        for name, kind in CACHES.items()
    ),
    *(Launch(f"attend latents{name}", rows=2, kv=CACHES[name], latent=True) for name in ("", " int8")),
]


def multiply(launch: Launch, chip: Chip) -> None:
    product: FewRowsProduct
    if launch.packing is None:
        product = DenseProduct(normal(SIZE, COLUMNS).bfloat16(), chip)
    else:
        product = TritonMatmul(weight(launch.packing, SIZE, COLUMNS, 0), chip)
    stream = torch.zeros(launch.rows, SIZE, dtype=torch.bfloat16)
    x = product.prepare(normal(launch.rows, COLUMNS).bfloat16())
    device().runner.costs.clear()
    add(x, product, stream, None, counters())


def attend(launch: Launch, chip: Chip) -> None:
    """Launch attention of 8 heads and 2 KV heads; blocks of 64 in random order."""
    assert launch.kv is not None
    shape = (2 * launch.rows * 4, 2, 64, launch.head_dim)
    values = [Stored.of(normal(*shape, seed=seed).bfloat16(), launch.kv) for seed in (1, 2)]
    stored = [Stored(one.data.contiguous(), one.scales) for one in values]
    table = torch.randperm(shape[0], generator=torch.Generator().manual_seed(0)).to(torch.int32).view(launch.rows, -1)
    lengths = torch.full((launch.rows,), 512, dtype=torch.int32)
    scoring = Scoring(launch.head_dim**-0.5)
    if launch.tokens == PROMPT:
        query = normal(launch.tokens, 8, launch.head_dim).bfloat16()
        starts = torch.tensor([0, launch.tokens], dtype=torch.int32)
        ragged = Ragged(starts, lengths, table, launch.tokens, known=(launch.tokens,))
        launch_prompt_attention(query, *stored, ragged, scoring, chip)
        return
    product = TritonMatmul(weight(Packing(4, 128), SIZE, COLUMNS, 0), chip)
    query = normal(launch.rows, launch.tokens, 8, launch.head_dim).bfloat16()
    cache = LayerCache(*(one.data for one in stored), *(one.scales for one in stored))
    decode_attention(query, cache, lengths, table, scoring, product, counters())


def attend_latents(launch: Launch, chip: Chip) -> None:
    """Launch attention of 16 heads to latents of DeepSeek's sizes; blocks of 64 in random order."""
    assert launch.kv is not None
    rank, rope, heads = 512, 64, 16
    latents, rotated = (
        Stored.of(normal(8 * launch.rows, 1, 64, size, seed=size).bfloat16(), launch.kv) for size in (rank, rope)
    )
    table = torch.randperm(8 * launch.rows, generator=torch.Generator().manual_seed(0)).to(torch.int32)
    lengths, starts = torch.full((launch.rows,), 512, dtype=torch.int32), torch.arange(launch.rows + 1).int()
    ragged = Ragged(starts, lengths, table.view(launch.rows, 8), 1)
    query, turned = (normal(launch.rows, heads, size).bfloat16() for size in (rank, rope))
    launch_latent_attention(query, turned, latents, rotated, ragged, 0.1, chip)


def counters() -> torch.Tensor:
    return torch.zeros(1 << 12, dtype=torch.int32)


def costs(launch: Launch) -> list[Cost]:
    """Return the costs of every instruction of all its kernels; runs in a process of `emulated`."""
    played = device()
    played.runner.costs.clear()
    capability = divmod(played.capability, 10)
    work: Callable[[Launch, Chip], None] = multiply if launch.kv is None else attend
    if launch.latent:
        work = attend_latents
    played.runner.count = True
    try:
        work(launch, Chip(capability, 1, capability >= (9, 0)))
    finally:
        played.runner.count = False
    return played.runner.costs


def group_of(cost: Cost) -> str:
    return "shared" if cost.shared else "global writes" if cost.access.writes else "global reads"


def ratios(found: list[Cost]) -> dict[str, float]:
    """Return cost divided by minimum: accesses of the main loop, and the global writes of the whole kernel."""
    result = {}
    for name in GROUPS:
        own = [cost for cost in found if group_of(cost) == name and (cost.access.main_loop or name == GROUPS[2])]
        least = sum(cost.least for cost in own)
        result[name] = sum(cost.made for cost in own) / least if least else math.nan  # nothing was counted
    return result


def table(folder: Path, capabilities: tuple[int, ...] = CAPABILITIES) -> Iterator[str]:
    """Yield the lines of the page; a count above `MOST` is bold."""
    yield "| kernel | sm | shared wavefronts | sectors read | sectors written |"
    yield "|---|---:|---:|---:|---:|"
    for capability in capabilities:
        for launch in LAUNCHES:
            found = ratios(emulate(folder, capability, costs, launch))
            marks = {name: "**" * (not found[name] <= MOST) for name in GROUPS}
            cells = (f"{marks[name]}{found[name]:.2f}{marks[name]}" for name in GROUPS)
            yield f"| {launch} | {capability} | " + " | ".join(cells) + " |"


def _main(arguments: list[str]) -> int:
    folder, *chips = arguments
    good = True
    for line in table(Path(folder), tuple(map(int, chips)) or CAPABILITIES):
        print(line, flush=True)
        good = good and "**" not in line
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1:]))
