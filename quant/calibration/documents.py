"""Reads calibration files: plain text, or rows of JSON or Parquet with a text or a conversation each.

The name decides: `.jsonl`, `.jsonl.gz` and `.parquet` hold rows; every other file is one UTF-8 text.
"""

import gzip
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, cast, get_args

from mycli.quant.evaluate import read_text
from mycli.runtime.errors import UsageError
from mycli.runtime.tokenizer.chat_template import Message, Role
from mycli.runtime.utils.files import open_input

FIELDS = ("text", "content", "messages", "conversations")  # the first of these in a row is read
MAX_ROW = 16 << 20  # bytes of a line: a hostile file must not fill memory
_ROLES = {"human": "user", "gpt": "assistant"}  # of ShareGPT's layout, {"from": ..., "value": ...}

Document = str | Sequence[Message]


def documents(path: Path) -> Iterator[Document]:
    """Yield the documents of a file in order, reading lazily.

    Raises NotFoundError or UsageError, with the row, for a file that cannot be read or a row without any of `FIELDS`.
    """
    name = path.name.lower()
    if name.endswith((".jsonl", ".jsonl.gz")):
        rows = _json_rows(path)
    elif name.endswith(".parquet"):
        rows = _parquet_rows(path)
    else:
        yield read_text(path)
        return
    for number, row in enumerate(rows, 1):
        yield _document(row, f"{path}: row {number}")


def _json_rows(path: Path) -> Iterator[Any]:
    try:
        with open_input(path) as raw:
            file = cast(IO[bytes], gzip.GzipFile(fileobj=raw)) if path.name.lower().endswith(".gz") else raw
            number = 0
            while line := file.readline(MAX_ROW):
                number += 1
                if len(line) == MAX_ROW:
                    raise UsageError(
                        f"{path}: row {number} has {MAX_ROW} bytes or more", "write one JSON object per line"
                    )
                if line.strip():
                    yield json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path}: row {number} is not JSON ({error})", "write one JSON object per line") from None
    except (OSError, EOFError, zlib.error) as error:
        raise UsageError(f"{path}: {error}", "check the file") from None


def _parquet_rows(path: Path) -> Iterator[Any]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError:
        hint = "pip install 'mycli-llm[datasets]'"
        raise UsageError(f"{path}: Parquet needs pyarrow, which is not installed", hint) from None
    try:
        with open_input(path) as raw, parquet.ParquetFile(raw) as file:
            columns = [field for field in FIELDS if field in file.schema_arrow.names]
            for batch in file.iter_batches(batch_size=64, columns=columns or None):
                yield from batch.to_pylist()
    except (ArrowException, OSError) as error:
        raise UsageError(f"{path}: {error}", "check the file") from None


def _document(row: Any, where: str) -> Document:
    for field in FIELDS if isinstance(row, Mapping) else ():
        value = row.get(field)
        if isinstance(value, str):
            return value
        if isinstance(value, list):
            return [_message(message, where) for message in value]
    keys = ", ".join(map(str, row))[:200] if isinstance(row, Mapping) else type(row).__name__
    raise UsageError(f"{where} has {keys}", f"put the text into one of: {', '.join(FIELDS)}")


def _message(value: Any, where: str) -> Message:
    if isinstance(value, Mapping):
        role, content = value.get("role", value.get("from")), value.get("content", value.get("value"))
        role = _ROLES.get(str(role), role)
        if role in get_args(Role) and isinstance(content, str):
            return Message(cast(Role, role), content)
    raise UsageError(f"{where}: a message is not a role and a text", 'write it as {"role": "user", "content": "Hello"}')
