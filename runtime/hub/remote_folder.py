"""Opens a model on a hub like a local folder: small files are copied, weights are read by byte ranges."""

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from mycli.runtime.checkpoint.manifest import Manifest, read_index
from mycli.runtime.checkpoint.model_folder import ModelFolder
from mycli.runtime.checkpoint.open_folder import open_model_folder
from mycli.runtime.checkpoint.safetensors_header import INDEX
from mycli.runtime.errors import ModelError
from mycli.runtime.hub.client import Hub
from mycli.runtime.hub.download import DownloadPlan, read_small_file
from mycli.runtime.hub.remote_file import RangeSpool, RemoteFile
from mycli.runtime.hub.resolve import Source
from mycli.runtime.utils.files import disk_errors, write_atomic

_WEIGHTS = ".safetensors"


@dataclass(frozen=True)
class RemoteModel:
    """A model whose weights stay on a hub; a context manager that ends the transfers."""

    source: Source
    folder: ModelFolder
    spool: RangeSpool

    @classmethod
    def open(cls, hub: Hub, plan: DownloadPlan, folder: Path) -> Self:
        """Copy the small files to `folder` and read the headers of the weights.

        Raises ModelError for adapters, GGUF files and invalid headers, and what `read_small_file` raises.
        """
        root = [file for file in plan.files if "/" not in file.name]  # without modules of sentence-transformers
        if "config.json" not in [file.name for file in root]:  # nor do plans of GGUF files and adapters hold it
            raise ModelError(f"{plan.model}: only a whole model in safetensors can be quantized while it is downloaded")
        weights = [file for file in root if file.name.endswith(_WEIGHTS)]
        with disk_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
        for file in plan.files:
            if file in weights:
                continue
            data, path = read_small_file(hub, plan.repo, plan.commit, file), folder / file.name
            with disk_errors(folder):
                path.parent.mkdir(exist_ok=True)
                write_atomic(path, data)
        spool = RangeSpool(hub, plan.repo, plan.commit, folder / "ranges")
        files = {file.name: RemoteFile(file.name, file.size, file.digest, spool) for file in weights}
        index = read_index(folder) if (folder / INDEX).exists() else None
        manifest = Manifest.from_files(folder, files, index)
        opened = replace(open_model_folder(folder, manifest.tensors), file_manifest=manifest)
        return cls(Source(plan.model, folder, plan.repo, plan.commit), opened, spool)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.spool.close()

    def digests(self) -> dict[str, dict[str, Any]]:
        """Return size and sha256 of each source file by name."""
        files = {file.name: file for file in self.folder.manifest.files.values() if isinstance(file, RemoteFile)}
        return {path.name: _digest(path, files.get(path.name)) for path in sorted(self.folder.source_files())}


def _digest(path: Path, remote: RemoteFile | None) -> dict[str, Any]:
    if remote is None:
        return {"sha256": hashlib.sha256(path.read_bytes()).hexdigest(), "bytes": path.stat().st_size}
    if len(remote.digest) == 64:
        return {"sha256": remote.digest, "bytes": remote.size}
    # Files outside LFS have a Git blob hash (SHA-1) on the hub, but the record names a sha256: read the file once more.
    digest = hashlib.sha256()
    for piece in remote.chunks(0, remote.size):
        digest.update(piece)
    return {"sha256": digest.hexdigest(), "bytes": remote.size}
