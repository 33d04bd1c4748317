"""The disk prefix cache: pieces of the KV cache and recurrent states, kept in a folder over restarts.

The name of a file depends on everything its values depend on: model files, this program, arithmetic, tokens. So a reply
that starts from a stored prefix has the same bits as one whose prompt is computed.
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
_BY_LENGTH = ("dynamic", "longrope")  # rotary tables that depend on the length


def identity(folder: ModelFolder, runner: ModelRunner, context: int) -> bytes:
    """Return the SHA-256 of everything that keys and values depend on apart from the tokens.

    That is the files of the model and its adapter, the sources of this program, torch and the native library, the
    device, dtypes, and the context if rotary tables depend on it. Reads all files, at some 2 GB/s each.
    """
    sources = folder.source_files()
    with ThreadPoolExecutor() as pool:
        digests = [digest.hex() for digest in pool.map(_digest, sources)]
    by_length = any(rope.scaling.kind in _BY_LENGTH for rope in folder.config.distinct_ropes)
    inputs = {
        "files": sorted(zip((path.name for path in sources), digests, strict=True)),
        "program": _program(),
        "torch": torch.__version__,
        "kernels": _kernels(runner.device),
        "dtype": str(runner.dtype),
        "kv": runner.kv,
        "piece": PIECE,
        "context": context if by_length else None,
    }
    return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).digest()


def _digest(path: Path) -> bytes:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").digest()


def _program() -> str:
    # All sources of `runtime`: after any change of them stored prefixes are not used.
    root = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for path in sorted(path for path in root.rglob("*") if path.suffix in _SOURCES):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + _digest(path))
    return digest.hexdigest()


def _kernels(device: torch.device) -> list[str]:
    if device.type == "cuda":
        import triton

        return [torch.cuda.get_device_name(device), triton.__version__]
    library = native()
    if isinstance(library, Declined):  # torch's products may depend on the number of threads, the native ones do not
        return ["torch", torch.backends.cpu.get_cpu_capability(), str(torch.get_num_threads())]
    return [library.isa, _digest(library.path).hex()]


class DiskPrefixCache:
    """Reads and writes prefixes of one KV cache.

    With recurrent layers a prefix is usable only up to a stored state, and is restored whole up to there.
    """

    def __init__(self, store: PrefixStore, cache: KVCache, copy_blocks: Callable[[], None]) -> None:
        """copy_blocks: performs the queued copies of blocks and states."""
        self._store, self._cache, self._copy_blocks = store, cache, copy_blocks
        self._nbytes, self._state_bytes = cache.nbytes_of(PIECE), cache.states.slot_bytes

    @property
    def stats(self) -> StoreStats:
        return self._store.stats

    def find(self, tokens: Sequence[int]) -> StoredPrefix:
        """Return the stored pieces of the prefix of `tokens`, up to the last usable one."""
        if not self._state_bytes:
            return self._store.find(tokens, self._nbytes)
        stored = self._store.find(tokens[:-1], self._nbytes)  # the last token is computed for its logits
        for count in range(len(stored.pieces), 0, -1):
            if not self._store.lacks(stored.pieces[count - 1].state, self._state_bytes):
                miss = f"recurrent state not kept on disk from token {count * PIECE + 1} on"
                return StoredPrefix(stored.pieces[:count], stored.miss if count == len(stored.pieces) else miss)
        return StoredPrefix((), "recurrent state not kept on disk" if stored.pieces else stored.miss)

    def restore(self, stored: StoredPrefix, table: BlockTable, end: int) -> bool:
        """Fill the cache from `table.length` up to `end`, where blocks are reserved.

        `end` is within one piece or, with a recurrent state, at the end of a piece, whose state is restored too. False
        if a file is unusable; the table is unchanged then.
        """
        at = table.length
        while at < end:
            piece = stored.pieces[at // PIECE]
            values, stop = self._store.read(piece, self._nbytes), min(end, (piece.index + 1) * PIECE)
            if values is None:
                return False
            self._copy_blocks()  # a queued copy into these blocks would overwrite them later
            self._cache.put(values, PIECE, at - piece.index * PIECE, list(self._runs(table, at, stop)))
            at = stop
        return table.state is None or self._restore_state(stored.pieces[end // PIECE - 1].state, table.state)

    def _restore_state(self, state: KeptPiece, slot: int) -> bool:
        values = self._store.read(state, self._state_bytes)
        if values is not None:
            self._cache.states.put(slot, values)
        return values is not None

    def keep(self, tokens: Sequence[int], table: BlockTable) -> None:
        """Store the whole pieces of `tokens` in `table`, and the state snapshots at their ends, if they are new."""
        pieces = self._store.pieces(tokens[: table.length])
        for piece in self._store.missing(pieces):
            start = piece.index * PIECE
            self._store.write(piece, self._cache.take(list(self._runs(table, start, start + PIECE))))
        ends = {(piece.index + 1) * PIECE: piece.state for piece in pieces}
        states = {ends[length]: slot for length, slot in table.snapshots.items() if length in ends}
        for state in self._store.missing(states):
            self._copy_blocks()
            self._store.write(state, self._cache.states.take(states[state]))

    def close(self) -> None:
        """Finish writing; nothing is stored afterwards."""
        self._store.close()

    def _runs(self, table: BlockTable, start: int, end: int) -> Iterator[Run]:
        size = self._cache.block_size
        while start < end:
            count = min(end, (start // size + 1) * size) - start
            yield Run(table.blocks[start // size], start % size, count)
            start += count
