"""Test the disk prefix store against a dictionary and against damaged files."""

import hashlib
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mycli.runtime.cache.prefix_index import PIECE
from mycli.runtime.cache.prefix_store import MAX_PENDING, PrefixStore, UntrustedError
from mycli.runtime.errors import UsageError

ONE, OTHER = b"\1" * 32, b"\2" * 32
LIMIT = 1 << 20
NBYTES = 40
FILE = 80 + PIECE * 8 + NBYTES + 32
TEXT = [(index * 7919) % 4001 for index in range(3 * PIECE + 5)]


def values(index: int) -> bytes:
    return bytes((index * 31 + at) % 256 for at in range(NBYTES))


def filled(folder: Path, identity: bytes = ONE, limit: int = LIMIT, text: list[int] = TEXT) -> PrefixStore:
    store = PrefixStore(folder, identity, limit)
    for piece in store.missing(store.pieces(text)):
        store.write(piece, values(piece.index))
    store.flush()
    return store


def held(store: PrefixStore, text: list[int] = TEXT) -> list[bytes | None]:
    return [store.read(piece, NBYTES) for piece in store.find(text, NBYTES).pieces]


def test_what_was_written_is_there_after_a_restart_for_texts_that_begin_alike(tmp_path: Path) -> None:
    filled(tmp_path / "kept").close()
    again = PrefixStore(tmp_path / "kept", ONE, LIMIT)
    assert held(again) == [values(0), values(1), values(2)] and again.stats.read == 3
    assert again.find(TEXT[: 3 * PIECE], NBYTES).miss == ""
    assert again.find(TEXT, NBYTES).miss == f"shorter than one file (from token {3 * PIECE + 1})"
    assert again.missing(again.pieces(TEXT)) == [] and again.stats.nbytes == 3 * FILE
    parted = [*TEXT[: PIECE + 3], 5, *TEXT[PIECE + 4 :]]
    assert held(again, parted) == [values(0)]
    assert again.find(parted, NBYTES).miss == f"not stored on disk (from token {PIECE + 1})"
    assert again.find([5, *TEXT], NBYTES).pieces == ()
    assert not again.stats.ignored
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "kept").iterdir()} == {0o600}
    assert (tmp_path / "kept").stat().st_mode & 0o777 == 0o700


def test_another_model_finds_nothing_and_takes_no_file_for_its_own(tmp_path: Path) -> None:
    """G41: files of another model are rejected even if renamed to the expected name."""
    filled(tmp_path)
    other = PrefixStore(tmp_path, OTHER, LIMIT)
    assert other.find(TEXT, NBYTES).pieces == ()
    (piece, *_) = other.missing(other.pieces(TEXT))
    source = next(tmp_path.iterdir())
    (tmp_path / f"{piece.name.hex()}.kv").write_bytes(source.read_bytes())
    assert held(other) == [None] and other.stats.ignored == {"written by another model or version": 1}
    assert not (tmp_path / f"{piece.name.hex()}.kv").exists() and source.exists()


def test_a_file_under_the_name_of_another_text_is_told_by_its_tokens(tmp_path: Path) -> None:
    """G34: a file whose name collides is rejected because its tokens differ."""
    store = filled(tmp_path)
    first, second, _ = store.find(TEXT, NBYTES).pieces
    body = (tmp_path / f"{second.name.hex()}.kv").read_bytes()[:-32]
    forged = body[:40] + first.name + body[72:]  # complete, with a correct checksum
    (tmp_path / f"{first.name.hex()}.kv").write_bytes(forged + hashlib.sha256(forged).digest())
    assert held(store) == [None, values(1), values(2)] and store.stats.ignored == {"written for other tokens": 1}


@given(
    change=st.one_of(
        st.tuples(st.just("flip"), st.integers(0, FILE * 8 - 1)),
        st.tuples(st.just("cut"), st.integers(0, FILE - 1)),
        st.tuples(st.just("longer"), st.binary(min_size=1, max_size=9)),
        st.tuples(st.just("other"), st.binary(min_size=0, max_size=2 * FILE)),
        st.tuples(st.just("noise"), st.binary(min_size=FILE, max_size=FILE)),
    ),
    which=st.integers(0, 2),
)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_file_that_was_changed_is_never_read(tmp_path: Path, change: tuple[str, int | bytes], which: int) -> None:
    warnings: list[str] = []
    filled(tmp_path)
    store = PrefixStore(tmp_path, ONE, LIMIT, warnings.append)
    pieces = store.find(TEXT, NBYTES).pieces
    path = tmp_path / f"{pieces[which].name.hex()}.kv"
    data = bytearray(path.read_bytes())
    match change:
        case ("flip", int(bit)):
            data[bit // 8] ^= 1 << bit % 8
        case ("cut", int(size)):
            del data[size:]
        case ("longer", bytes(more)):
            data += more
        case (_, bytes(new)):
            data[:] = new
    path.write_bytes(data)
    assert [store.read(piece, NBYTES) for piece in pieces] == [
        None if piece.index == which else values(piece.index) for piece in pieces
    ]
    assert sum(store.stats.ignored.values()) == 1 and len(warnings) == 1 and str(path) in warnings[0]
    assert not path.exists() and [piece.index for piece in store.missing(store.pieces(TEXT))] == [which]
    store.write(pieces[which], values(which))
    store.flush()
    assert held(store) == [values(0), values(1), values(2)], "it is built again"


def _folder(path: Path) -> None:
    path.mkdir()


def _link(path: Path) -> None:
    path.symlink_to(path.with_name("elsewhere"))  # the file itself


def _loop(path: Path) -> None:
    path.symlink_to(path)


@pytest.mark.parametrize("make", [_folder, _link, _loop, os.mkfifo], ids=["folder", "link", "loop", "fifo"])
def test_what_is_no_file_is_neither_opened_nor_followed(tmp_path: Path, make: Callable[[Path], None]) -> None:
    store = filled(tmp_path)
    first = store.find(TEXT, NBYTES).pieces[0]
    path = tmp_path / f"{first.name.hex()}.kv"
    path.rename(tmp_path / "elsewhere")
    make(path)
    assert store.read(first, NBYTES) is None, "removed by another process after `find`"
    path.unlink(missing_ok=True) if not path.is_dir() else None
    if not path.exists():
        make(path)
    assert store.find(TEXT, NBYTES).pieces == () and sum(store.stats.ignored.values()) == 2


def test_a_file_that_has_gone_since_it_was_found_is_a_miss(tmp_path: Path) -> None:
    store = filled(tmp_path)
    pieces = store.find(TEXT, NBYTES).pieces
    for path in tmp_path.iterdir():
        path.unlink()
    assert store.read(pieces[0], NBYTES) is None


def test_the_folder_is_kept_within_its_limit_and_the_least_recently_used_goes_first(tmp_path: Path) -> None:
    texts = [[text, *TEXT[1:]] for text in range(4)]
    (tmp_path / "notes.txt").write_bytes(b"x" * 10 * FILE)
    (tmp_path / f".{'0' * 64}.kv.{'0' * 12}.tmp").write_bytes(b"x")
    os.utime(tmp_path / f".{'0' * 64}.kv.{'0' * 12}.tmp", (0, 0))
    for text in texts[:2]:
        filled(tmp_path, limit=7 * FILE, text=text)
    assert not list(tmp_path.glob(".*.tmp")) and (tmp_path / "notes.txt").exists()
    store = PrefixStore(tmp_path, ONE, 7 * FILE)
    assert len(store.find(texts[0], NBYTES).pieces) == 3, "used now, so later than the second text"
    filled(tmp_path, OTHER, 7 * FILE, texts[2])
    assert [len(store.find(text, NBYTES).pieces) for text in texts[:2]] == [3, 1], "a text loses its end first"
    assert len(list(tmp_path.glob("*.kv"))) == 7
    small = filled(tmp_path, limit=FILE // 2, text=texts[3])
    assert not list(tmp_path.glob("*.kv")) and small.stats.nbytes == 0 and small.stats.written == 0


def test_a_new_file_takes_the_room_of_an_old_one(tmp_path: Path) -> None:
    """The limit holds between two scans of the folder too; a scan follows each sixteenth of the limit."""
    store = filled(tmp_path, limit=40 * FILE, text=list(range(43 * PIECE)))
    assert store.stats.written == 43 and store.stats.nbytes == sum(map(size_of, tmp_path.iterdir())) == 40 * FILE


def size_of(path: Path) -> int:
    return path.stat().st_size


def test_only_abandoned_temporary_files_of_the_cache_are_deleted(tmp_path: Path) -> None:
    abandoned, fresh = (tmp_path / f".{digit * 64}.kv.{digit * 12}.tmp" for digit in "ab")
    foreign = tmp_path / "notes.txt"
    for path in (abandoned, fresh, foreign):
        path.write_bytes(b"x")
    for path in (abandoned, foreign):
        os.utime(path, (0, 0))
    PrefixStore(tmp_path, ONE, LIMIT).close()
    assert set(tmp_path.iterdir()) == {fresh, foreign}


def test_a_file_of_another_size_is_not_found(tmp_path: Path) -> None:
    store = filled(tmp_path)
    path = tmp_path / f"{store.find(TEXT, NBYTES).pieces[1].name.hex()}.kv"
    path.write_bytes(path.read_bytes()[:-1])
    stored = store.find(TEXT, NBYTES)
    assert [piece.index for piece in stored.pieces] == [0] and stored.miss.startswith("damaged on disk")
    assert store.stats.ignored == {"truncated": 1} and not path.exists()


def test_files_of_exactly_the_limit_stay_when_the_folder_is_opened(tmp_path: Path) -> None:
    filled(tmp_path, limit=3 * FILE).close()
    assert held(PrefixStore(tmp_path, ONE, 3 * FILE)) == [values(0), values(1), values(2)]


def test_files_of_other_processes_count_after_a_sixteenth_of_the_limit_was_written(tmp_path: Path) -> None:
    texts = [[text, *TEXT[1:]] for text in range(12)]
    store = PrefixStore(tmp_path, ONE, 32 * FILE)
    for text in texts[:10]:
        filled(tmp_path, limit=32 * FILE, text=text).close()
    for text in texts[10:]:
        for piece in store.missing(store.pieces(text)):
            store.write(piece, values(piece.index))
    store.close()
    assert len(list(tmp_path.glob("*.kv"))) == 32 and store.stats.nbytes == 32 * FILE


def test_processes_that_share_a_folder_write_whole_files(tmp_path: Path) -> None:
    texts = [[text % 5, *TEXT[1:]] for text in range(20)]

    def work() -> None:
        store = PrefixStore(tmp_path, ONE, 9 * FILE)
        for text in texts:
            for piece in store.missing(store.pieces(text)):
                store.write(piece, values(piece.index))
            read = [store.read(piece, NBYTES) for piece in store.find(text, NBYTES).pieces]
            assert all(part is None or part == values(index) for index, part in enumerate(read))
        store.close()
        bad.extend(reason for reason in store.stats.ignored if "No such file" not in reason)

    bad: list[str] = []
    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not bad
    last = PrefixStore(tmp_path, ONE, 9 * FILE)
    assert last.stats.nbytes <= 9 * FILE and not list(tmp_path.glob(".*"))
    assert all(one == values(index) for text in texts for index, one in enumerate(held(last, text)))


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702], ids=oct)
def test_a_folder_that_others_can_write_to_is_not_used(tmp_path: Path, mode: int) -> None:
    """G41: a user who can write to the folder could inject keys and values."""
    filled(tmp_path)
    tmp_path.chmod(0o755)
    PrefixStore(tmp_path, ONE, LIMIT).close()
    tmp_path.chmod(mode)
    with pytest.raises(UntrustedError, match="other users can write to this folder"):
        PrefixStore(tmp_path, ONE, LIMIT)


def test_a_folder_that_cannot_be_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    for place in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(UsageError, match="cannot write|cannot be written"):
            PrefixStore(place, ONE, LIMIT)


def test_a_disk_that_takes_no_more_is_told_once_and_stops_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    warnings: list[str] = []
    monkeypatch.setattr("mycli.runtime.cache.prefix_store.write_atomic", full)
    store = PrefixStore(tmp_path, ONE, LIMIT, warnings.append)
    for piece in store.missing(store.pieces(TEXT)):
        store.write(piece, values(0))
    store.close()
    assert store.stats.ignored == {"cannot be written (No space left on device)": 3} and len(warnings) == 1


def test_more_than_may_wait_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go = threading.Event()
    monkeypatch.setattr("mycli.runtime.cache.prefix_store.write_atomic", lambda *_, **__: go.wait(10))
    monkeypatch.setattr("mycli.runtime.cache.prefix_store.MAX_PENDING", 2 * NBYTES)
    store = PrefixStore(tmp_path, ONE, LIMIT)
    pieces = store.missing(store.pieces(TEXT))
    for piece in pieces:
        store.write(piece, values(0))
    assert [piece.index for piece in store.missing(store.pieces(TEXT))] == [2] and store.stats.skipped == 1
    go.set()
    store.close()
    assert store.stats.written == 2 and MAX_PENDING > 2 * NBYTES
