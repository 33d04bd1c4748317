"""Lists the tensors of a model folder from the headers of its safetensors files.

Opens no pickle and follows no path that an index names out of the folder. Imports no torch.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PureWindowsPath

from mycli.runtime.checkpoint.safetensors_header import (
    INDEX,
    MAX_HEADER,
    MAX_VALUES,
    SINGLE,
    TensorEntry,
    damaged,
    header_bytes,
    index_counts,
    parse_header,
)
from mycli.runtime.checkpoint.stable_file import RegularFile, StoredFile
from mycli.runtime.errors import ModelError, NotFoundError
from mycli.runtime.utils.json_fields import parse_object
from mycli.runtime.utils.sanitize import one_line

_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
_NO_PICKLES = "pickles can run code and are never opened; convert it: https://huggingface.co/spaces/safetensors/convert"


@dataclass(frozen=True)
class Manifest:
    """The tensors in the files of `folder`, by name; `files` has the keys that `TensorEntry.file` uses.

    `warnings` name files that are not part of the model and links that leave the folder.
    """

    folder: Path
    tensors: Mapping[str, TensorEntry]
    files: Mapping[str, StoredFile]
    warnings: tuple[str, ...] = ()

    @classmethod
    def open(cls, folder: Path) -> "Manifest":
        """Read and check the headers of a folder: one `model.safetensors`, or the shards of its index.

        Raises NotFoundError for a missing folder, ModelError naming the file for any other fault.
        """
        try:
            present = {path.name for path in folder.iterdir()}
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise NotFoundError(f"{folder}: {reason}", code="name-or-pull") from None
        index = read_index(folder) if INDEX in present else None
        if index is not None and not index_counts(index.values(), present):
            index = None
        if index is None and SINGLE not in present:
            raise _no_weights(present, folder)
        names = [SINGLE] if index is None else sorted(set(index.values()))
        missing = [name for name in names if name not in present]
        if missing:
            others = sorted(name for name in present if name.endswith(".safetensors") and name not in names)
            if others and missing == names:
                problem = f"names {listed_names(missing)}, but {folder} holds {listed_names(others)}"
                raise ModelError(f"{INDEX}: {problem}", code="replace-index")
            raise ModelError(f"{INDEX}: {listed_names(missing)} missing in {folder}", code="pull-whole")
        files = {name: RegularFile.find(folder / name) for name in names}
        manifest = cls.from_files(folder, files, index)
        extra = sorted(name for name in present - set(names) if name.endswith(".safetensors"))
        warnings = [f"{listed_names(extra)} not in {INDEX if index else SINGLE}: not used"] if extra else []
        warnings += [
            f"{file.name} is a link to {file.path}, outside the folder" for file in _outside(folder, files.values())
        ]
        return replace(manifest, warnings=tuple(warnings))

    @classmethod
    def from_files(cls, folder: Path, files: Mapping[str, StoredFile], index: Mapping[str, str] | None) -> "Manifest":
        """Read and check the headers of `files`, whose tensors must be in the files that `index` names."""
        tensors: dict[str, TensorEntry] = {}
        for file in files.values():
            for name, entry in read_file_header(file).items():
                if name in tensors:
                    raise damaged(f"{name:.80}: both in {tensors[name].file} and in {file.name}")
                tensors[name] = entry
        if index is not None:
            _check_index(index, tensors)
        return cls(folder, tensors, files)

    @property
    def nbytes(self) -> int:
        return sum(entry.nbytes for entry in self.tensors.values())

    def content(self, name: str) -> bytes:
        entry = self.tensors[name]
        return self.files[entry.file].read(entry.nbytes, entry.offset)

    def equal(self, name: str, other: str) -> bool:
        """Return whether two tensors have the same bytes."""
        entries = self.tensors[name], self.tensors[other]
        if entries[0].nbytes != entries[1].nbytes:
            return False
        chunks = (self.files[entry.file].chunks(entry.offset, entry.nbytes) for entry in entries)
        return all(a == b for a, b in zip(*chunks, strict=True))


def listed_names(names: Sequence[str]) -> str:
    shown = ", ".join(f"{name:.80}" for name in names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"


def read_file_header(file: StoredFile) -> dict[str, TensorEntry]:
    """Return the tensors of a safetensors file by name. Raises ModelError for any other file."""
    start = file.read(64)
    return parse_header(file.read(header_bytes(start, file.size, file.name)), file.size, file.name)


def listed_tensors(folder: Path) -> Collection[str]:
    """Return the names of the tensors in `folder`, by its index if it has one. Raises as `Manifest.open`."""
    if (folder / INDEX).is_file():
        return read_index(folder)
    return read_file_header(RegularFile.find(folder / SINGLE))


def _is_shard(name: str) -> bool:
    # A plain file name on every system: no path, drive, share, stream or control character.
    plain = PureWindowsPath(name).name == name and ":" not in name and one_line(name, 255) == name
    return plain and name.endswith(".safetensors")


def read_index(folder: Path) -> dict[str, str]:
    """Return the shard of each tensor by the index in `folder`. Raises ModelError naming the entry at fault."""
    file = RegularFile.find(folder / INDEX)
    data = file.read(MAX_HEADER + 1)
    if data.count(b",") > MAX_VALUES // 4:  # as many tensors as headers can have values for
        raise damaged(f"{INDEX}: more than the {MAX_VALUES // 4} values allowed")
    shards = parse_object(data, INDEX, MAX_HEADER).object("weight_map").values
    if not shards:
        raise damaged(f"{INDEX}: weight_map lists no tensors")
    for tensor, name in shards.items():
        if not isinstance(name, str) or not _is_shard(name):
            pickle = isinstance(name, str) and name.endswith(_PICKLES)
            hint = _NO_PICKLES if pickle else "a shard has a plain file name that ends in .safetensors"
            raise ModelError(f"{INDEX}: {tensor!r:.80} is in {name!r:.80}, which is not a shard", hint)
    return dict(shards)


def _check_index(index: Mapping[str, str], tensors: Mapping[str, TensorEntry]) -> None:
    for name, shard in index.items():
        if name not in tensors:
            raise damaged(f"{INDEX}: {name!r:.80} should be in {shard}, but is in no shard")
        if tensors[name].file != shard:
            raise damaged(f"{INDEX}: {name:.80} should be in {shard}, but is in {tensors[name].file}")


def _no_weights(present: Collection[str], folder: Path) -> ModelError:
    shards = sorted(name for name in present if name.endswith(".safetensors"))
    pickles = sorted(name for name in present if name.endswith(_PICKLES))
    if shards:
        return ModelError(f"{folder}: {listed_names(shards)} without {INDEX}", code="pull-whole")
    if pickles:
        return ModelError(f"{folder}: weights only as pickles ({listed_names(pickles)})", _NO_PICKLES)
    if any(name.endswith(".gguf") for name in present):
        return ModelError(f"{folder}: weights only as GGUF", "use the repository that holds safetensors files")
    return ModelError(f"{folder}: no {SINGLE} and no {INDEX}", "name a folder that holds a whole model")


def _outside(folder: Path, files: Iterable[RegularFile]) -> Iterator[RegularFile]:
    # A snapshot in the Hugging Face cache consists of links to its blobs: these are part of the folder.
    real = folder.resolve()
    homes = [real, real.parent.parent / "blobs"] if real.parent.name == "snapshots" else [real]
    return (file for file in files if file.path.parent not in homes)
