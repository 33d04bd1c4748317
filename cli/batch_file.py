"""Many prompts from a JSON-lines file, one JSON line out for each, in order; what was answered is not asked again.

A line in: {"id": ..., "prompt": "..."} or {"id": ..., "messages": [{"role": ..., "content": ...}]}; without an id its
line number is one. A bad line becomes an object with `error`. Knows lines and files; does not know models.
"""

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from mycli.cli.command import Call
from mycli.cli.output import error_fields, json_line
from mycli.runtime.errors import ModelError, UsageError, UserError
from mycli.runtime.tokenizer.chat_template import Message
from mycli.runtime.utils.files import try_lock
from mycli.runtime.utils.json_fields import parse_object

MAX_LINE = 1 << 24  # bytes
MAX_MESSAGES = 10_000
Id = str | int
Prompt = str | list[Message]


@dataclass(frozen=True)
class Item:
    """One line of the input: what to answer, or why it cannot be."""

    id: Id
    prompt: Prompt = ""
    error: UserError | None = None


def parse_item(data: bytes, number: int) -> Item:
    """Line `number` of the input. Never raises: the error is in the item, under the line's id where it has one."""
    identity: Id = number
    try:
        if len(data) > MAX_LINE:
            raise UsageError(f"line {number}: more than {MAX_LINE} bytes", "shorten it")
        line = parse_object(data, f"line {number}", MAX_LINE)
        found = line.values.get("id", number)
        if isinstance(found, bool) or not isinstance(found, str | int) or len(str(found)) > 1000:
            raise line.fail("id", "must be a text of at most 1000 characters or an integer", "give each line its own")
        identity = found
        return Item(identity, _prompt(line.values, number))
    except ModelError as error:
        return Item(identity, error=UsageError(error.message, 'a line is {"id": 1, "prompt": "..."}'))
    except UsageError as error:
        return Item(identity, error=error)


def _prompt(values: Mapping[str, Any], number: int) -> Prompt:
    hint = "give it either prompt or messages"
    unknown = [key for key in values if key not in ("id", "prompt", "messages")]
    if unknown:
        raise UsageError(f"line {number}: {unknown[0]!r:.60} is not a field of a batch", "options apply to all lines")
    if ("prompt" in values) == ("messages" in values):
        raise UsageError(f"line {number}: neither or both of prompt and messages", hint)
    if "prompt" in values:
        if not isinstance(values["prompt"], str):
            raise UsageError(f"line {number}: prompt must be a text", hint)
        return str(values["prompt"])
    messages = values["messages"]
    if not isinstance(messages, list) or not 0 < len(messages) <= MAX_MESSAGES:
        raise UsageError(f"line {number}: messages must be a list of 1 to {MAX_MESSAGES}", hint)
    for message in messages:
        if (
            not isinstance(message, dict)
            or message.keys() != {"role", "content"}
            or not all(isinstance(value, str) for value in message.values())
        ):
            raise UsageError(f"line {number}: a message must have a role and a content, both texts", hint)
    return [Message(message["role"], message["content"]) for message in messages]


def read_items(file: BinaryIO) -> Iterator[Item]:
    """The lines of the input that are not blank; an id that was used before is an error."""
    seen: set[Id] = set()
    number = 0
    while data := file.readline(MAX_LINE + 1):
        number += 1
        rest = data
        while len(rest) > MAX_LINE and not rest.endswith(b"\n"):  # the remainder of a line too long
            rest = file.readline(MAX_LINE + 1)
        if not data.strip():
            continue
        item = parse_item(data, number)
        if item.id in seen:
            item = Item(item.id, error=UsageError(f"line {number}: the id was used before", "give each line its own"))
        seen.add(item.id)
        yield item


def answered(file: BinaryIO, name: str) -> set[Id]:
    """The ids that have an answer in an output file; a last line that was cut off is removed from it.

    Raises UsageError for a file that is not the output of a batch: nothing is added to it.
    """
    done: set[Id] = set()
    end = 0
    for number, data in enumerate(iter(lambda: file.readline(MAX_LINE * 8), b""), start=1):
        if not data.endswith(b"\n"):
            break
        try:
            line = parse_object(data, f"{name}:{number}", MAX_LINE * 8)
            if not isinstance(line.values.get("id"), str | int) or not (
                {"text", "samples", "error"} & line.values.keys()
            ):
                raise line.fail("id", "is missing")
        except ModelError as error:
            raise UsageError(f"{error.message}: not a line of a batch", "name another file with --out") from None
        if "error" not in line.values:
            done.add(line.values["id"])
        end += len(data)
    file.truncate(end)
    file.seek(end)
    return done


@contextmanager
def _output(path: Path) -> Iterator[tuple[set[Id], BinaryIO]]:
    """The output file, locked for this process, and the ids it answers already."""
    try:
        file = path.open("r+b" if path.exists() else "x+b")
        free = try_lock(file.fileno())
    except OSError as error:
        raise UsageError(f"--out {path}: {error.strerror}", "name a file that can be written") from None
    with file:
        if not free:
            raise UsageError(f"--out {path}: another process is writing it", "wait for it")
        yield answered(file, path.name), file


@contextmanager
def _input(path: str) -> Iterator[BinaryIO]:
    if path == "-":
        yield sys.stdin.buffer
        return
    try:
        with open(path, "rb") as file:
            yield file
    except OSError as error:
        raise UsageError(f"--batch {path}: {error.strerror}", "name a file of JSON lines") from None


def _count(path: str) -> int:
    """Lines of a regular file; 0 where that cannot be known."""
    if not Path(path).is_file():
        return 0
    with open(path, "rb") as file:
        return sum(1 for _ in file)


def run_batch(call: Call, path: str, out: Path | None, answer: Callable[[Prompt], dict[str, Any]]) -> None:
    """Answer every line of `path` (- is standard input), to `out` or standard output, skipping those `out` answers."""
    failed = 0
    target = nullcontext((set[Id](), None)) if out is None else _output(out)
    with _input(path) as source, target as (done, file):
        total = _count(path) if file is not None else 0
        with call.out.progress("batch", total, "lines") as shown:
            for item in read_items(source):
                shown.advance(1)
                if item.id in done:
                    continue
                result = _answer(item, answer)
                failed += "error" in result
                if file is None:
                    call.out.json_record({"id": item.id, **result})
                else:
                    file.write((json_line({"id": item.id, **result}) + "\n").encode())
                    file.flush()
        if file is not None:
            os.fsync(file.fileno())
    if done:
        call.out.note(f"{len(done)} answered before")
    if failed:
        call.out.warn(f"{failed} lines could not be answered: see their error")


def _answer(item: Item, answer: Callable[[Prompt], dict[str, Any]]) -> dict[str, Any]:
    try:
        if item.error is not None:
            raise item.error
        return answer(item.prompt)
    except UserError as error:
        return {"error": error_fields(error)}
