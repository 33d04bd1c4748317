"""What a folder keeps of texts over restarts, as an engine uses it: pieces of its cache, read and written by position.

What is in a file was computed by the same program, of the same weights, in the same arithmetic, or its name would be
another; so a reply that goes on from it has the bits of one that was read here. Knows caches and blocks; does not know
files beyond a `PrefixStore`, or whose turn it is.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from mycli.runtime.cache.block_table import BlockTable
from mycli.runtime.cache.kv_cache import KVCache, Run
from mycli.runtime.cache.prefix_store import PIECE, Found, PrefixStore, StoreStats
from mycli.runtime.checkpoint.model_folder import ModelFolder
from mycli.runtime.engine.model_runner import ModelRunner
from mycli.runtime.kernels.cpu.build import native

_SOURCES = (".py", ".cpp", ".h")
_BY_LENGTH = ("dynamic", "longrope")  # rotations that depend on how much the cache holds


def identity(folder: ModelFolder, runner: ModelRunner, context: int) -> bytes:
    """SHA-256 over all that keys and values depend on beside the tokens.

    The model's files and its adapter's; this program's sources, torch, and the native library; the device; number
    formats; the context, where rotations depend on it. Reads the files whole, some 2 GB a second for each of them.
    """
    sources = folder.source_files()
    with ThreadPoolExecutor() as pool:
        digests = [digest.hex() for digest in pool.map(_digest, sources)]
    stretched = any(one.scaling.kind in _BY_LENGTH for one in folder.config.distinct_rotations)
    made = {
        "files": sorted(zip((path.name for path in sources), digests, strict=True)),
        "program": _program(),
        "torch": torch.__version__,
        "kernels": _kernels(runner.device),
        "dtype": str(runner.dtype),
        "kv": runner.kv,
        "piece": PIECE,
        "context": context if stretched else None,
    }
    return hashlib.sha256(json.dumps(made, sort_keys=True).encode()).digest()


def _digest(path: Path) -> bytes:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").digest()


def _program() -> str:
    """Of the sources below `runtime`: whatever is changed in them, nothing kept before is used."""
    root = Path(__file__).parents[1]
    found = hashlib.sha256()
    for path in sorted(path for path in root.rglob("*") if path.suffix in _SOURCES):
        found.update(str(path.relative_to(root)).encode() + b"\0" + _digest(path))
    return found.hexdigest()


def _kernels(device: torch.device) -> list[str]:
    """What multiplies there. Torch's own products may depend on the number of threads, the native ones do not."""
    if device.type == "cuda":
        import triton

        return [torch.cuda.get_device_name(device), triton.__version__]
    library = native()
    if isinstance(library, str):
        return ["torch", torch.backends.cpu.get_cpu_capability(), str(torch.get_num_threads())]
    return [library.isa, _digest(library.path).hex()]


class KeptTexts:
    """A store beside a cache. `settle`: makes the copies between blocks that are still to be made."""

    def __init__(self, store: PrefixStore, cache: KVCache, settle: Callable[[], None]) -> None:
        self._store, self._cache, self._settle = store, cache, settle
        self._nbytes = cache.nbytes_of(PIECE)

    @property
    def stats(self) -> StoreStats:
        """What the store did."""
        return self._store.stats

    def find(self, tokens: Sequence[int]) -> Found:
        """What the folder has of a text."""
        return self._store.find(tokens, self._nbytes)

    def restore(self, found: Found, table: BlockTable, end: int) -> bool:
        """Fill in the positions of a table from its length up to `end`, in one piece, where blocks are reserved.

        False where the file is of no use; the table holds no more than before.
        """
        piece = found.pieces[table.length // PIECE]
        values = self._store.read(piece, self._nbytes)
        if values is None:
            return False
        self._settle()  # a copy into these blocks, made later, would undo it
        skip = table.length - piece.index * PIECE
        self._cache.put(values, PIECE, skip, list(self._runs(table, table.length, end)))
        return True

    def keep(self, tokens: Sequence[int], table: BlockTable) -> None:
        """Write the whole pieces that a table holds of `tokens`, unless they are kept already."""
        for piece in self._store.missing(tokens[: table.length]):
            start = piece.index * PIECE
            self._store.write(piece, self._cache.take(list(self._runs(table, start, start + PIECE))))

    def close(self) -> None:
        """Write what waits to be written; nothing is kept after that."""
        self._store.close()

    def _runs(self, table: BlockTable, start: int, end: int) -> Iterator[Run]:
        size = self._cache.block_size
        while start < end:
            count = min(end, (start // size + 1) * size) - start
            yield Run(table.blocks[start // size], start % size, count)
            start += count
