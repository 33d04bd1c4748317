"""Test the limits of requests to a hub: which answers are tried again, how often, and how long an answer may be."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from mycli.runtime.errors import ModelError, NotFoundError
from mycli.runtime.hub import client
from mycli.runtime.hub.client import Hub, RetryPolicy, TransientError, search_models
from mycli.runtime.utils.json_fields import Fields
from tests.support.hub_server import Fault, HubServer
from tests.support.pulling import FILES, QUICK, REPO

pytestmark = pytest.mark.usefixtures("folders")


@pytest.mark.parametrize(("file", "delays"), [(False, [0.5, 1, 2]), (True, [0.5, 1, 2, 4, 8])], ids=["request", "file"])
def test_a_file_is_tried_more_often_than_a_request(
    file: bool, delays: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[float] = []
    monkeypatch.setattr(client.time, "sleep", waited.append)

    def drop() -> None:
        raise TransientError("dropped")

    with pytest.raises(NotFoundError, match=rf"tried {len(delays) + 1} times"):
        RetryPolicy().run(drop, lambda note: None, (lambda: 0) if file else None)
    assert waited == delays


@pytest.mark.parametrize("following", ["https://[::1/x", "/page\x01", "https://host:port/"], ids=ascii)
def test_a_listing_that_continues_at_no_address_names_the_hub(following: str, server: HubServer) -> None:
    with Hub(server.address(), None, lambda note: None, QUICK) as hub:
        with pytest.raises(ModelError, match="its listing continues at an invalid address"):
            hub._joined(server.address(), following)
        assert hub._joined("https://host/a?b=1", "/a?b=2") == "https://host/a?b=2"


def test_a_range_of_an_empty_file_is_empty_whatever_the_answer_says(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = SimpleNamespace(status_code=416, iter_bytes=lambda: [b"<h1>Range Not Satisfiable</h1>"])
    monkeypatch.setattr(Hub, "open", lambda *_: nullcontext(answer))
    with Hub("http://127.0.0.1:9", None, lambda note: None, QUICK) as hub:
        assert hub.read(REPO, "main", "empty.jinja", 0, 1) == b""


@pytest.mark.parametrize(
    ("status", "again"),
    [(408, True), (429, True), (500, True), (503, True), (400, False), (409, False), (430, False), (499, False)],
)
def test_a_busy_hub_is_asked_again_and_one_that_refuses_is_not(status: int, again: bool, server: HubServer) -> None:
    server.add(REPO, FILES)
    server.fail("/revision/", Fault(status=status))
    with Hub(server.address(), None, lambda note: None, QUICK) as hub:
        if again:
            assert hub.commit(REPO, None) == server.refs[REPO]["main"]
        else:
            with pytest.raises(NotFoundError, match=f"answers {status}"):
                hub.commit(REPO, None)
    assert len(server.requests("/revision/")) == 1 + again


@pytest.mark.parametrize("more", [0, 1])
def test_an_answer_may_be_as_long_as_the_limit(more: int, server: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "MAX_INFO_BYTES", 200)
    body = b'[{"id": "org/a"}]'.ljust(200 + more)
    server.fail("/api/models", Fault(status=200, body=body))
    with Hub(server.address(), None, print, QUICK) as hub:
        if more:
            with pytest.raises(ModelError, match="an answer of more than 200 bytes"):
                hub.list_models("search=a")
        else:
            assert [item.text("id") for item in hub.list_models("search=a")] == ["org/a"]


@pytest.mark.parametrize("pages", [2, 3])
def test_a_listing_has_a_bounded_number_of_pages(
    pages: int, server: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "MAX_PAGES", 2)
    server.page = 1
    commit = server.add(REPO, {f"{number}.json": b"{}" for number in range(pages)})
    with Hub(server.address(), None, print, QUICK) as hub:
        if pages == 2:
            assert hub.tree(REPO, commit).values.keys() == {"0.json", "1.json"}
        else:
            with pytest.raises(ModelError, match="its listing has more than 2 pages"):
                hub.tree(REPO, commit)


@pytest.mark.parametrize(
    ("value", "sent"), [("1", False), ("on", False), ("Yes", False), ("TRUE", False), ("0", True), ("", True)]
)
def test_the_token_is_sent_unless_the_environment_says_otherwise(
    value: str, sent: bool, server: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.add(REPO, FILES)
    for name, text in (
        ("HF_ENDPOINT", server.address()),
        ("HF_TOKEN", "hf_x"),
        ("HF_HUB_DISABLE_IMPLICIT_TOKEN", value),
    ):
        monkeypatch.setenv(name, text)
    with Hub.connect(print) as hub:
        hub.commit(REPO, None)
    assert [request.headers.get("Authorization") for request in server.log] == (["Bearer hf_x"] if sent else [None])


@pytest.mark.parametrize("field", ["downloads", "total"])
def test_a_number_of_a_search_is_at_most_a_quadrillion(field: str) -> None:
    def found(number: int) -> int | None:
        item = {"id": "org/a", "downloads": 0, "safetensors": {"total": 0}}
        (item if field == "downloads" else item["safetensors"])[field] = number  # type: ignore[index]
        hub: Any = SimpleNamespace(list_models=lambda query: [Fields(item, "hub")])
        (result,) = search_models(hub, "a", 9)
        return result.downloads if field == "downloads" else result.parameters

    assert found(1 << 50) == 1 << 50
    for number in ((1 << 50) + 1, -1):
        with pytest.raises(ModelError, match=field):
            found(number)
