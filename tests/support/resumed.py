"""Kills replies at a random position and resumes them from their record."""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

from mycli.runtime.checkpoint.open_folder import open_model_folder
from mycli.runtime.engine.config import EngineConfig
from mycli.runtime.engine.engine import Engine
from mycli.runtime.engine.loading.loader import LoadedModel
from mycli.runtime.engine.replies.journal import RecordedReply, ReplyJournal, new_seed
from mycli.runtime.engine.sequence import ReplyStart, Request, SequenceOutput
from mycli.runtime.memory.cache_shape import CacheShape
from mycli.runtime.sampling.grammars.grammar import Grammar, GrammarCompiler
from mycli.runtime.sampling.grammars.lark import CallGrammar
from mycli.runtime.sampling.params import SamplingParams
from mycli.runtime.speculative.draft_length import FixedDraftLength
from mycli.runtime.speculative.lookup import PromptLookup
from mycli.runtime.speculative.proposers import load_draft
from mycli.runtime.speculative.speculator import ProposerSpeculator
from tests.support.paths import PICO

KINDS = ("greedy", "sampled", "unseeded", "schema", "tools", "draft", "ngram", "preempted", "logprobs")
SEED = 5  # for records of requests without a seed

SHAPE = CacheShape.paged(256, 1024, 16)
SCHEMA = '{"type": "object", "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}}}'
SAMPLED = SamplingParams(temperature=0.9, top_p=0.95, repetition_penalty=1.1, presence_penalty=0.2)


def load_pico() -> LoadedModel:
    folder = open_model_folder(PICO)
    return LoadedModel.load(folder, EngineConfig(device="cpu").place(folder.config))


def requests(loaded: LoadedModel, kind: str) -> list[Request]:
    ids = tuple(loaded.tokenizer.encode("Tell me about Leo and his dog. He", add_special=True))
    grammar = None
    if kind == "schema":
        grammar = Grammar.from_schema(SCHEMA, "schema", loaded.tokenizer, loaded.stop_ids)
    elif kind == "tools":
        call = CallGrammar('<tool_call>\n{"name": "look_up", "arguments": ', SCHEMA, "}\n</tool_call>")
        grammar = GrammarCompiler(loaded.tokenizer, loaded.stop_ids).calls([call], single=True)
    sampling = SamplingParams() if kind == "greedy" else SAMPLED
    if kind not in ("greedy", "unseeded"):
        sampling = SAMPLED.with_overrides({"seed": 7})
    request = Request(ids, sampling, 40, loaded.stop_ids, grammar, logprobs=2 if kind == "logprobs" else None)
    return [request.for_reply(index) for index in range(3 if kind == "preempted" else 1)]


def engine_for(loaded: LoadedModel, kind: str) -> Engine:
    proposer = None
    if kind == "draft":
        proposer = load_draft(open_model_folder(PICO.with_name("pico-draft")), loaded.tokenizer, loaded.runner, SHAPE)
    elif kind == "ngram":
        proposer = PromptLookup()
    speculator = None if proposer is None else ProposerSpeculator(proposer, lambda: FixedDraftLength(3))
    # 7 blocks hold two of the three replies.
    shape = CacheShape.paged(96, 112, 16) if kind == "preempted" else SHAPE
    return Engine(loaded.runner, shape, loaded.vocabulary_size, running=4, speculator=speculator)


@dataclass(frozen=True)
class Whole:
    requests: Sequence[Request]
    seeds: Sequence[int]
    tokens: Sequence[list[int]]
    path: Path


def record_whole(engine: Engine, requests: Sequence[Request], folder: Path) -> Whole:
    """Generate replies to all requests concurrently, and record them in one file."""
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
    """Cut the record at a random byte after its header, as a killed process leaves it, and resume all replies."""
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
    again = journal.resume("killed", len(whole.requests))  # a resumed record can be resumed again
    assert [[token for output in record.outputs for token in output.tokens] for record in again] == tokens
    again[0].writer.remove()
    return tokens


def _ended(outputs: Sequence[SequenceOutput]) -> bool:
    return bool(outputs) and outputs[-1].finish_reason is not None
