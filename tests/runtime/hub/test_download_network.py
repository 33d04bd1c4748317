"""Test downloads over a network that drops, alters, delays and repeats data, and resuming after each failure."""

import hashlib
import json
import ssl
from dataclasses import replace
from pathlib import Path

import httpx2
import pytest

from mycli.runtime.checkpoint.safetensors_header import INDEX
from mycli.runtime.errors import ExitCode, GateError, NotFoundError
from mycli.runtime.hub import client
from mycli.runtime.hub.client import Hub, RetryPolicy, TransientError
from mycli.runtime.hub.download import plan_download
from mycli.runtime.hub.resolve import resolve
from tests.support.hub_server import Fault, HubServer
from tests.support.pulling import FILES, QUICK, REPO, WANTED, WEIGHTS, Notes, contents, failing, fetch, leftovers

pytestmark = pytest.mark.usefixtures("folders")


def blob(cache: Path, data: bytes) -> Path:
    return cache / "models--org--tiny" / "blobs" / hashlib.sha256(data).hexdigest()


def test_d9_a_dropped_connection_goes_on_from_where_it_was(server: HubServer) -> None:
    server.add(REPO, FILES)
    server.fail("storage:", Fault(drop_after=5000))
    server.fail("storage:", Fault(drop_after=3000))
    notes = Notes()
    assert contents(fetch(server, notes=notes).folder) == {name: FILES[name] for name in WANTED}
    ranges = [r.headers.get("Range") for r in server.requests("storage:") if r.headers.get("Range")]
    assert ranges == ["bytes=5000-", "bytes=8000-"]
    assert notes.arrived == sum(len(FILES[name]) for name in WANTED)
    assert len(notes) == 2 and "trying again" in notes[0]


def test_d9_what_one_process_left_the_next_one_uses(server: HubServer, folders: Path) -> None:
    server.add(REPO, FILES)
    server.fail("storage:", Fault(drop_after=6000), times=1)
    server.fail("storage:", Fault(drop_after=0), times=3)
    error = failing(server)
    assert "(tried 4 times)" in error.message and error.exit_code == ExitCode.NOT_FOUND
    assert [path.stat().st_size for path in folders.rglob("*.incomplete")] == [6000]
    with Hub(server.address(), None, print, QUICK) as connection:
        job = plan_download(connection, REPO)
    assert job.new_bytes == sum(file.size for file in job.missing) - 6000
    fetch(server)
    assert "bytes=6000-" in [r.headers.get("Range") for r in server.requests("storage:")]
    assert not leftovers(folders)


@pytest.mark.parametrize(
    "fault",
    [
        Fault(ignore_range=True),
        Fault(status=416),
        Fault(shifted=100),
        Fault(status=503),
        Fault(announced=10, ignore_range=True),
        Fault(announced=10**6),
        Fault(announced=2**63),
        Fault(status=403, body=b"<Error>Request has expired</Error>"),
    ],
    ids=[
        "D9-range-ignored",
        "D9-416",
        "D9-another-range",
        "D9-5xx",
        "D9-length-too-short",
        "D9-length-too-long",
        "D9-length-absurd",
        "expired-link",
    ],
)
def test_d9_an_odd_answer_while_resuming(fault: Fault, server: HubServer) -> None:
    server.add(REPO, FILES)
    server.fail("storage:", Fault(drop_after=5000))
    server.fail("storage:", fault)
    notes = Notes()
    assert contents(fetch(server, notes=notes).folder)["model.safetensors"] == WEIGHTS
    assert notes.arrived == sum(len(FILES[name]) for name in WANTED), "what is discarded is subtracted"


def test_d9_a_file_that_a_server_does_not_continue_is_fetched_from_the_start(server: HubServer) -> None:
    server.add(REPO, FILES)
    server.fail("storage:", Fault(drop_after=5000))
    server.fail("storage:", Fault(status=416))
    notes = Notes()
    assert contents(fetch(server, notes=notes).folder)["model.safetensors"] == WEIGHTS
    assert len(notes) == 2 and "does not continue model.safetensors" in notes[1]
    ranges = [request.headers.get("Range") for request in server.requests(hashlib.sha256(WEIGHTS).hexdigest())]
    assert ranges == [None, "bytes=5000-", None]


def test_d9_a_body_that_is_longer_than_the_rest_of_the_file_is_cut(server: HubServer) -> None:
    server.add(REPO, FILES)
    server.fail("storage:", Fault(drop_after=5000))
    place = {"Content-Range": f"bytes 5000-{len(WEIGHTS) - 1}/{len(WEIGHTS)}"}
    server.fail("storage:", Fault(status=206, headers=place, body=WEIGHTS[5000:] + b"more" * 1000))
    notes = Notes()
    assert contents(fetch(server, notes=notes).folder)["model.safetensors"] == WEIGHTS
    assert len(server.requests("storage:")) == 2
    assert notes.arrived == sum(len(FILES[name]) for name in WANTED)


@pytest.mark.parametrize("size", [0, 1, 4000, len(WEIGHTS), len(WEIGHTS) + 7])
def test_what_lies_there_already_may_be_anything(size: int, server: HubServer, folders: Path) -> None:
    """Check that wrong contents of a partial file are discarded when the hash differs."""
    server.add(REPO, FILES)
    partial = blob(folders, WEIGHTS).with_name(blob(folders, WEIGHTS).name + ".mycli.incomplete")
    partial.parent.mkdir(parents=True)
    partial.write_bytes(b"\xff" * size)
    assert contents(fetch(server).folder)["model.safetensors"] == WEIGHTS
    assert not leftovers(folders)


def test_d9_wrong_bytes_of_the_right_size_once_are_fetched_again(server: HubServer) -> None:
    server.add(REPO, FILES)
    server.fail("storage:", Fault(altered=True))
    notes = Notes()
    assert contents(fetch(server, notes=notes).folder)["model.safetensors"] == WEIGHTS
    assert "does not match its hash" in notes[0]
    assert notes.arrived == sum(len(FILES[name]) for name in WANTED)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"], ids=["git-sha1", "sha256"])
def test_d9_wrong_bytes_for_good_never_get_a_name(name: str, server: HubServer, folders: Path) -> None:
    server.add(REPO, FILES)
    where = "storage:" if name == "model.safetensors" else "config.json"
    server.fail(where, Fault(altered=True), times=4)
    error = failing(server)
    assert isinstance(error, GateError) and error.exit_code == ExitCode.GATE and name in error.message
    assert len([request for request in server.requests(where) if request.method == "GET"]) == 2
    assert not list(folders.rglob(f"snapshots/*/{name}")) and not leftovers(folders)
    with pytest.raises(NotFoundError, match="partly downloaded"):
        resolve(REPO)


def test_an_altered_index_is_noticed_before_it_chooses_files(server: HubServer) -> None:
    index = json.dumps({"weight_map": {"w": "model-1.safetensors"}}).encode()
    server.add(REPO, {"config.json": b"{}", INDEX: index, "model-1.safetensors": WEIGHTS})
    server.fail(INDEX, Fault(altered=True))
    assert isinstance(failing(server), GateError)
    assert fetch(server).folder.is_dir()


@pytest.mark.parametrize("where", ["/revision/", "/tree/", "config.json", "storage:"])
def test_d9_busy_servers_are_waited_for(where: str, server: HubServer) -> None:
    server.add(REPO, FILES)
    server.fail(where, Fault(status=429, headers={"Retry-After": "0"}))
    server.fail(where, Fault(status=408))
    notes = Notes()
    assert fetch(server, notes=notes).folder.is_dir()
    assert "too many requests" in notes[0] and "408" in notes[1]


def test_d9_a_server_that_asks_for_an_hour_is_not_waited_for(server: HubServer) -> None:
    server.add(REPO, FILES)
    server.fail("/revision/", Fault(status=429, headers={"Retry-After": "3600"}))
    assert "asks to wait 3600 s" in failing(server).message
    server.fail("/revision/", Fault(status=429, headers={"RateLimit": '"api";r=0;t=900'}))
    assert "asks to wait 900 s" in failing(server).message


def test_d9_a_server_that_stays_down(server: HubServer) -> None:
    server.add(REPO, FILES)
    server.fail("/revision/", Fault(status=500), times=99)
    error = failing(server)
    assert "answers 500 (tried 3 times)" in error.message and error.exit_code == ExitCode.NOT_FOUND


def test_a_connection_that_drips_is_not_progress(server: HubServer) -> None:
    server.add(REPO, FILES)
    server.fail("storage:", Fault(drop_after=10), times=99)
    assert "tried 4 times" in failing(server).message


def test_no_server_and_no_name(server: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    def attempt(address: str) -> str:
        with Hub(address, None, lambda text: None, QUICK) as connection, pytest.raises(NotFoundError) as caught:
            plan_download(connection, REPO)
        return caught.value.message

    address = server.address()
    server.close()
    assert "no connection to 127.0.0.1" in attempt(address)
    assert "cannot be found: no network, or no name service" in attempt("http://hub.invalid")


def test_a_certificate_that_is_not_trusted_is_named_and_not_tried_again() -> None:
    error = httpx2.ConnectError("handshake")
    error.__cause__ = ssl.SSLCertVerificationError("self-signed certificate")
    problem = client._transport_error(error, "hub.example.org")
    assert isinstance(problem, NotFoundError) and "SSL_CERT_FILE" in problem.hint
    assert problem.message == "the certificate of hub.example.org is not trusted"


def test_a_server_that_says_nothing(server: HubServer) -> None:
    server.add(REPO, FILES)
    server.fail("/revision/", Fault(status=200, body=b"{}" * 5000, seconds_per_block=1.0), times=9)
    impatient = replace(QUICK, timeout=0.2)
    with (
        Hub(server.address(), None, lambda text: None, impatient) as connection,
        pytest.raises(NotFoundError) as caught,
    ):
        plan_download(connection, REPO)
    assert "does not answer" in caught.value.message


def test_a_file_that_is_complete_but_has_no_name_yet_is_not_fetched_again(server: HubServer, folders: Path) -> None:
    """The process was killed between the last byte and the rename."""
    server.add(REPO, FILES)
    partial = blob(folders, WEIGHTS).with_name(blob(folders, WEIGHTS).name + ".mycli.incomplete")
    partial.parent.mkdir(parents=True)
    partial.write_bytes(WEIGHTS)
    with Hub(server.address(), None, print, QUICK) as connection:
        assert plan_download(connection, REPO).new_bytes == sum(len(FILES[name]) for name in WANTED) - len(WEIGHTS)
    notes = Notes()
    assert contents(fetch(server, notes=notes).folder)["model.safetensors"] == WEIGHTS
    assert notes.arrived == sum(len(FILES[name]) for name in WANTED - {"model.safetensors"})
    assert not server.requests("storage:")


def test_delays_between_attempts_double_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    delays: list[float] = []
    monkeypatch.setattr(client.time, "sleep", delays.append)

    def drop() -> None:
        raise TransientError("dropped")

    with pytest.raises(NotFoundError, match=r"dropped \(tried 5 times\)") as caught:
        RetryPolicy(request_attempts=5, max_delay=3.0).run(drop, lambda note: None)
    assert caught.value.hint == "check the network, and try again", "a request has nothing to continue"
    assert delays == [0.5, 1.0, 2.0, 3.0]


@pytest.mark.parametrize(("step", "calls"), [(1 << 20, 6), ((1 << 20) - 1, 3)], ids=["progress", "drip"])
def test_attempts_count_anew_after_a_mebibyte(step: int, calls: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection drops after each `step` bytes, four times, and then brings nothing more."""
    monkeypatch.setattr(client.time, "sleep", lambda seconds: None)
    received: list[int] = []

    def drop() -> None:
        received.append(min(len(received) + 1, 4) * step)
        raise TransientError("dropped")

    policy = RetryPolicy(attempts=3, request_attempts=1)
    with pytest.raises(NotFoundError, match=r"dropped \(tried 3 times\)"):
        policy.run(drop, lambda note: None, lambda: received[-1] if received else 0)
    assert len(received) == calls


def test_a_server_that_asks_for_as_long_as_allowed_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    delays: list[float] = []
    monkeypatch.setattr(client.time, "sleep", delays.append)
    waits = iter((120.0, 0.0, 121.0))

    def busy() -> None:
        raise TransientError("busy", next(waits))

    with pytest.raises(NotFoundError, match="asks to wait 121 s"):
        RetryPolicy().run(busy, lambda note: None)
    assert delays == [120.0, 0.0]


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({"Retry-After": "7"}, 7.0),
        ({"Retry-After": "Thu, 01 Jan 2026 00:01:00 GMT"}, 60.0),
        ({"Retry-After": "Wed, 31 Dec 2025 23:00:00 GMT"}, 0.0),
        ({"RateLimit": '"api";r=0;t=30'}, 30.0),
        ({"RateLimit": '"api";r=5;t=30'}, None),
        ({}, None),
    ],
    ids=["seconds", "date", "past", "exhausted", "not-exhausted", "nothing"],
)
def test_the_time_to_wait_is_read(
    headers: dict[str, str], seconds: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client.time, "time", lambda: 1_767_225_600.0)  # the first second of 2026
    assert client._retry_after(headers) == seconds


@pytest.mark.parametrize("fault", [Fault(), Fault(ignore_range=True)], ids=["ranges", "whole-files"])
def test_a_part_of_a_file_is_read(fault: Fault, server: HubServer) -> None:
    whole = bytes(range(250)) * 1200  # arrives in several chunks
    commit = server.add(REPO, {"model.safetensors": whole})
    with Hub(server.address(), None, print, QUICK) as hub:
        for start, length in ((0, 8), (100_001, 150_000), (len(whole) - 10, 300)):
            server.fail("storage:", fault)
            data = hub.read(REPO, commit, "model.safetensors", start, length)
            assert data == whole[start : start + length]
    ranges = [request.headers["Range"] for request in server.requests("storage:")]
    assert ranges == ["bytes=0-7", "bytes=100001-250000", f"bytes={len(whole) - 10}-{len(whole) + 289}"]
