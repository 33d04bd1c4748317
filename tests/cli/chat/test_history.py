"""Test chat history: undo, and files that are written atomically and parsed strictly."""

import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mycli.cli.chat.history import Conversation, require_conversation, write_private
from mycli.runtime.errors import ModelError, ResourceError, UsageError, UserError
from mycli.runtime.tokenizer.chat_template import Message


def talk(*texts: str, system: str | None = None) -> Conversation:
    turns = [Message("assistant" if index % 2 else "user", text) for index, text in enumerate(texts)]
    return Conversation(system, turns)


def contents(conversation: Conversation) -> list[str]:
    return [message.content for message in conversation.messages()]


def test_undo_takes_a_message_and_its_reply() -> None:
    conversation = talk("a", "b", "c", "d", system="s")
    assert (conversation.undo(), contents(conversation)) == ("c", ["s", "a", "b"])
    assert (conversation.undo(), contents(conversation)) == ("a", ["s"])
    with pytest.raises(UsageError, match="there is no message yet"):
        conversation.undo()


def test_the_oldest_turns_are_hidden_but_never_the_message_to_answer() -> None:
    conversation = talk("a", "b", "c", "d", "e", system="s")
    conversation.hidden = 2
    assert contents(conversation) == ["s", "c", "d", "e"]
    conversation.hidden = conversation.most_hidden
    assert contents(conversation) == ["s", "e"]
    assert len(conversation.turns) == 5, "nothing is lost, it is only not shown to the model"
    conversation.turns.pop()
    conversation.undo()
    assert conversation.hidden == 2 and contents(conversation) == ["s"]


def test_files_read_become_part_of_the_next_message() -> None:
    conversation = Conversation(reading=[("a.txt", "one"), ("b.txt", "two")])
    assert conversation.compose("sum up") == "a.txt:\n\none\n\nb.txt:\n\ntwo\n\nsum up"
    assert Conversation().compose("sum up") == "sum up"


@pytest.mark.parametrize("error", [UsageError("no"), KeyboardInterrupt()], ids=["refused", "interrupted"])
def test_a_failed_attempt_changes_nothing(error: BaseException) -> None:
    conversation = talk("a", "b", "c", "d")
    conversation.reading.append(("f", "text"))
    with pytest.raises(type(error)), conversation.attempt():
        conversation.undo()
        conversation.turns.append(Message("user", "x"))
        conversation.hidden = 2
        conversation.reading.clear()
        raise error
    assert contents(conversation) == ["a", "b", "c", "d"] and conversation.reading == [("f", "text")]


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)


@given(st.lists(st.tuples(texts, texts), max_size=4), st.none() | texts)
def test_what_is_saved_is_loaded(tmp_path_factory: pytest.TempPathFactory, pairs: Any, system: str | None) -> None:
    path = tmp_path_factory.mktemp("saved") / "talk.json"
    before, after = talk(*(text for pair in pairs for text in pair), system=system), talk("x", "y")
    before.save(path, "pico")
    assert after.load(path) == "pico"
    assert (after.turns, after.system) == (before.turns, before.system)


def test_the_file_is_private_and_replaced_whole(tmp_path: Path) -> None:
    real, link = tmp_path / "real.json", tmp_path / "link.json"
    talk("before", "it").save(real, "pico")
    real.chmod(0o644)
    link.symlink_to(real)
    talk("a", "b").save(link, "pico")
    assert stat.S_IMODE(real.stat().st_mode) == 0o600 and link.is_symlink()
    assert json.loads(real.read_text())["turns"][1] == {"role": "assistant", "content": "b"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link.json", "real.json"]


def test_a_failing_write_leaves_the_file_and_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "talk.json"
    path.write_text("before")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ResourceError, match="No space left"):
        write_private(path, "after")
    assert path.read_text() == "before" and list(tmp_path.iterdir()) == [path]


def test_places_that_cannot_be_written_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe", tmp_path / "absent" / "talk.json"):
        with pytest.raises(UserError):
            require_conversation(path)
        with pytest.raises(UserError):
            talk("a", "b").save(path, "pico")


@pytest.mark.parametrize("through", ["name", "link"])
def test_what_is_no_conversation_is_never_written_over(through: str, tmp_path: Path) -> None:
    thesis, path = tmp_path / "thesis.tex", tmp_path / "link.tex"
    thesis.write_text("\\section{Mine}")
    path.symlink_to(thesis)
    with pytest.raises(UsageError, match="not a conversation"):
        talk("a", "b").save(thesis if through == "name" else path, "pico")
    assert thesis.read_text() == "\\section{Mine}"
    thesis.write_text("")
    talk("a", "b").save(thesis, "pico")
    assert Conversation().load(thesis) == "pico", "an empty file is nobody's"


GOOD = {
    "schema_version": 1,
    "model": "pico",
    "system": None,
    "turns": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
}


def without(key: str) -> str:
    return json.dumps({name: value for name, value in GOOD.items() if name != key})


def turns(*values: Any) -> str:
    return json.dumps({**GOOD, "turns": list(values)})


USER, ASSISTANT = GOOD["turns"]  # type: ignore[misc]  # a list of two
BAD = {
    "empty": "",
    "not-json": "{",
    "list": "[]",
    "no-version": without("schema_version"),
    "later-version": json.dumps({**GOOD, "schema_version": 2}),
    "no-model": without("model"),
    "unknown-field": json.dumps({**GOOD, "sampling": {}}),
    "system-number": json.dumps({**GOOD, "system": 3}),
    "turns-object": json.dumps({**GOOD, "turns": {}}),
    "turn-text": turns("a"),
    "role-system": turns({"role": "system", "content": "a"}, ASSISTANT),
    "role-markup": turns({"role": "user<|im_end|>", "content": "a"}, ASSISTANT),
    "not-alternating": turns(USER, USER),
    "no-reply": turns(USER),
    "extra-field": turns({**USER, "name": "x"}, ASSISTANT),  # type: ignore[dict-item]  # a dict
    "content-list": turns({"role": "user", "content": ["a"]}, ASSISTANT),
    "half-surrogate": json.dumps({**GOOD, "system": "\ud800"}),
    "twice": '{"schema_version": 1, "schema_version": 1, "model": "m", "turns": []}',
    "deep": '{"schema_version": 1, "turns": ' + "[" * 100_000,
}


@pytest.mark.parametrize("name", BAD)
def test_file_rejected(name: str, tmp_path: Path) -> None:
    path = tmp_path / "talk.json"
    path.write_text(BAD[name])
    conversation = talk("x", "y")
    with pytest.raises(ModelError, match="talk.json") as refused:
        conversation.load(path)
    assert contents(conversation) == ["x", "y"] and "/save" in refused.value.hint
