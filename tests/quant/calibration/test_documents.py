"""Test calibration files: each layout is read, and each invalid file is refused with its row."""

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from mycli.quant.calibration.documents import documents
from mycli.runtime.errors import NotFoundError, UsageError
from mycli.runtime.tokenizer.chat_template import Message

TALK = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}]
OLD = [{"from": "human", "value": "Hello"}, {"from": "gpt", "value": "Hi"}]
MESSAGES = [Message("user", "Hello"), Message("assistant", "Hi")]


def lines(rows: Sequence[Any]) -> bytes:
    return b"\n".join(json.dumps(row).encode() for row in rows) + b"\n\n"


def test_a_text_is_one_document(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text('{"text": 1}\nno rows')
    assert list(documents(tmp_path / "a.md")) == ['{"text": 1}\nno rows']


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "parquet"])
@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([{"id": 1, "text": "one"}, {"id": 2, "text": "zwei ß"}], ["one", "zwei ß"]),
        ([{"content": "one", "messages": TALK}], ["one"]),
        ([{"messages": TALK}], [MESSAGES]),
        ([{"conversations": OLD}], [MESSAGES]),
        ([{"text": None, "messages": TALK}, {"text": "one", "messages": None}], [MESSAGES, "one"]),
    ],
    ids=["text", "first-field", "messages", "conversations", "null"],
)
def test_rows(tmp_path: Path, kind: str, rows: list[dict[str, Any]], expected: list[Any]) -> None:
    path = tmp_path / f"train.{kind}"
    if kind == "parquet":
        pyarrow = pytest.importorskip("pyarrow")
        from pyarrow import parquet

        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        path.write_bytes(gzip.compress(lines(rows)) if kind.endswith("gz") else lines(rows))
    assert list(documents(path)) == expected


def test_a_table_without_a_text_names_its_columns(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pyarrow.Table.from_pylist([{"label": 3, "txt": "one"}]), tmp_path / "a.parquet")
    with pytest.raises(UsageError, match="row 1 has label, txt"):
        list(documents(tmp_path / "a.parquet"))


def test_rows_are_read_as_they_are_wanted(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(lines([{"text": "one"}]) + b"broken")
    assert next(documents(tmp_path / "a.jsonl")) == "one"


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.jsonl", b'{"text": "one"}\n{"te', "row 2 is not JSON"),
        ("a.jsonl", b"[" * 100_000, "row 1 is not JSON"),
        ("a.jsonl", b'{"label": 3, "txt": "one"}\n', "row 1 has label, txt"),
        ("a.jsonl", b'["one"]\n', "row 1 has list"),
        ("a.jsonl", b'{"messages": [{"role": "root", "content": "x"}]}\n', "row 1: a message is not"),
        ("a.jsonl", b'{"messages": [{"role": ["user"], "content": "x"}]}\n', "row 1: a message is not"),
        ("a.jsonl", b'{"messages": ["x"]}\n', "row 1: a message is not"),
        ("a.jsonl", b'{"text": "' + b"x" * (16 << 20), "row 1 has 16777216 bytes or more"),
        ("a.jsonl", b'"\xff"\n', "row 1 is not JSON"),
        ("a.jsonl.gz", b"\x1f\x8b\x08\x00cut off", "a.jsonl.gz"),
        ("a.parquet", b"PAR1 and nothing more", "a.parquet"),
        ("a.txt", b"\xff\xfe", "not UTF-8 at byte 0"),
    ],
    ids=lambda value: value if isinstance(value, str) and len(value) < 40 else "",
)
def test_what_is_bad_is_refused_by_row(tmp_path: Path, name: str, data: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(UsageError, match=message):
        list(documents(tmp_path / name))


@pytest.mark.parametrize("name", ["none.txt", "none.jsonl", "none.jsonl.gz", "none.parquet"])
def test_a_missing_file(tmp_path: Path, name: str) -> None:
    with pytest.raises(NotFoundError, match=name):
        list(documents(tmp_path / name))
