"""Test API keys with names, shares and limits: their file, what they permit, and per-key counters."""

import json

import pytest

from mycli.runtime.errors import UsageError
from mycli.runtime.server.http.api_error import ApiError
from mycli.runtime.server.http.keys import ApiKey, KeyShare, KeyTable, parse_keys
from mycli.runtime.server.http.settings import ServerSettings
from tests.runtime.server.conftest import Scripted

FILE = "# team\nalice  aaaaaaaa weight=2\n\nbob bbbbbbbb concurrent=1 rpm=3\nnightly cccccccc batch\n"


def headers(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def test_a_file_of_keys() -> None:
    alice, bob, nightly = parse_keys(FILE, "keys")
    assert alice == ApiKey(b"aaaaaaaa", KeyShare("alice", 2.0))
    assert bob == ApiKey(b"bbbbbbbb", KeyShare("bob"), 1, 3)
    assert nightly.share.batch and not alice.share.batch and not KeyShare.decode("").batch
    assert KeyShare.decode(alice.share.encode()) == alice.share and KeyShare.decode("") == KeyShare()


@pytest.mark.parametrize(("text", "weight"), [("1", 1.0), ("0.001", 0.001), ("0.5", 0.5), ("9999.999", 9999.999)])
def test_a_weight_is_any_number_above_zero(text: str, weight: float) -> None:
    (key,) = parse_keys(f"ci aaaaaaaa weight={text}", "keys")
    assert key.share == KeyShare("ci", weight)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("alice", "line 1: needs a name and a key"),
        ("al;ice aaaaaaaa", "line 1: the name must be"),
        ("alice short", "line 1: the key must be 8"),
        ("\nalice aaaaaaaa weight=0", "line 2: 'weight=0' is not"),
        ("alice aaaaaaaa weight=10000", "line 1: 'weight=10000' is not"),
        ("alice aaaaaaaa rpm=-1", "line 1: 'rpm=-1' is not"),
        ("alice aaaaaaaa\nalice bbbbbbbb", "two lines have the same name"),
        ("alice aaaaaaaa\nbob aaaaaaaa", "two lines have the same key"),
        ("# nothing", "has 0 keys"),
    ],
)
def test_mistakes_are_named_without_the_key(text: str, words: str) -> None:
    with pytest.raises(UsageError) as error:
        parse_keys(text, "keys")
    assert words in error.value.message and "aaaaaaaa" not in error.value.message


def test_limits_are_of_requests_under_way_and_of_a_minute() -> None:
    now = [0.0]
    table = KeyTable(parse_keys(FILE, "keys"), lambda: now[0])
    bob = table.find(b"bbbbbbbb")
    assert bob is not None and table.find(b"bbbbbbb") is None and table.find(b"") is None
    with table.counted(bob), pytest.raises(ApiError, match="its limit is 1"), table.counted(bob):
        pass
    for _ in range(2):
        with table.counted(bob):
            now[0] += 10
    with pytest.raises(ApiError, match="3 requests a minute") as error, table.counted(bob):
        pass
    assert error.value.status == 429 and error.value.headers["retry-after"] == "41"
    now[0] += 41
    with table.counted(bob):
        pass


@pytest.mark.parametrize(("seconds", "admitted"), [(59.5, False), (60.0, True)])
def test_a_minute_ends_after_60_seconds(seconds: float, admitted: bool) -> None:
    now = [5.0]
    (key,) = parse_keys("ci aaaaaaaa rpm=1", "keys")
    table = KeyTable([key], lambda: now[0])
    with table.counted(key):
        now[0] += seconds
    if admitted:
        with table.counted(key):
            pass
        return
    with pytest.raises(ApiError, match="1 requests a minute") as error, table.counted(key):
        pass
    assert error.value.headers["retry-after"] == "1"


def test_a_key_may_have_as_many_requests_as_its_limit() -> None:
    (key,) = parse_keys("ci aaaaaaaa concurrent=2", "keys")
    table = KeyTable([key])
    with table.counted(key):
        for _ in range(2):
            with table.counted(key), pytest.raises(ApiError, match="has 2 running requests"), table.counted(key):
                pass


def test_a_file_has_at_most_10000_keys() -> None:
    lines = [f"key{number} secret{number:06}" for number in range(10_001)]
    assert len(parse_keys("\n".join(lines[1:]), "keys")) == 10_000
    with pytest.raises(UsageError, match="has 10001 keys"):
        parse_keys("\n".join(lines), "keys")


def test_each_key_is_let_in_logged_and_counted(scripted: Scripted) -> None:
    settings = ServerSettings(("pico",), keys=parse_keys(FILE, "keys"), log_format="json")
    with scripted("Hello there", settings=settings) as served:
        body = {"messages": [{"role": "user", "content": "Hi"}], "service_tier": "flex"}
        assert served.ask("POST", "/v1/chat/completions", body).status == 401
        assert served.ask("POST", "/v1/chat/completions", body, headers("wrongkey")).status == 401
        for _ in range(3):
            assert served.ask("POST", "/v1/chat/completions", body, headers("bbbbbbbb")).status == 200
        refused = served.ask("POST", "/v1/chat/completions", body, headers("bbbbbbbb"))
        assert refused.status == 429 and refused.error["code"] == "key_limit"
        assert served.ask("POST", "/v1/chat/completions", body, {"x-api-key": "aaaaaaaa"}).status == 200
        text = served.ask("GET", "/metrics", None, headers("aaaaaaaa")).body.decode()
        assert 'mycli:key_requests_total{key="bob"} 3.0' in text
        assert 'mycli:key_requests_total{key="alice"} 1.0' in text
        assert 'mycli:key_tokens_total{key="bob",kind="completion"}' in text
        names = [json.loads(line)["key"] for line in served.log]
        assert {"alice", "bob"} <= set(names) and "bbbbbbbb" not in "".join(served.log)


def test_the_share_reaches_the_engine(scripted: Scripted) -> None:
    settings = ServerSettings(("pico",), supervised=True)
    with scripted("Hi", settings=settings) as served:
        seen = []
        submit = served.service.worker.engine.submit_replies
        served.service.worker.engine.submit_replies = lambda request, count: (  # type: ignore[method-assign]  # the scripted engine
            seen.append(request) or submit(request, count)  # type: ignore[func-returns-value]  # appends
        )
        body = {"messages": [{"role": "user", "content": "Hi"}]}
        share = {"x-mycli-share": KeyShare("alice", 2.0, True).encode()}
        assert served.ask("POST", "/v1/chat/completions", body, share).status == 200
        assert served.ask("POST", "/v1/chat/completions", {**body, "service_tier": "flex"}).status == 200
        assert [(r.user, r.weight, r.batch) for r in seen] == [("alice", 2.0, True), ("", 1.0, True)]
