"""Test pico with a disk prefix cache: after a restart a reply has hits and unchanged bits."""

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
import torch
from torch import Tensor

from mycli.runtime.cache.batch import Chunk
from mycli.runtime.cache.block_table import BlockTable
from mycli.runtime.cache.kv_cache import KVCache
from mycli.runtime.cache.prefix_store import PIECE, PrefixStore, StoredPiece, StoredPrefix
from mycli.runtime.checkpoint.open_folder import open_model_folder
from mycli.runtime.device.placement import Placement
from mycli.runtime.engine import disk_prefix_cache
from mycli.runtime.engine import scheduler as restore
from mycli.runtime.engine.disk_prefix_cache import identity
from mycli.runtime.engine.engine import Engine
from mycli.runtime.engine.loading.loader import load_model
from mycli.runtime.engine.model_runner import ModelRunner
from mycli.runtime.engine.replies.completion import generate
from mycli.runtime.engine.scheduler import Limits, Scheduler
from mycli.runtime.engine.sequence import FinishReason, Request, RequestSequence
from mycli.runtime.kernels.cpu.library import build
from mycli.runtime.layers.transformer import HiddenStateHook
from mycli.runtime.memory.cache_shape import CacheShape
from mycli.runtime.models.config import KvDtype
from mycli.runtime.sampling.params import SamplingParams
from tests.runtime.engine.test_scheduler import VOCAB, World
from tests.support.engines import together
from tests.support.families import CASES as FAMILIES
from tests.support.families import make
from tests.support.family_parts import SMALL
from tests.support.paths import PICO

CONTEXT = 256
CPU = torch.device("cpu")
exact = pytest.mark.skipif(isinstance(build.native(), str), reason="torch's products have no promise of bits")


class Watched(ModelRunner):
    def run(self, chunks: Sequence[Chunk], cache: KVCache, hook: HiddenStateHook | None = None) -> Tensor:
        logits = super().run(chunks, cache, hook)
        self.seen.append(logits.clone())
        self.tokens += sum(len(chunk.tokens) for chunk in chunks)
        return logits

    seen: list[Tensor]
    tokens: int


def watched(dtype: torch.dtype, kv: KvDtype, folder: Path = PICO) -> Watched:
    loaded = load_model(open_model_folder(folder), Placement(CPU, dtype, kv=kv))
    runner = Watched(loaded.model, loaded.kv)
    runner.seen, runner.tokens = [], 0
    return runner


SHAPES = [
    CacheShape.contiguous(CONTEXT),
    CacheShape(CONTEXT, 60, 8),
    CacheShape(CONTEXT, 6, 96),
    CacheShape(CONTEXT, 9, 64),
]
CASES = [
    pytest.param(torch.float32, "auto", id="fp32"),
    pytest.param(torch.bfloat16, "auto", id="bf16", marks=pytest.mark.slow),
    pytest.param(torch.bfloat16, "int8", id="bf16-int8kv"),
    pytest.param(torch.bfloat16, "int4", id="bf16-int4kv", marks=pytest.mark.slow),
]


def reply(runner: Watched, engine: Engine, prompt: Sequence[int]) -> tuple[list[int], int, list[Tensor], int]:
    """Return tokens, cached token count, the logits each token was drawn from, and the number of tokens read."""
    runner.seen, runner.tokens = [], 0
    tokens, timing = generate(engine, Request(tuple(prompt), limit=5))
    return tokens, timing.cached, [one[-1] for one in runner.seen if len(one)], runner.tokens


def engine(runner: ModelRunner, shape: CacheShape, folder: Path | None, chunk: int = 50) -> Engine:
    store = None if folder is None else PrefixStore(folder, b"\7" * 32, 1 << 30)
    return Engine(runner, shape, runner.config.vocab_size, running=3, chunk=chunk, store=store)


@exact
@pytest.mark.parametrize(("dtype", "kv"), CASES)
def test_after_a_restart_a_reply_has_hits_and_the_same_bits(tmp_path: Path, dtype: torch.dtype, kv: KvDtype) -> None:
    """The block sizes differ between write and read; prompts end inside a piece, at its end, and diverge earlier."""
    runner, chance, fresh = watched(dtype, kv), random.Random(1), count(300)
    text = [chance.randrange(300, 4000) for _ in range(2 * PIECE + 30)]
    expected = {end: reply(runner, engine(runner, SHAPES[0], None), text[:end]) for end in (PIECE, 2 * PIECE, 158)}
    alone = engine(runner, SHAPES[0], None)
    for shape, other in zip(SHAPES, (*SHAPES[1:], SHAPES[0]), strict=True):
        folder = tmp_path / str(shape.block_size)
        first = engine(runner, shape, folder)
        assert reply(runner, first, text)[:2] == (expected[158][0], 0)
        first.close()
        for end, (tokens, _, logits, read) in expected.items():
            again = engine(runner, other, folder)
            found = reply(runner, again, text[:end])
            kept = min(end // PIECE * PIECE, end - 1)
            assert found[0] == tokens and found[1] == kept and found[3] == read - kept
            assert all(torch.equal(one, two) for one, two in zip(found[2], logits, strict=True))
            assert again.stats.prefix_hits == kept and again.stats.disk is not None
            again.close()
        again = engine(runner, other, folder)
        parted = [*text[: PIECE + 9], next(fresh), *text[PIECE + 10 :]]
        assert reply(runner, again, parted)[:2] == (reply(runner, alone, parted)[0], PIECE)
        assert again.stats.misses == {"not stored on disk": 1}
        again.close()


@pytest.fixture(scope="module")
def recurrent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recurrent")
    model_type, changes = FAMILIES["qwen3_5-delta"]
    make(folder, model_type, {**SMALL, **changes, "max_position_embeddings": CONTEXT})
    return folder


@exact
@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[3]], ids=["lane", "blocks"])
def test_states_are_kept_over_a_restart(tmp_path: Path, recurrent: Path, shape: CacheShape) -> None:
    """The last piece boundary before the prompt's end has states; a prompt that diverges earlier is recomputed."""
    runner, chance = watched(torch.bfloat16, "auto", recurrent), random.Random(4)
    text = [chance.randrange(3, 97) for _ in range(2 * PIECE + 30)]
    ends = PIECE + 9, 2 * PIECE, 150, 158
    alone = {end: reply(runner, engine(runner, SHAPES[0], None), text[:end]) for end in ends}
    first = engine(runner, shape, tmp_path)
    assert reply(runner, first, text)[:2] == (alone[158][0], 0)
    first.close()
    assert len(list(tmp_path.iterdir())) == 3, "two pieces, and the states after the second"
    again = engine(runner, shape, tmp_path)
    for end, kept in zip(ends, (0, PIECE, 2 * PIECE), strict=False):
        tokens, cached, logits, read = reply(runner, again, text[:end])
        assert (tokens, cached, read) == (alone[end][0], kept, alone[end][3] - kept), end
        assert all(torch.equal(one, two) for one, two in zip(logits, alone[end][2], strict=True))
    again.forget()
    assert reply(runner, again, text)[1] == 2 * PIECE, "the folder has it, though the cache has not"
    again.close()


@exact
def test_a_damaged_state_costs_time_and_no_bit(tmp_path: Path, recurrent: Path) -> None:
    runner, chance = watched(torch.bfloat16, "auto", recurrent), random.Random(5)
    text = [chance.randrange(3, 97) for _ in range(PIECE + 30)]
    first = engine(runner, SHAPES[3], tmp_path)
    expected = reply(runner, first, text)
    first.close()
    state = max(tmp_path.iterdir(), key=lambda path: path.stat().st_size)
    data = bytearray(state.read_bytes())
    data[len(data) // 2] ^= 16
    state.write_bytes(data)
    again = engine(runner, SHAPES[3], tmp_path)
    found = reply(runner, again, text)
    assert found[:2] == expected[:2] and all(map(torch.equal, found[2], expected[2]))
    assert again.stats.disk is not None and again.stats.disk.ignored == {"damaged": 1}
    again.close()
    again = engine(runner, SHAPES[3], tmp_path)
    assert reply(runner, again, text)[:2] == (expected[0], PIECE), "what was damaged is there again"
    again.close()


@exact
def test_damaged_files_cost_time_and_no_bit(tmp_path: Path) -> None:
    runner, chance = watched(torch.bfloat16, "auto"), random.Random(2)
    text = [chance.randrange(300, 4000) for _ in range(3 * PIECE + 7)]
    first = engine(runner, SHAPES[3], tmp_path)
    expected = reply(runner, first, text)
    first.close()
    files = sorted(tmp_path.iterdir(), key=lambda path: -path.stat().st_mtime_ns)
    for which, cached in enumerate((0, PIECE, 2 * PIECE)):
        data = bytearray(files[which].read_bytes())
        data[-100] ^= 16
        files[which].write_bytes(data)
        again = engine(runner, SHAPES[3], tmp_path)
        found = reply(runner, again, text)
        assert found[:2] == (expected[0], cached)
        assert all(torch.equal(one, two) for one, two in zip(found[2], expected[2][-5:], strict=False))
        assert again.stats.disk is not None and again.stats.disk.ignored == {"damaged": 1}
        again.close()
        again = engine(runner, SHAPES[3], tmp_path)
        assert reply(runner, again, text)[:2] == (expected[0], 3 * PIECE), "what was damaged is there again"
        again.close()


@exact
def test_many_replies_at_once_with_too_few_blocks_go_on_from_the_folder(tmp_path: Path) -> None:
    runner, chance = watched(torch.float32, "auto"), random.Random(3)
    begins = [[chance.randrange(300, 4000) for _ in range(2 * PIECE)] for _ in range(2)]
    asked = [
        Request(
            (*begins[index % 2][: chance.randint(40, 128)], index + 300, *range(400, 400 + chance.randint(1, 30))),
            SamplingParams(0.9 if index % 3 else 0.0, seed=index),
            limit=chance.randint(2, 12),
        )
        for index in range(6)
    ]
    expected = [together(engine(runner, SHAPES[0], None), [one])[0] for one in asked]
    hits = []
    for _ in range(2):
        tight = Engine(
            runner,
            CacheShape(CONTEXT, 20, 8),
            runner.config.vocab_size,
            running=8,
            chunk=33,
            store=PrefixStore(tmp_path, b"\7" * 32, 1 << 30),
        )
        assert together(tight, asked) == expected
        hits.append(tight.stats.prefix_hits)
        assert tight.stats.preemptions and tight.scheduler.pool.used == 0
        tight.close()
    assert hits[1] > 200 and hits[1] > hits[0]


def test_a_pass_that_broke_off_leaves_nothing_in_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = watched(torch.float32, "auto")
    broken = engine(runner, SHAPES[3], tmp_path)
    number = broken.submit(Request(tuple(range(300, 300 + 2 * PIECE)), limit=5))
    for _ in range(4):
        broken.step()

    def fail(*_: object) -> Tensor:
        raise RuntimeError("lost")

    with monkeypatch.context() as patch:
        patch.setattr(Watched, "run", fail)
        with pytest.raises(RuntimeError):
            broken.step()
    broken.cancel(number)
    broken.forget()
    other = broken.submit(Request(tuple(range(600, 600 + PIECE)), limit=2))
    while broken.step():
        pass
    broken.cancel(other)
    broken.close()
    assert len(list(tmp_path.iterdir())) == 1


def test_an_identity_is_of_weights_formats_and_what_rotates(tmp_path: Path) -> None:
    folder = open_model_folder(PICO)
    plain = load_model(folder, Placement(CPU, torch.float32))
    first = identity(folder, plain, 128)
    assert len(first) == 32 and first == identity(open_model_folder(PICO), plain, 256)
    others = [identity(folder, ModelRunner(plain.model, "int8"), 128)]
    others.append(identity(folder, load_model(folder, Placement(CPU, torch.bfloat16)), 128))
    others.append(identity(folder, load_model(folder, Placement(CPU, torch.bfloat16, portable=True)), 128))
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in PICO.iterdir():
        if path.is_file():
            (copy / path.name).write_bytes(path.read_bytes())
    assert identity(open_model_folder(copy), plain, 128) == first, "where a model lies is no matter"
    weights = next(copy.glob("*.safetensors"))
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    others.append(identity(open_model_folder(copy), plain, 128))
    config = folder.config
    stretched = replace(
        config, rope_scaling=replace(config.rope_scaling, kind="dynamic", factor=2.0, original_context=64)
    )
    others += [identity(replace(folder, config=stretched), plain, context) for context in (128, 256)]
    assert len({first, *others}) == 1 + len(others)


def test_an_identity_is_of_all_source_files_and_no_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = open_model_folder(PICO)
    runner, engine = load_model(folder, Placement(CPU, torch.float32)), tmp_path / "engine"
    monkeypatch.setattr(disk_prefix_cache, "__file__", str(engine / "disk_prefix_cache.py"))
    engine.mkdir()
    identities = [identity(folder, runner, 128)]
    for name in ("models.py", "engine/models.py", "kernels.cpp", "kernels.h"):
        for content in ("one", "two"):
            (tmp_path / name).write_text(content)
            identities.append(identity(folder, runner, 128))
    assert len(set(identities)) == len(identities)
    for name in ("models.pyc", "engine/log.txt", "README.md"):
        (tmp_path / name).write_text("one")
    assert identity(folder, runner, 128) == identities[-1]
    (tmp_path / "models.py").rename(tmp_path / "families.py")
    assert identity(folder, runner, 128) not in identities


class Lists:
    """Stores prefixes in memory as lists; some of them are unavailable when they are requested."""

    def __init__(self, chance: random.Random) -> None:
        self.texts: set[tuple[int, ...]] = set()
        self.chance, self.restored, self.refused = chance, 0, 0
        self.world: World

    def find(self, tokens: list[int]) -> StoredPrefix:
        size, count = restore.PIECE, 0
        while (count + 1) * size <= len(tokens) and tuple(tokens[: (count + 1) * size]) in self.texts:
            count += 1
        self.text = tuple(tokens)
        return StoredPrefix(
            tuple(StoredPiece(index, b"", bytes(tokens[: (index + 1) * size])) for index in range(count)), "no"
        )

    def restore(self, found: StoredPrefix, table: BlockTable, end: int) -> bool:
        size, cache, pool = self.world.pool.block_size, self.world.cache, self.world.pool
        if self.chance.random() < 0.1:
            self.refused += 1
            return False
        for source, target in pool.take_copies():
            cache[target] = list(cache[source])
        text = tuple(found.pieces[table.length // restore.PIECE].tokens)
        assert table.length < end <= len(text)
        for at in range(table.length, end):
            block = table.blocks[at // size]
            assert pool.references(block) == 1 and block not in pool.index, "written by one, seen by nobody"
            cache[block][at % size] = text[: at + 1]
        self.restored += end - table.length
        return True


class Keeping(World):
    def __init__(self, chance: random.Random, source: Lists) -> None:
        size = chance.randint(1, 6)
        super().__init__(chance.randint(5, 9) * 4, size, 20, chance.randint(1, 9), chance.randint(1, 6))
        self.scheduler = Scheduler(self.pool, Limits(20, chance.randint(1, 9), 5), lambda: self.now, source)
        source.world = self

    def end(self, sequence: RequestSequence, reason: FinishReason, wrong: bool = False) -> None:
        source, size = self.source, restore.PIECE
        for end in range(size, sequence.table.length + 1, size):
            source.texts.add(tuple(sequence.tokens[:end]))
        super().end(sequence, reason, wrong)
        self.pool.clear()

    source: Lists


@pytest.mark.parametrize("piece", [1, 3, 4])
def test_whatever_is_brought_back_a_pass_reads_what_its_own_text_wrote(
    piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The histories are those of `test_scheduler`, which checks every position that is read and written."""
    monkeypatch.setattr(restore, "PIECE", piece)
    restored = refused = preempted = 0
    for seed in range(6):
        chance = random.Random(seed)
        source = Lists(chance)
        world = Keeping(chance, source)
        world.source = source
        begins = [tuple(chance.randrange(VOCAB) for _ in range(12)) for _ in range(3)]
        while world.steps < 250:
            if len(world.under_way) < 8 and chance.random() < 0.4:
                rest = tuple(chance.randrange(VOCAB) for _ in range(chance.randint(0, 4)))
                world.submit((*chance.choice(begins)[: chance.randint(1, 12)], *rest), chance.choice((None, 0, 2, 5)))
            world.step(chance if chance.random() < 0.5 else None)
            world.check()
        world.finish()
        restored, refused = restored + source.restored, refused + source.refused
        preempted += world.scheduler.counts.preemptions
        assert world.scheduler.counts.hits <= world.scheduler.counts.queries
    assert restored > 300 and refused > 10 and preempted > 0


def test_files_need_every_position_of_layers_with_a_window(tmp_path: Path) -> None:
    shape = CacheShape(CONTEXT, 12, 8, window_blocks=6)
    with pytest.raises(ValueError, match="every position"):
        engine(watched(torch.float32, "auto"), shape, tmp_path)
