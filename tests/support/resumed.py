"""Replies that are killed at a random place and continued from their record."""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

from mycli.runtime.engine.engine import Engine
from mycli.runtime.engine.reply_journal import RecordedReply, ReplyJournal, new_seed
from mycli.runtime.engine.sequence import ReplyStart, Request, SequenceOutput

SEED = 5  # of the records, where a request has none


@dataclass(frozen=True)
class Whole:
    """Replies that were not interrupted, and the file in which they were recorded."""

    requests: Sequence[Request]
    seeds: Sequence[int]
    tokens: Sequence[list[int]]
    path: Path


def record_whole(engine: Engine, requests: Sequence[Request], folder: Path) -> Whole:
    """Generate replies to all requests at the same time, and record them in one file."""
    writer = ReplyJournal(folder).begin("whole", {})
    assert writer is not None
    seeds = [SEED if request.sampling.seed is None else new_seed(request.sampling) for request in requests]
    numbers = {
        engine.submit(replace(request, start=ReplyStart(seed))): RecordedReply(writer, index)
        for index, (request, seed) in enumerate(zip(requests, seeds, strict=True))
    }
    tokens: list[list[int]] = [[] for _ in requests]
    while engine.has_work:
        for output in engine.step():
            recorded = numbers[output.sequence]
            recorded.append(output)
            tokens[recorded.number] += output.tokens
    writer.close()
    return Whole(requests, seeds, tokens, writer.path)


def resumed_after_kill(engine: Engine, whole: Whole, folder: Path, random: Random) -> list[list[int]]:
    """Cut the record at a random byte after its head, as a killed process leaves it, and continue all replies."""
    data = whole.path.read_bytes()
    head = data.index(b"\n") + 1
    journal = ReplyJournal(folder)
    shutil.copy(whole.path, folder / "killed.jsonl")
    (folder / "killed.jsonl").write_bytes(data[: random.randint(head, len(data))])
    records = journal.resume("killed", len(whole.requests))
    tokens = [[token for output in record.outputs for token in output.tokens] for record in records]
    numbers = {}
    for record, request, seed in zip(records, whole.requests, whole.seeds, strict=True):
        if not _ended(record.outputs):
            numbers[engine.submit(replace(request, start=record.start(seed)))] = record
    while engine.has_work:
        for output in engine.step():
            record = numbers[output.sequence]
            record.append(output)
            tokens[record.number] += output.tokens
    records[0].writer.close()
    again = journal.resume("killed", len(whole.requests))  # what was appended can be resumed too
    assert [[token for output in record.outputs for token in output.tokens] for record in again] == tokens
    again[0].writer.remove()
    return tokens


def _ended(outputs: Sequence[SequenceOutput]) -> bool:
    return bool(outputs) and outputs[-1].finish_reason is not None
