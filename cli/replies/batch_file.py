"""Answers prompts from a JSON-lines file, in order; lines that the output file already answers are skipped.

An input line is {"id": ..., "prompt": "..."} or {"id": ..., "messages": [{"role": ..., "content": ...}]}. Without an
id it gets its number as `id` and, to be distinct from a chosen id, as `line`. An invalid line gives an `error` object.
"""

import os
import stat
import sys
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

from mycli.cli.command import Call
from mycli.cli.text.format import error_fields, json_line
from mycli.runtime.errors import ExitCode, ModelError, UsageError, UserError
from mycli.runtime.tokenizer.chat_template import Message
from mycli.runtime.utils.files import disk_errors, open_input, try_lock
from mycli.runtime.utils.json_fields import parse_object
from mycli.runtime.utils.units import pluralize

MAX_LINE = 1 << 24  # bytes
MAX_MESSAGES = 10_000
Id = str | int
ItemKey = tuple[str, Id]  # ("id", the id of the line) or ("line", its number)
Prompt = str | list[Message]
AnswerAll = Callable[[Iterable[Prompt]], Iterator[dict[str, Any] | UserError]]


@dataclass(frozen=True)
class Item:
    """One input line: its prompt, or its error. line: its number, if it has no id."""

    id: Id
    prompt: Prompt = ""
    error: UserError | None = None
    line: int | None = None

    @property
    def key(self) -> ItemKey:
        return ("id", self.id) if self.line is None else ("line", self.line)

    def answer(self, result: Mapping[str, Any]) -> dict[str, Any]:
        return {"id": self.id, **({} if self.line is None else {"line": self.line}), **result}


def parse_item(data: bytes, number: int) -> Item:
    """Return line `number` of the input; an invalid line is an item with an error, under its id if it has one."""
    item_id: Id = number
    line_number: int | None = number
    try:
        if len(data) > MAX_LINE:
            raise UsageError(f"line {number}: more than {MAX_LINE} bytes", "shorten it")
        line = parse_object(data, f"line {number}", MAX_LINE)
        if "id" in line.values:
            value = line.values["id"]
            if isinstance(value, bool) or not isinstance(value, str | int) or len(str(value)) > 1000:
                problem = "must be a text of at most 1000 characters or an integer"
                raise line.fail("id", problem, "give each line an id of its own")
            item_id, line_number = value, None
        return Item(item_id, parse_prompt(line.values, number), line=line_number)
    except ModelError as error:
        hint = 'a line is {"id": 1, "prompt": "..."}'
        return Item(item_id, error=UsageError(error.message, hint), line=line_number)
    except UsageError as error:
        return Item(item_id, error=error, line=line_number)


def parse_prompt(values: Mapping[str, Any], number: int) -> Prompt:
    """Return the prompt or the messages of line `number`. Raises UsageError for anything else."""
    hint = "give it either prompt or messages"
    unknown = [key for key in values if key not in ("id", "prompt", "messages")]
    if unknown:
        raise UsageError(f"line {number}: {unknown[0]!r:.60} is not a field of a batch", "options apply to all lines")
    if ("prompt" in values) == ("messages" in values):
        raise UsageError(f"line {number}: needs either prompt or messages", hint)
    if "prompt" in values:
        if not isinstance(values["prompt"], str):
            raise UsageError(f"line {number}: prompt must be a string", hint)
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
            raise UsageError(f"line {number}: a message must have a role and a content, both strings", hint)
    return [Message(message["role"], message["content"]) for message in messages]


def read_items(file: BinaryIO) -> Iterator[Item]:
    """Yield the non-blank lines of the input; an id used by an earlier valid line is an error."""
    seen: set[ItemKey] = set()
    number = 0
    while data := file.readline(MAX_LINE + 1):
        number += 1
        rest = data
        while len(rest) > MAX_LINE and not rest.endswith(b"\n"):  # skip the rest of a line that is too long
            rest = file.readline(MAX_LINE + 1)
        if not data.strip():
            continue
        item = parse_item(data, number)
        if item.key in seen:
            error = UsageError(f"line {number}: the id was used before", "give each line an id of its own")
            item = Item(item.id, error=error)
        elif item.error is None:
            seen.add(item.key)
        yield item


def answered(lines: Iterable[bytes], name: str) -> Iterator[tuple[ItemKey, bytes]]:
    """Yield the answers in an output file with their keys; errors and an incomplete last line are left out.

    Raises UsageError for a file that is not the output of a batch.
    """
    for number, data in enumerate(lines, start=1):
        if not data.endswith(b"\n"):
            return
        try:
            line = parse_object(data, f"{name}:{number}", MAX_LINE * 8)
            if not isinstance(line.values.get("id"), str | int) or not (
                {"text", "samples", "error"} & line.values.keys()
            ):
                raise line.fail("id", "is missing")
        except ModelError as error:
            raise UsageError(f"{error.message}: not a line of a batch", "name another file with --out") from None
        if "error" not in line.values:
            yield ("line", line.values["line"]) if "line" in line.values else ("id", line.values["id"]), data


def _lines(file: BinaryIO) -> Iterator[bytes]:
    file.seek(0)
    return iter(lambda: file.readline(MAX_LINE * 8), b"")


@contextmanager
def _output(path: Path) -> Iterator[tuple[set[ItemKey], BinaryIO]]:
    # The locked output file and the keys it answers; error lines are removed, so that they are answered again.
    path = Path(os.path.realpath(path))
    with ExitStack() as stack:
        try:
            if path.exists() and not path.is_file():
                raise UsageError(f"--out {path}: not a regular file", "redirect the output instead: > FILE")
            file: BinaryIO = path.open("r+b" if path.exists() else "x+b")
            stack.callback(_close, file)
            if not try_lock(file.fileno()):
                raise UsageError(f"--out {path}: another process is writing it", "wait for it")
            answers = [(key, len(data)) for key, data in answered(_lines(file), path.name)]
            if sum(size for _, size in answers) < os.fstat(file.fileno()).st_size:
                file = _keep_answers(path, file)
                stack.callback(_close, file)
            file.seek(0, os.SEEK_END)
        except OSError as error:
            raise UsageError(f"--out {path}: {error.strerror}", "name a file that can be written") from None
        yield {key for key, _ in answers}, file


def _close(file: BinaryIO) -> None:
    with suppress(OSError):  # every line is flushed, and its error was raised then
        file.close()


def _keep_answers(path: Path, file: BinaryIO) -> BinaryIO:
    # Replaces the file at `path`, in one step, by its answers; returns it open and locked.
    temporary = path.with_name(f".{path.name[:100]}.{os.getpid()}.tmp")
    try:
        copy = temporary.open("x+b")
        try_lock(copy.fileno())
        copy.writelines(data for _, data in answered(_lines(file), path.name))
        copy.flush()
        os.fchmod(copy.fileno(), stat.S_IMODE(os.fstat(file.fileno()).st_mode))
        os.fsync(copy.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return copy


@contextmanager
def _input(path: str) -> Iterator[BinaryIO]:
    if path == "-":
        yield sys.stdin.buffer
        return
    with open_input(Path(path), pipes=True) as file:
        yield file


def _count(path: str) -> int:
    if not Path(path).is_file():
        return 0
    with open(path, "rb") as file:
        return sum(1 for _ in file)


def check_batch(path: str) -> None:
    """Raise NotFoundError or UsageError for an unreadable input, before a model is loaded."""
    if path != "-" and not Path(path).is_fifo():  # a pipe can be opened only once
        with _input(path):
            pass


def run_batch(call: Call, path: str, out: Path | None, answer: AnswerAll) -> ExitCode:
    """Answer the lines of `path` (- is standard input) to `out` or standard output, except those answered in `out`.

    answer: yields an object or an error per prompt, in order. Returns the exit code of the first failed line.
    """
    failed: list[UserError] = []
    target = nullcontext((set[ItemKey](), None)) if out is None else _output(out)
    with _input(path) as source, target as (done, file):
        total = _count(path) if file is not None else 0
        with call.out.progress("batch", total, "lines") as bar:
            items = read_items(source)
            # The writer of a pipe may wait for each answer before it writes the next line, so lines are not read ahead.
            groups = [items] if _is_regular(source) else ([item] for item in items)
            for item, result in chain.from_iterable(_answered(group, done, answer) for group in groups):
                bar.advance(1)
                if result is None:
                    continue
                if isinstance(result, UserError):
                    failed.append(result)
                    result = {"error": error_fields(result)}
                if file is None or out is None:
                    call.out.json_record(item.answer(result))
                    continue
                with disk_errors(out):
                    file.write((json_line(item.answer(result)) + "\n").encode())
                    file.flush()
        if file is not None and out is not None:
            with disk_errors(out):
                os.fsync(file.fileno())
    if done:
        call.out.note(f"skipped {pluralize(len(done), 'line')} already answered in {out}")
    if failed:
        call.out.warn(f"{pluralize(len(failed), 'line')} could not be answered; the first error: {failed[0].message}")
        return failed[0].exit_code
    return ExitCode.OK


def _is_regular(file: BinaryIO) -> bool:
    try:
        return stat.S_ISREG(os.fstat(file.fileno()).st_mode)
    except OSError:  # a file object without a descriptor
        return True


def _answered(
    items: Iterable[Item], done: Collection[ItemKey], answer: AnswerAll
) -> Iterator[tuple[Item, dict[str, Any] | UserError | None]]:
    # Each item with its result, in order; None for items that are `done`.
    order: deque[Item] = deque()

    def prompts() -> Iterator[Prompt]:
        for item in items:
            order.append(item)
            if item.error is None and item.key not in done:
                yield item.prompt

    for result in answer(prompts()):
        yield from _skipped(order, done)
        yield order.popleft(), result
    yield from _skipped(order, done)


def _skipped(order: deque[Item], done: Collection[ItemKey]) -> Iterator[tuple[Item, UserError | None]]:
    # The leading items of `order` that the model did not get: invalid ones with their error, `done` ones with None.
    while order and (order[0].error is not None or order[0].key in done):
        item = order.popleft()
        yield item, None if item.key in done else item.error
