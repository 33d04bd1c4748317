"""Test that x-mycli-cache and the log say where and why a prompt misses the cache, without other clients' text."""

import json

from tests.support.served import Served

SYSTEM = "The secret word is xylophone. Today is 2026-11-24."


def body(system: str, question: str = "Hi") -> dict[str, object]:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
    return {"messages": messages, "max_tokens": 2, "temperature": 0}


def test_a_request_learns_why_it_missed(served: Served) -> None:
    path, header = "/v1/chat/completions", {"x-mycli-cache": "why"}
    served.ask("POST", path, body(SYSTEM))
    answer = served.ask("POST", path, body(SYSTEM.replace("-24", "-25")), header)
    found = json.loads(answer.headers["x-mycli-cache"])
    assert found["causes"] == ["a date, time or number in the system prompt changed"]
    assert found["before"].endswith("2026-11-2") and found["later"].startswith("5.") and "earlier" not in found
    assert found["shared_tokens"] < found["second_tokens"] and not found["continues"]
    assert "x-mycli-cache" not in served.ask("POST", path, body(SYSTEM)).headers
    same = json.loads(served.ask("POST", path, body(SYSTEM), header).headers["x-mycli-cache"])
    assert same["continues"] and same["causes"] == []


def test_the_text_of_another_request_is_not_told(served: Served) -> None:
    served.ask("POST", "/v1/chat/completions", body("The secret word is xylophone."))
    answer = served.ask("POST", "/v1/chat/completions", body("The secret word is a"), {"x-mycli-cache": "why"})
    assert "xylo" not in answer.headers["x-mycli-cache"]


def test_the_log_has_the_place_and_the_cause_and_no_text(served: Served) -> None:
    served.log.clear()
    served.ask("POST", "/v1/chat/completions", body(SYSTEM))
    served.ask("POST", "/v1/chat/completions", body(SYSTEM.replace("-24", "-26")))
    assert "cache missed at token" in served.log_line("a date, time or number")
    assert "xylophone" not in "".join(served.log)
