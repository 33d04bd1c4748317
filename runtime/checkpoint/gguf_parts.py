"""The names of a GGUF model's files: one file, or the parts that gguf-split wrote (NAME-00001-of-00003.gguf)."""

import re
from pathlib import Path

from mycli.runtime.errors import ModelError

SUFFIX = ".gguf"
MAX_PARTS = 1000
_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
# Ollama names files by the digest of their contents; their first bytes tell the format.
_BLOB = re.compile(r"sha256-([0-9a-f]{64})")


def is_gguf(path: Path) -> bool:
    """Return whether a model's path is a GGUF file's, by its name."""
    return path.suffix == SUFFIX or blob_digest(path) is not None


def blob_digest(path: Path) -> str | None:
    """Return the sha256 that is the name of a file of Ollama's store; None for other files."""
    match = _BLOB.fullmatch(path.name)
    return None if match is None else match[1]


def part_names(name: str) -> list[str]:
    """Return the names of all parts of a model by the name of the first; [name] for a file that is not split.

    Raises ModelError for a later part, and for more than `MAX_PARTS`.
    """
    match = _PART.fullmatch(name)
    if match is None:
        return [name]
    stem, number, count = match[1], int(match[2]), int(match[3])
    if not 1 <= number <= count <= MAX_PARTS:
        raise ModelError(f"{name}: part {number} of {count}", "rename the file as gguf-split named it")
    if number != 1:
        raise ModelError(f"{name}: not the first part of the model", f"name the first: {stem}-00001-of-{count:05}.gguf")
    return [f"{stem}-{index:05}-of-{count:05}.gguf" for index in range(1, count + 1)]


def part_number(name: str) -> int | None:
    """Return which part of a split model a file is by its name; None for a file that is not split."""
    match = _PART.fullmatch(name)
    return None if match is None else int(match[2])
