"""The files of one GGUF model: a single file, or the parts that gguf-split wrote.

Follows gguf-split's names (NAME-00001-of-00003.gguf) and keys (`split.*`); the first part has the metadata. Imports no
torch.
"""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mycli.runtime.checkpoint.gguf.header import GgufHeader, parse_gguf_header
from mycli.runtime.checkpoint.gguf_parts import part_names
from mycli.runtime.checkpoint.safetensors_header import TensorEntry, damaged
from mycli.runtime.checkpoint.stable_file import RegularFile
from mycli.runtime.errors import ModelError, NotFoundError

MAX_SMALL_TENSOR = 1 << 18  # bytes of a tensor that becomes part of the config


def join_headers(headers: Sequence[GgufHeader]) -> GgufHeader:
    """Join the headers of all parts, in order. Raises ModelError unless they are the parts of one model."""
    first = headers[0].metadata
    count = first.integer("split.count", 1, low=0) or 1
    if count != len(headers):
        raise ModelError(
            f"{first.source}: one of {count} parts, but its name says {len(headers)}",
            "rename the files as gguf-split named them",
        )
    tensors: dict[str, TensorEntry] = {}
    for index, header in enumerate(headers):
        if len(headers) > 1 and header.metadata.integer("split.no", low=0) != index:
            raise header.metadata.fail("split.no", f"is not {index}, the number in the file's name")
        for name, entry in header.tensors.items():
            if name in tensors:
                raise damaged(f"the tensor {name} is both in {tensors[name].file} and in {entry.file}")
            tensors[name] = entry
    expected = first.integer("split.tensors.count", len(tensors), low=0)
    if expected != len(tensors):
        raise first.fail("split.tensors.count", f"= {expected}, but there are {len(tensors)}")
    return GgufHeader(first, tensors, headers[0].arrays)


@dataclass(frozen=True)
class GgufFiles:
    """The header of a model on disk, and its files by the keys that `TensorEntry.file` uses."""

    header: GgufHeader
    files: Mapping[str, RegularFile]

    @classmethod
    def open(cls, path: Path) -> "GgufFiles":
        """Read the headers of `path` and its further parts. Raises NotFoundError, or ModelError naming the fault."""
        if not path.is_file():
            raise NotFoundError(f"{path}: no such file", code="list-models")
        names = part_names(path.name)
        missing = [name for name in names if not path.with_name(name).is_file()]
        if missing:
            raise ModelError(f"{missing[0]}: missing in {path.parent}", f"put all {len(names)} parts into one folder")
        files = {name: RegularFile.find(path.with_name(name)) for name in names}
        headers = [
            parse_gguf_header(lambda offset, count, file=file: file.read(count, offset), file.size, name)  # type: ignore[misc]  # bound at once
            for name, file in files.items()
        ]
        return cls(join_headers(headers), files)

    def floats(self, name: str) -> list[float]:
        entry = self.header.tensors[name]
        return unpack_floats(entry, self.files[entry.file].read(min(entry.nbytes, MAX_SMALL_TENSOR), entry.offset))


def unpack_floats(entry: TensorEntry, data: bytes) -> list[float]:
    """Return the values of a small F32 tensor from its bytes. Raises ModelError for another type or shape."""
    if entry.dtype != "F32" or len(entry.shape) != 1 or entry.nbytes != len(data):
        raise ModelError(
            f"{entry.file}: {entry.name} is {entry.dtype} {list(entry.shape)}, expected a short F32 vector", ""
        )
    values = array("f")
    values.frombytes(data)
    return list(values)
