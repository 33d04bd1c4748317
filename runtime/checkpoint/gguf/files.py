"""The files of one GGUF model: a single one, or the parts that gguf-split made of it, opened and held together.

Follows gguf-split's names (NAME-00001-of-00003.gguf) and keys (`split.*`); metadata is the first part's. Reads headers
by copying, as everything here does, so a file that shrinks is an error and not a crash. Imports no torch.
"""

import re
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mycli.runtime.checkpoint.gguf.header import GgufHeader, parse_gguf_header
from mycli.runtime.checkpoint.safetensors_header import TensorEntry, damaged
from mycli.runtime.checkpoint.stable_file import RegularFile
from mycli.runtime.errors import ModelError, NotFoundError

SUFFIX = ".gguf"
MAX_PARTS = 1000
_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
MAX_SMALL_TENSOR = 1 << 18  # bytes of one that is part of the config


def part_names(name: str) -> list[str]:
    """The names of all parts of a model by that of its first; [name] where it is no part.

    Raises ModelError for a later part, and for more parts than anybody makes.
    """
    found = _PART.fullmatch(name)
    if found is None:
        return [name]
    stem, number, count = found[1], int(found[2]), int(found[3])
    if not 1 <= number <= count <= MAX_PARTS:
        raise ModelError(f"{name}: part {number} of {count}", "the file's name is not that of a part of a split model")
    if number != 1:
        raise ModelError(f"{name}: not the first part of the model", f"give the first: {stem}-00001-of-{count:05}.gguf")
    return [f"{stem}-{index:05}-of-{count:05}.gguf" for index in range(1, count + 1)]


def part_number(name: str) -> int | None:
    """Which part of a split model a file is by its name; None where it is none."""
    found = _PART.fullmatch(name)
    return None if found is None else int(found[2])


def join_headers(headers: Sequence[GgufHeader]) -> GgufHeader:
    """The header of the whole from those of its parts, in order. Raises ModelError where they are not of one model."""
    first = headers[0].metadata
    said = first.integer("split.count", 1, low=0) or 1
    if said != len(headers):
        raise ModelError(
            f"{first.source}: one of {said} parts, but its name says {len(headers)}", "rename the files as they were"
        )
    tensors: dict[str, TensorEntry] = {}
    for index, header in enumerate(headers):
        if len(headers) > 1 and header.metadata.integer("split.no", low=0) != index:
            raise header.metadata.fail("split.no", f"is not {index}, which its name says")
        for name, entry in header.tensors.items():
            if name in tensors:
                raise damaged(f"the tensor {name} is both in {tensors[name].file} and in {entry.file}")
            tensors[name] = entry
    expected = first.integer("split.tensors.count", len(tensors), low=0)
    if expected != len(tensors):
        raise first.fail("split.tensors.count", f"= {expected}, but there are {len(tensors)}")
    return GgufHeader(first, tensors)


@dataclass(frozen=True)
class GgufFiles:
    """The header of a model on this machine, and its files by the names that `TensorEntry.file` uses."""

    header: GgufHeader
    files: Mapping[str, RegularFile]

    @classmethod
    def open(cls, path: Path) -> "GgufFiles":
        """Read the headers of the model that begins at `path`. Raises NotFoundError, or ModelError naming what is
        wrong."""
        if not path.is_file():
            raise NotFoundError(f"{path}: no such file", code="list-models")
        names = part_names(path.name)
        missing = [name for name in names if not path.with_name(name).is_file()]
        if missing:
            raise ModelError(
                f"{missing[0]}: missing in {path.parent}", f"all {len(names)} parts must lie beside each other"
            )
        files = {name: RegularFile.find(path.with_name(name)) for name in names}
        headers = [
            parse_gguf_header(lambda offset, count, file=file: file.read(count, offset), file.size, name)  # type: ignore[misc]  # bound at once
            for name, file in files.items()
        ]
        return cls(join_headers(headers), files)

    def floats(self, name: str) -> list[float]:
        """A small F32 tensor."""
        entry = self.header.tensors[name]
        return unpack_floats(entry, self.files[entry.file].read(min(entry.nbytes, MAX_SMALL_TENSOR), entry.offset))


def unpack_floats(entry: TensorEntry, data: bytes) -> list[float]:
    """The values of a small F32 tensor from its bytes. Raises ModelError for one of another kind."""
    if entry.dtype != "F32" or len(entry.shape) != 1 or entry.nbytes != len(data):
        raise ModelError(f"{entry.file}: {entry.name} is {entry.dtype} {list(entry.shape)}, not a short row of F32", "")
    values = array("f")
    values.frombytes(data)
    return list(values)
