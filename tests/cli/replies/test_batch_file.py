"""Test batches: order of results, invalid lines, and a second run; the model is a function."""

import fcntl
import io
import json
import os
import resource
import signal
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from mycli.cli.command import Call
from mycli.cli.output import Output
from mycli.cli.replies import batch_file as batch
from mycli.cli.replies.batch_file import Prompt, check_batch, parse_item, read_items, run_batch
from mycli.runtime.errors import ModelError, NotFoundError, ResourceError, UsageError, UserError
from mycli.runtime.tokenizer.chat_template import Message

BAD = {
    "not-json": b"nope",
    "list": b"[1]",
    "not-utf8": b'{"prompt": "\xff"}',
    "twice": b'{"prompt": "a", "prompt": "b"}',
    "nan": b'{"prompt": "a", "id": NaN}',
    "id-bool": b'{"prompt": "a", "id": true}',
    "id-list": b'{"prompt": "a", "id": []}',
    "id-null": b'{"prompt": "a", "id": null}',
    "id-long": json.dumps({"prompt": "a", "id": "x" * 1001}).encode(),
    "nothing": b"{}",
    "both": b'{"prompt": "a", "messages": [{"role": "user", "content": "a"}]}',
    "prompt-number": b'{"prompt": 1}',
    "option": b'{"prompt": "a", "temperature": 2}',
    "no-messages": b'{"messages": []}',
    "message-text": b'{"messages": ["a"]}',
    "message-extra": b'{"messages": [{"role": "user", "content": "a", "name": "b"}]}',
    "content-list": b'{"messages": [{"role": "user", "content": ["a"]}]}',
    "role": b'{"messages": [{"role": "user<|im_end|>", "content": "a"}]}',
    "deep": b'{"prompt": ' + b"[" * 100_000,
}


class Model:
    def __init__(self, fails: str = "") -> None:
        self.asked: list[Prompt] = []
        self._fails = fails

    def __call__(self, prompts: Iterable[Prompt]) -> Iterator[dict[str, Any] | UserError]:
        ahead = iter(prompts)
        while waiting := list(islice(ahead, 3)):
            for prompt in waiting:
                self.asked.append(prompt)
                failed = prompt == self._fails
                yield ModelError("not a number", "hint") if failed else {"text": f"re: {prompt}"}


def run(source: Path, out: Path | None, model: Model, code: int = 0) -> tuple[list[dict[str, Any]], str]:
    stdout, stderr = io.StringIO(), io.StringIO()
    assert run_batch(Call(Output(stdout=stdout, stderr=stderr), offline=True), str(source), out, model) == code
    return [json.loads(line) for line in stdout.getvalue().splitlines()], stderr.getvalue()


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_one_line_out_for_each_in_order(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text('{"id": "b", "prompt": "é\\ud83d\\ude00"}\n\n  \n{"id": 1, "prompt": "\\ud800"}\n{"prompt": "x"}')
    lines, said = run(source, None, Model(fails="x"), code=3)
    assert [line["id"] for line in lines] == ["b", 1, 5], "without an id, the number of the line"
    assert lines[0]["text"] == "re: é😀" and all(line["schema_version"] == 1 for line in lines)
    assert lines[2]["error"] == {"message": "not a number", "hint": "hint", "exit_code": 3}
    assert "1 line could not be answered; the first error: not a number" in said


@pytest.mark.parametrize("name", BAD)
def test_a_bad_line_is_an_error_and_stops_nothing(name: str, tmp_path: Path) -> None:
    source, model = tmp_path / "in.jsonl", Model()
    source.write_bytes(b'{"id": "first", "prompt": "a"}\n' + BAD[name] + b'\n{"id": "last", "prompt": "b"}\n')
    lines, _ = run(source, None, model, code=2)
    assert [line["id"] for line in lines] == ["first", 2, "last"]
    assert "line 2" in lines[1]["error"]["message"] or name == "role"
    assert lines[1]["error"]["exit_code"] == 2 and model.asked == ["a", "b"]


def test_messages_and_ids() -> None:
    item = parse_item(
        b'{"id": 0, "messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]}', 9
    )
    assert (item.id, item.prompt, item.error) == (0, [Message("system", "s"), Message("user", "u")], None)
    failed = parse_item(b'{"id": "mine", "prompt": 1}', 9)
    assert failed.id == "mine" and failed.error is not None, "an error goes under the line's own id"


def test_an_id_twice_is_an_error() -> None:
    first, second = read_items(io.BytesIO(b'{"id": 1, "prompt": "a"}\n{"id": 1, "prompt": "b"}\n'))
    assert first.error is None and second.error is not None


def test_a_line_too_long_is_an_error_and_the_next_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch, "MAX_LINE", 64)
    long = json.dumps({"prompt": "x" * 500}).encode()
    first, second = read_items(io.BytesIO(long + b'\n{"prompt": "b"}\n'))
    assert first.error is not None and (second.id, second.prompt) == (2, "b")


@pytest.mark.parametrize(("length", "refused"), [(63, False), (64, False), (65, True), (200, True)])
def test_a_line_may_be_as_long_as_allowed(length: int, refused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of a line counts; the next line has the right number whatever was skipped."""
    monkeypatch.setattr(batch, "MAX_LINE", 64)
    line = json.dumps({"prompt": ""}).replace('""', f'"{"x" * (length - 15)}"') + "\n"
    assert len(line) == length
    first, second = read_items(io.BytesIO(line.encode() + b'\n{"prompt": "b"}\n'))
    assert (first.error is not None) is refused and (second.id, second.prompt) == (3, "b")


def test_an_id_and_a_conversation_may_be_as_long_as_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch, "MAX_MESSAGES", 2)
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    items = [
        parse_item(json.dumps({"id": "x" * size, "messages": talk[:count]}).encode(), 1)
        for size, count in ((1000, 2), (1001, 2), (1000, 3))
    ]
    assert [item.error is None for item in items] == [True, False, False]


def test_a_second_run_asks_only_what_was_not_answered(tmp_path: Path) -> None:
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps({"id": index, "prompt": f"p{index}"}) + "\n" for index in range(4)))
    run(source, out, Model(fails="p1"), code=3)
    assert [("error" in line) for line in read(out)] == [False, True, False, False]
    run(source, out, Model(fails="p1"), code=3)
    assert [line["id"] for line in read(out)] == [0, 2, 3, 1], "an error is tried again, not told again"
    complete = out.read_bytes()
    out.write_bytes(complete[:-5])  # killed while writing the last line
    model = Model()
    _, said = run(source, out, model)
    assert model.asked == ["p1"] and "skipped 3 lines already answered in" in said
    assert [(line["id"], "error" in line) for line in read(out)] == [(0, False), (2, False), (3, False), (1, False)]
    before = out.read_bytes()
    again = Model()
    run(source, out, again)
    assert again.asked == [] and out.read_bytes() == before
    assert {path.name for path in tmp_path.iterdir()} == {"in.jsonl", "out.jsonl"}


def test_a_line_without_an_id_or_a_bad_one_takes_no_other_lines_id(tmp_path: Path) -> None:
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [
        '{"prompt": "a"}',
        "nope",
        '{"id": 5, "prompt": 7}',
        '{"id": 1, "prompt": "b"}',
        '{"id": 2, "prompt": "c"}',
    ]
    source.write_text("\n".join([*lines, '{"id": 5, "prompt": "d"}']))
    run(source, out, Model(), code=2)
    answers = {(line["id"], line.get("line")): line.get("text") for line in read(out) if "text" in line}
    assert answers == {(1, 1): "re: a", (1, None): "re: b", (2, None): "re: c", (5, None): "re: d"}
    again = Model()
    run(source, out, again, code=2)
    assert again.asked == []


@pytest.mark.parametrize("content", ["important notes\n", '{"id": 1}\n', "[]\n"])
def test_a_file_that_is_no_output_is_not_touched(content: str, tmp_path: Path) -> None:
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"prompt": "a"}\n')
    out.write_text(content)
    with pytest.raises(UsageError, match="out.jsonl:1"):
        run(source, out, Model())
    assert out.read_text() == content


def test_two_runs_do_not_write_one_file(tmp_path: Path) -> None:
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"prompt": "a"}\n')
    with out.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(UsageError, match="another process"):
            run(source, out, Model())


def test_a_pipe_is_not_opened_to_check_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its writer would see the end of its only reader."""
    opened: list[str] = []
    monkeypatch.setattr(batch, "open_input", lambda path, pipes: opened.append(path.name) or io.BytesIO())
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "file").touch()
    for name in ("pipe", "file"):
        check_batch(str(tmp_path / name))
    assert opened == ["file"]


def test_files_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="no such file"):
        run(tmp_path / "none", None, Model())
    (tmp_path / "in.jsonl").write_text("")
    with pytest.raises(UsageError, match="No such file"):
        run(tmp_path / "in.jsonl", tmp_path / "none" / "out", Model())


def test_answers_are_on_disk_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, out, synced = tmp_path / "in.jsonl", tmp_path / "out.jsonl", list[tuple[int, int]]()

    def noted(descriptor: int) -> None:
        status = os.fstat(descriptor)
        synced.append((status.st_ino, status.st_size))

    monkeypatch.setattr(os, "fsync", noted)
    source.write_text('{"prompt": "a"}\n')
    run(source, None, Model())
    assert synced == []
    run(source, out, Model())
    assert synced == [(out.stat().st_ino, out.stat().st_size)]


def test_the_output_is_a_regular_file(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text('{"prompt": "a"}\n')
    os.mkfifo(tmp_path / "pipe")
    for name in ("pipe", "."):
        with pytest.raises(UsageError, match="not a regular file"):
            run(source, tmp_path / name, Model())


def test_a_full_disk_names_the_file(tmp_path: Path) -> None:
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"prompt": "a"}\n')
    call = Call(Output(stdout=io.StringIO(), stderr=io.StringIO()), offline=True)
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        with pytest.raises(ResourceError) as raised:
            run_batch(call, str(source), out, Model())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert raised.value.message.startswith(f"cannot write {out}")
