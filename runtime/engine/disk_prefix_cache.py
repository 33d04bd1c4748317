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
from mycli.runtime.cache.prefix_store import PIECE, KeptPiece, PrefixStore, StoredPrefix, StoreStats
from mycli.runtime.checkpoint.model_folder import ModelFolder
from mycli.runtime.engine.model_runner import ModelRunner
from mycli.runtime.errors import Declined
from mycli.runtime.kernels.cpu.library.build import native

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
    stretched = any(one.scaling.kind in _BY_LENGTH for one in folder.config.distinct_ropes)
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
    if isinstance(library, Declined):
        return ["torch", torch.backends.cpu.get_cpu_capability(), str(torch.get_num_threads())]
    return [library.isa, _digest(library.path).hex()]


class DiskPrefixCache:
    """A store beside a cache. `settle`: makes the copies between blocks, and states, that are still to be made.

    Where layers keep states a text is gone on from only where one was kept, and is brought back whole up to there.
    """

    def __init__(self, store: PrefixStore, cache: KVCache, settle: Callable[[], None]) -> None:
        self._store, self._cache, self._settle = store, cache, settle
        self._nbytes, self._state_bytes = cache.nbytes_of(PIECE), cache.states.slot_bytes

    @property
    def stats(self) -> StoreStats:
        """What the store did."""
        return self._store.stats

    def find(self, tokens: Sequence[int]) -> StoredPrefix:
        """What the folder has of a text, and can be gone on from."""
        if not self._state_bytes:
            return self._store.find(tokens, self._nbytes)
        found = self._store.find(tokens[:-1], self._nbytes)  # the last is always run
        for count in range(len(found.pieces), 0, -1):
            if not self._store.lacks(found.pieces[count - 1].state, self._state_bytes):
                without = f"recurrent state not kept on disk from token {count * PIECE + 1} on"
                return StoredPrefix(found.pieces[:count], found.miss if count == len(found.pieces) else without)
        return StoredPrefix((), "recurrent state not kept on disk" if found.pieces else found.miss)

    def restore(self, found: StoredPrefix, table: BlockTable, end: int) -> bool:
        """Fill in the positions of a table from its length up to `end`, where blocks are reserved: within one piece,
        or, where the table has a state, at the end of one, with the state after it.

        False where a file is of no use; the table holds no more than before.
        """
        at = table.length
        while at < end:
            piece = found.pieces[at // PIECE]
            values, stop = self._store.read(piece, self._nbytes), min(end, (piece.index + 1) * PIECE)
            if values is None:
                return False
            self._settle()  # a copy into these blocks, made later, would undo it
            self._cache.put(values, PIECE, at - piece.index * PIECE, list(self._runs(table, at, stop)))
            at = stop
        return table.state is None or self._restore_state(found.pieces[end // PIECE - 1].state, table.state)

    def _restore_state(self, state: KeptPiece, slot: int) -> bool:
        values = self._store.read(state, self._state_bytes)
        if values is not None:
            self._cache.states.put(slot, values)
        return values is not None

    def keep(self, tokens: Sequence[int], table: BlockTable) -> None:
        """Write the whole pieces that a table holds of `tokens`, and the states kept at their ends, unless they are
        kept already."""
        pieces = self._store.pieces(tokens[: table.length])
        for piece in self._store.missing(pieces):
            start = piece.index * PIECE
            self._store.write(piece, self._cache.take(list(self._runs(table, start, start + PIECE))))
        ends = {(piece.index + 1) * PIECE: piece.state for piece in pieces}
        states = {ends[length]: slot for length, slot in table.snapshots.items() if length in ends}
        for state in self._store.missing(states):
            self._settle()
            self._store.write(state, self._cache.states.take(states[state]))

    def close(self) -> None:
        """Write what waits to be written; nothing is kept after that."""
        self._store.close()

    def _runs(self, table: BlockTable, start: int, end: int) -> Iterator[Run]:
        size = self._cache.block_size
        while start < end:
            count = min(end, (start // size + 1) * size) - start
            yield Run(table.blocks[start // size], start % size, count)
            start += count
