"""Test llama.cpp's list of slots."""

import dataclasses

import pytest

from tests.support.served import Served


def test_slots_show_how_many_replies_run(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    served.idle()
    slots = served.ask("GET", "/slots").json
    assert [slot["id"] for slot in slots] == list(range(8)) and {slot["n_ctx"] for slot in slots} == {512}
    assert not any(slot["is_processing"] for slot in slots)
    assert served.ask("GET", "/slots?fail_on_no_slot=1").status == 200
    worker = served.service.worker
    for running in (3, 8):
        monkeypatch.setattr(worker, "stats", dataclasses.replace(worker.stats, running=running))
        assert sum(slot["is_processing"] for slot in served.ask("GET", "/slots").json) == running
    full = served.ask("GET", "/slots?fail_on_no_slot=1")
    assert full.status == 503 and "no slot available" in full.error["message"]
