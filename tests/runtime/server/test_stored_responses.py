"""Test that stored responses can be read, listed and deleted by their id."""

from typing import Any

import openai
import pytest

from mycli.runtime.engine.loading.loader import LoadedModel
from mycli.runtime.server.requests.item_store import ItemStore
from tests.runtime.server.conftest import Scripted
from tests.support.served import Served

TEXT = "Tokyo it is."


def ask(served: Served, **fields: Any) -> Any:
    return served.ask("POST", "/v1/responses", {"input": "Where?", **fields})


def test_a_stored_response_is_returned_as_it_was_sent(scripted: Scripted) -> None:
    with scripted(TEXT) as served:
        whole = ask(served).json
        answer = served.ask("GET", f"/v1/responses/{whole['id']}")
        assert answer.status == 200 and answer.json == whole and whole["output"][0]["content"][0]["text"] == TEXT
        streamed = ask(served, stream=True).events[-1]["response"]
        assert served.ask("GET", f"/v1/responses/{streamed['id']}").json == streamed
        assert streamed["status"] == "completed" and streamed["usage"]["output_tokens"] > 0
        assert served.ask("GET", f"/v1/responses/{whole['id']}?stream=true").error["param"] == "stream"


@pytest.mark.parametrize("method, end", [("GET", ""), ("DELETE", ""), ("GET", "/input_items")])
def test_what_is_not_stored_is_not_found(scripted: Scripted, method: str, end: str) -> None:
    with scripted(TEXT) as served:
        private = ask(served, store=False).json["id"]
        deleted = ask(served).json["id"]
        body = {"id": deleted, "object": "response", "deleted": True}
        assert served.ask("DELETE", f"/v1/responses/{deleted}").json == body
        for name in (private, deleted, "resp_0", ask(served).json["output"][0]["id"]):
            answer = served.ask(method, f"/v1/responses/{name}{end}")
            assert (answer.status, answer.error["code"]) == (404, "response_not_found"), name


def test_nothing_continues_a_deleted_response(scripted: Scripted) -> None:
    with scripted(TEXT) as served:
        first = ask(served).json
        second = ask(served, previous_response_id=first["id"]).json["id"]
        served.ask("DELETE", f"/v1/responses/{first['id']}")
        assert ask(served, previous_response_id=first["id"]).error["code"] == "previous_response_not_found"
        assert ask(served, input=[{"type": "item_reference", "id": first["output"][0]["id"]}]).status == 404
        assert ask(served, previous_response_id=second).status == 200, "it has the whole conversation"


def test_input_items_are_listed_in_pages(scripted: Scripted, reasoning: LoadedModel) -> None:
    call = {"type": "function_call_output", "call_id": "c", "output": "sunny", "id": "fco_1"}
    asked = [{"role": "user", "content": "Sure?"}, call, {"role": "assistant", "content": "Yes"}]
    with scripted(TEXT, model=reasoning) as served:
        first = ask(served)
        name = ask(served, input=asked, previous_response_id=first.json["id"]).json["id"]
        with openai.OpenAI(base_url=f"{served.url}/v1", api_key="any", max_retries=0) as client:
            pages = list(client.responses.input_items.list(name, order="asc", limit=2).iter_pages())
            listed = [item for page in pages for item in page.data]
            assert [len(page.data) for page in pages] == [2, 2, 1] and len({item.id for item in listed}) == 5
            items: list[Any] = [item.to_dict() for item in listed]
            newest: list[Any] = [item.to_dict() for item in client.responses.input_items.list(name)]
            with pytest.raises(openai.BadRequestError, match="no item 'x'"):
                client.responses.input_items.list(name, after="x")
        assert newest == items[::-1] and items[1] == first.json["output"][0] and items[3] == call
        texts = [item["content"][0] for item in items if item["type"] == "message"]
        assert [part["text"] for part in texts] == ["Where?", TEXT, "Sure?", "Yes"]
        assert [part["type"] for part in texts] == ["input_text", "output_text", "input_text", "output_text"]


@pytest.mark.parametrize("query", ["limit=0", "limit=101", "limit=0100", "limit=x", "limit=-1", "order=up"])
def test_a_wrong_page_is_refused(scripted: Scripted, query: str) -> None:
    with scripted(TEXT) as served:
        answer = served.ask("GET", f"/v1/responses/{ask(served).json['id']}/input_items?{query}")
        assert answer.status == 400 and answer.error["param"] == query.partition("=")[0]


def test_a_deleted_item_leaves_its_room() -> None:
    store, item = ItemStore(200), {"id": "b", "text": "x" * 100}
    store.keep([{**item, "id": "a"}])
    store.remove("a")
    store.remove("a")
    store.keep([item])
    assert store.find("a") is None and store.find("b") == item
    store.keep([{**item, "id": "c"}])
    assert store.find("b") is None and store.find("c") is not None
