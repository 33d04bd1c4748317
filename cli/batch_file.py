"""Many prompts from a JSON-lines file, one JSON line out for each, in order; what was answered is not asked again.

A line in: {"id": ..., "prompt": "..."} or {"id": ..., "messages": [{"role": ..., "content": ...}]}. One without an
id goes by its number, which is its `id` and, so that it is nobody else's, its `line` too. A bad line becomes an object
with `error`, and claims no id. Knows lines and files; does not know models.
"""

import os
import stat
import sys
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

from mycli.cli.command import Call
from mycli.cli.text.json_lines import error_fields, json_line
from mycli.runtime.errors import ExitCode, ModelError, UsageError, UserError
from mycli.runtime.tokenizer.chat_template import Message
from mycli.runtime.utils.files import open_input, try_lock
from mycli.runtime.utils.json_fields import parse_object
from mycli.runtime.utils.units import pluralize

MAX_LINE = 1 << 24  # bytes
MAX_MESSAGES = 10_000
Id = str | int
ItemKey = tuple[str, Id]  # ("id", what a person chose) or ("line", the number of the line)
Prompt = str | list[Message]
AnswerAll = Callable[[Iterable[Prompt]], Iterator[dict[str, Any] | UserError]]


@dataclass(frozen=True)
class Item:
    """One line of the input: what to answer, or why it cannot be. `line`: its number, where it has no id of its own."""

    id: Id
    prompt: Prompt = ""
    error: UserError | None = None
    line: int | None = None

    @property
    def key(self) -> ItemKey:
        """What tells it from every other line."""
        return ("id", self.id) if self.line is None else ("line", self.line)

    def answer(self, result: Mapping[str, Any]) -> dict[str, Any]:
        """The line of the output."""
        return {"id": self.id, **({} if self.line is None else {"line": self.line}), **result}


def parse_item(data: bytes, number: int) -> Item:
    """Line `number` of the input. Never raises: the error is in the item, under the line's id where it has one."""
    identity: Id = number
    own: int | None = number
    try:
        if len(data) > MAX_LINE:
            raise UsageError(f"line {number}: more than {MAX_LINE} bytes", "shorten it")
        line = parse_object(data, f"line {number}", MAX_LINE)
        found = line.values.get("id", number)
        own = None if "id" in line.values else number
        if isinstance(found, bool) or not isinstance(found, str | int) or len(str(found)) > 1000:
            own = number
            raise line.fail(
                "id", "must be a text of at most 1000 characters or an integer", "give each line an id of its own"
            )
        identity = found
        return Item(identity, _prompt(line.values, number), line=own)
    except ModelError as error:
        return Item(identity, error=UsageError(error.message, 'a line is {"id": 1, "prompt": "..."}'), line=own)
    except UsageError as error:
        return Item(identity, error=error, line=own)


def _prompt(values: Mapping[str, Any], number: int) -> Prompt:
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
    """The lines of the input that are not blank; an id that a good line has used before is an error."""
    seen: set[ItemKey] = set()
    number = 0
    while data := file.readline(MAX_LINE + 1):
        number += 1
        rest = data
        while len(rest) > MAX_LINE and not rest.endswith(b"\n"):  # the remainder of a line too long
            rest = file.readline(MAX_LINE + 1)
        if not data.strip():
            continue
        item = parse_item(data, number)
        if item.key in seen:
            item = Item(
                item.id, error=UsageError(f"line {number}: the id was used before", "give each line an id of its own")
            )
        elif item.error is None:
            seen.add(item.key)
        yield item


def answered(lines: Iterable[bytes], name: str) -> Iterator[tuple[ItemKey, bytes]]:
    """The lines of an output file that are answers, each with whose it is: not the errors, nor a last line cut off.

    Raises UsageError for a file that is not the output of a batch: nothing is added to it.
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
    """The output file, locked for this process, and whose answers it holds: errors are taken out, to be tried again."""
    path = Path(os.path.realpath(path))
    with ExitStack() as stack:
        try:
            if path.exists() and not path.is_file():
                raise UsageError(f"--out {path}: not a regular file", "redirect the output instead: > FILE")
            file: BinaryIO = stack.enter_context(path.open("r+b" if path.exists() else "x+b"))
            if not try_lock(file.fileno()):
                raise UsageError(f"--out {path}: another process is writing it", "wait for it")
            found = [(key, len(data)) for key, data in answered(_lines(file), path.name)]
            if sum(size for _, size in found) < os.fstat(file.fileno()).st_size:
                file = stack.enter_context(_answers_alone(path, file))
            file.seek(0, os.SEEK_END)
        except OSError as error:
            raise UsageError(f"--out {path}: {error.strerror}", "name a file that can be written") from None
        yield {key for key, _ in found}, file


def _answers_alone(path: Path, file: BinaryIO) -> BinaryIO:
    """What replaces `file` at `path`, in one step: its answers. Locked and open."""
    fresh = path.with_name(f".{path.name[:100]}.{os.getpid()}.tmp")
    try:
        copy = fresh.open("x+b")
        try_lock(copy.fileno())
        copy.writelines(data for _, data in answered(_lines(file), path.name))
        copy.flush()
        os.fchmod(copy.fileno(), stat.S_IMODE(os.fstat(file.fileno()).st_mode))
        os.fsync(copy.fileno())
        os.replace(fresh, path)
    finally:
        fresh.unlink(missing_ok=True)
    return copy


@contextmanager
def _input(path: str) -> Iterator[BinaryIO]:
    if path == "-":
        yield sys.stdin.buffer
        return
    with open_input(Path(path), pipes=True) as file:
        yield file


def _count(path: str) -> int:
    """Lines of a regular file; 0 where that cannot be known."""
    if not Path(path).is_file():
        return 0
    with open(path, "rb") as file:
        return sum(1 for _ in file)


def check_batch(path: str) -> None:
    """Raises NotFoundError or UsageError for an input that cannot be opened, before a model is loaded for it."""
    if path != "-" and not Path(path).is_fifo():  # a pipe can be opened once
        with _input(path):
            pass


def run_batch(call: Call, path: str, out: Path | None, answer: AnswerAll) -> ExitCode:
    """Answer every line of `path` (- is standard input), to `out` or standard output, skipping those `out` answers.

    `answer` takes prompts as it comes to them, and gives an object, or what went wrong, for each, in order. Returns the
    exit code: of the first line that failed, if one did. Raises UserError for files that will not do.
    """
    failed: list[UserError] = []
    target = nullcontext((set[ItemKey](), None)) if out is None else _output(out)
    with _input(path) as source, target as (done, file):
        total = _count(path) if file is not None else 0
        with call.out.progress("batch", total, "lines") as shown:
            items = read_items(source)
            groups = [items] if _all_there(source) else ([item] for item in items)
            for item, found in chain.from_iterable(_answered(group, done, answer) for group in groups):
                shown.advance(1)
                if found is None:
                    continue
                if isinstance(found, UserError):
                    failed.append(found)
                result = {"error": error_fields(found)} if isinstance(found, UserError) else found
                if file is None:
                    call.out.json_record(item.answer(result))
                else:
                    file.write((json_line(item.answer(result)) + "\n").encode())
                    file.flush()
        if file is not None:
            os.fsync(file.fileno())
    if done:
        call.out.note(f"{len(done)} answered before")
    if failed:
        first = failed[0]
        call.out.warn(f"{pluralize(len(failed), 'line')} could not be answered, the first because: {first.message}")
        return first.exit_code
    return ExitCode.OK


def _all_there(file: BinaryIO) -> bool:
    """Whether lines can be read ahead: who writes to a pipe may wait for each answer before the next line."""
    try:
        return stat.S_ISREG(os.fstat(file.fileno()).st_mode)
    except OSError:  # not a file of the system's
        return True


def _answered(
    items: Iterable[Item], done: Collection[ItemKey], answer: AnswerAll
) -> Iterator[tuple[Item, dict[str, Any] | UserError | None]]:
    """Each item with its answer, in order; None where it is `done`."""
    order: deque[Item] = deque()

    def prompts() -> Iterator[Prompt]:
        for item in items:
            order.append(item)
            if item.error is None and item.key not in done:
                yield item.prompt

    for result in answer(prompts()):
        yield from _unasked(order, done)
        yield order.popleft(), result
    yield from _unasked(order, done)


def _unasked(order: deque[Item], done: Collection[ItemKey]) -> Iterator[tuple[Item, UserError | None]]:
    """The first of `order` that were not answered by anybody: what is wrong with them, None for those `done`."""
    while order and (order[0].error is not None or order[0].key in done):
        item = order.popleft()
        yield item, None if item.key in done else item.error
