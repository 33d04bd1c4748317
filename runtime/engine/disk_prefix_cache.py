"""The disk prefix cache: stores computed prefixes in files and restores them into the KV cache after a restart.

Files are keyed by the model's files, this program's sources and the arithmetic, so a reply that resumes at a restored
prefix has the same bits as one computed from the start.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from mycli.runtime.cache.block_table import BlockTable
from mycli.runtime.cache.kv_cache import BlockSlice, KVCache
from mycli.runtime.cache.prefix_index import PIECE, StoredPiece, StoredPrefix
from mycli.runtime.cache.prefix_store import PrefixStore, StoreStats
from mycli.runtime.checkpoint.model_folder import ModelFolder
from mycli.runtime.engine.model_runner import ModelRunner
from mycli.runtime.errors import Declined
from mycli.runtime.kernels.cpu.library.build import native

_SOURCES = (".py", ".cpp", ".h")
_BY_LENGTH = ("dynamic", "longrope")  # RoPE scalings that depend on the context length


def identity(folder: ModelFolder, runner: ModelRunner, context: int) -> bytes:
    """Return the SHA-256 of everything except the tokens that keys and values depend on.

    Reads the model's and adapter's files whole, in parallel, at about 2 GB per second and file.
    """
    sources = folder.source_files()
    with ThreadPoolExecutor() as pool:
        digests = [digest.hex() for digest in pool.map(_digest, sources)]
    stretched = any(rope.scaling.kind in _BY_LENGTH for rope in folder.config.distinct_ropes)
    fields = {
        "files": sorted(zip((path.name for path in sources), digests, strict=True)),
        "program": _program(),
        "torch": torch.__version__,
        "kernels": _kernels(runner.device),
        "dtype": str(runner.dtype),
        "kv": runner.kv,
        "activations": None if runner.activations is None else [runner.activations.bits, runner.activations.widest],
        "prompt_copy": runner.model.prompt_copy,
        "portable": runner.model.portable,
        "piece": PIECE,
        "context": context if stretched else None,
    }
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).digest()


def _digest(path: Path) -> bytes:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").digest()


def _program() -> str:
    # All sources of `runtime`, because no list of those that affect bits stays complete. Any change empties the cache.
    root = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for path in sorted(path for path in root.rglob("*") if path.suffix in _SOURCES):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + _digest(path))
    return digest.hexdigest()


def _kernels(device: torch.device) -> list[str]:
    # Torch's matmuls may depend on the number of threads; the native ones do not.
    if device.type == "cuda":
        import triton

        return [torch.cuda.get_device_name(device), triton.__version__]
    library = native()
    if isinstance(library, Declined):
        return ["torch", torch.backends.cpu.get_cpu_capability(), str(torch.get_num_threads())]
    return [library.isa, _digest(library.path).hex()]


class DiskPrefixCache:
    """Copies prefixes between a `PrefixStore` and a KV cache; `copy_blocks` performs the queued block copies.

    With recurrent layers a prefix is restored only up to a stored state, and as a whole.
    """

    def __init__(self, store: PrefixStore, cache: KVCache, copy_blocks: Callable[[], None]) -> None:
        self._store, self._cache, self._copy_blocks = store, cache, copy_blocks
        self._nbytes, self._state_bytes = cache.nbytes_of(PIECE), cache.states.slot_bytes

    @property
    def stats(self) -> StoreStats:
        return self._store.stats

    def find(self, tokens: Sequence[int]) -> StoredPrefix:
        """Return the stored prefix of `tokens` at which a sequence can resume."""
        if not self._state_bytes:
            return self._store.find(tokens, self._nbytes)
        prefix = self._store.find(tokens[:-1], self._nbytes)  # the last token is always computed, for its logits
        for count in range(len(prefix.pieces), 0, -1):
            if not self._store.why_missing(prefix.pieces[count - 1].state, self._state_bytes):
                miss = f"later recurrent state not stored on disk (from token {count * PIECE + 1})"
                return StoredPrefix(prefix.pieces[:count], prefix.miss if count == len(prefix.pieces) else miss)
        return StoredPrefix((), "recurrent state not stored on disk" if prefix.pieces else prefix.miss)

    def restore(self, prefix: StoredPrefix, table: BlockTable, end: int) -> bool:
        """Fill the reserved positions of `table` from its length to `end`; False if a file is missing or damaged.

        With a recurrent state `end` is the end of a piece; else all positions are within one piece.
        """
        at = table.length
        while at < end:
            piece = prefix.pieces[at // PIECE]
            values, stop = self._store.read(piece, self._nbytes), min(end, (piece.index + 1) * PIECE)
            if values is None:
                return False
            self._copy_blocks()  # a queued copy into these blocks would overwrite the values
            self._cache.write_bytes(values, PIECE, at - piece.index * PIECE, list(self._slices(table, at, stop)))
            at = stop
        return table.state is None or self._restore_state(prefix.pieces[end // PIECE - 1].state, table.state)

    def _restore_state(self, state: StoredPiece, slot: int) -> bool:
        values = self._store.read(state, self._state_bytes)
        if values is not None:
            self._cache.states.write_bytes(slot, values)
        return values is not None

    def store(self, tokens: Sequence[int], table: BlockTable) -> None:
        """Write the whole pieces of `tokens` in `table`, and the snapshots at their ends, unless stored already."""
        pieces = self._store.pieces(tokens[: table.length])
        for piece in self._store.missing(pieces):
            start = piece.index * PIECE
            self._store.write(piece, self._cache.read_bytes(list(self._slices(table, start, start + PIECE))))
        ends = {(piece.index + 1) * PIECE: piece.state for piece in pieces}
        states = {ends[length]: slot for length, slot in table.snapshots.items() if length in ends}
        for state in self._store.missing(states):
            self._copy_blocks()
            self._store.write(state, self._cache.states.read_bytes(states[state]))

    def close(self) -> None:
        self._store.close()

    def _slices(self, table: BlockTable, start: int, end: int) -> Iterator[BlockSlice]:
        size = self._cache.block_size
        while start < end:
            count = min(end, (start // size + 1) * size) - start
            yield BlockSlice(table.blocks[start // size], start % size, count)
            start += count
