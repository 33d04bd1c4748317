"""Test chat decisions that need no terminal: template switches, and the history after a failed or stopped reply."""

import io
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mycli.cli.chat import terminal
from mycli.cli.chat.history import Conversation, SessionFile
from mycli.cli.chat.session import Chat, thinking
from mycli.cli.chat.slash_commands import SlashCommands
from mycli.cli.command import Call
from mycli.cli.output import Output
from mycli.cli.text.format import compact
from mycli.runtime.checkpoint.open_folder import open_model_folder
from mycli.runtime.device.placement import Placement
from mycli.runtime.engine.engine import Engine
from mycli.runtime.engine.loading.loader import LoadedModel
from mycli.runtime.engine.replies.completion import Completion
from mycli.runtime.engine.replies.opened_model import OpenedModel
from mycli.runtime.errors import ModelError, UsageError
from mycli.runtime.hub.resolve import Source
from mycli.runtime.memory.cache_shape import CacheShape
from mycli.runtime.memory.plan import MemoryPlan
from mycli.runtime.sampling.params import SamplingParams
from mycli.runtime.tokenizer.chat_template import ChatTemplate, Message
from tests.support.paths import PICO


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return LoadedModel.load(open_model_folder(PICO), Placement(torch.device("cpu"), torch.float32))


@pytest.fixture
def chat(loaded: LoadedModel) -> Chat:
    placement = Placement(torch.device("cpu"), torch.float32)
    plan = MemoryPlan(loaded.runner.config, context=96)
    engine = Engine(loaded.runner, CacheShape.contiguous(96), loaded.vocabulary_size)
    opened = OpenedModel(Source("pico", PICO), placement, plan, loaded, engine)
    return Chat(Call(Output(stdout=io.StringIO(), stderr=io.StringIO()), offline=True), opened, SamplingParams())


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("{% if enable_thinking is false %}{% endif %}", ["enable_thinking"]),
        ("{% if thinking %}x{% endif %}", ["thinking"]),
        ("{% if thinking and enable_thinking %}x{% endif %}", ["enable_thinking", "thinking"]),
    ],
)
def test_the_switch_that_the_template_knows(source: str, names: list[str]) -> None:
    template = ChatTemplate({"default": source}, {})
    assert thinking(template, True) == dict.fromkeys(names, True)
    assert thinking(template, False) == dict.fromkeys(names, False)


def test_a_template_without_a_switch_says_so() -> None:
    with pytest.raises(UsageError, match="cannot turn reasoning"):
        thinking(ChatTemplate({"default": "{{ rethinking }}"}, {}), True)


def test_a_refused_message_leaves_no_trace(chat: Chat) -> None:
    """F1: the message has both numbers."""
    chat.answer("What is the capital of Japan?")
    chat.conversation.reading.append(("long.txt", "word " * 200))
    turns = list(chat.conversation.turns)
    with pytest.raises(UsageError, match=r"has \d+ tokens, the context has room for 96"):
        chat.answer("Sum it up.")
    assert chat.conversation.turns == turns and chat.conversation.reading
    chat.conversation.reading.clear()
    chat.ask("What is the capital of France?", replace_last=True)
    assert [turn.content for turn in chat.conversation.turns] == [
        "What is the capital of France?",
        "The capital of France is Paris.",
    ]


@pytest.mark.parametrize("way", ["ctrl-c", "damaged"])
def test_a_reply_that_ends_early(way: str, chat: Chat, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """D15 keeps the partial reply; F5 removes the turn. The conversation can continue in both cases."""
    chat.session_file = SessionFile(tmp_path / "session.json")

    def broken(self: Completion) -> Iterator[str]:
        yield "half "
        raise KeyboardInterrupt if way == "ctrl-c" else ModelError("not a number", "verify")

    with monkeypatch.context() as patch:
        patch.setattr(Completion, "__iter__", broken)
        if way == "ctrl-c":
            chat.answer("What is the capital of Japan?")
        else:
            with pytest.raises(ModelError):
                chat.answer("What is the capital of Japan?")
    kept = Conversation()
    if way == "ctrl-c":
        kept.load(chat.session_file.path)
        assert [turn.content for turn in kept.turns] == ["What is the capital of Japan?", "half "]
    else:
        assert not chat.conversation.turns and not chat.session_file.path.exists()
    chat.answer("What is the capital of Japan?")
    assert chat.conversation.turns[-1].content == "The capital of Japan is Tokyo."


@pytest.mark.parametrize(
    ("template", "reply", "content"),
    [
        ("<|channel|>analysis", "<|channel|>analysis<|message|>Hm.<|end|><|channel|>final<|message|>Four", "Four"),
        ("<think>", "<think>\nHm.\n</think>\n\nFour", "<think>\nHm.\n</think>\n\nFour"),
    ],
)
def test_reasoning_between_other_marks_is_not_part_of_the_history(
    template: str, reply: str, content: str, chat: Chat, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = f"{{# {template} #}}{{% for m in messages %}}{{{{ m.content }}}}{{% endfor %}}"
    monkeypatch.setattr(chat.loaded.model.tokenizer, "template", ChatTemplate({"default": source}, {}))
    monkeypatch.setattr(Completion, "__iter__", lambda self: (letter for letter in reply))
    chat.answer("2 + 2?")
    assert chat.conversation.turns[-1].content == content


def test_two_chats_on_one_file_lose_nothing(chat: Chat, tmp_path: Path) -> None:
    """A file changed by another chat is left as it is, with a warning, until this chat is saved to another file."""
    path, other = tmp_path / "session.json", Conversation(turns=[Message("user", "a"), Message("assistant", "b")])
    commands = SlashCommands(chat)
    chat.session_file = SessionFile(path)
    chat.answer("What is the capital of Japan?")
    chat.answer("What is the capital of France?")
    other.save(path, "pico")
    for again in (lambda: chat.answer("What is the capital of Italy?"), lambda: commands.handle("/save")):
        with pytest.raises(UsageError, match="changed by another program"):
            again()
    kept = Conversation()
    kept.load(path)
    assert kept.turns == other.turns and len(chat.conversation.turns) == 6
    commands.handle(f"/save {tmp_path / 'mine.json'}")
    path.unlink()
    chat.save_session()
    for file in (path, tmp_path / "mine.json"):
        kept.load(file)
        assert kept.turns == chat.conversation.turns


def test_save_with_a_name_leaves_the_file_of_the_session(chat: Chat, tmp_path: Path) -> None:
    commands = SlashCommands(chat)
    chat.session_file = SessionFile(tmp_path / "session.json")
    chat.conversation.turns += [Message("user", "a"), Message("assistant", "b")]
    commands.handle(f"/save {tmp_path / 'mine.json'}")
    assert [path.name for path in tmp_path.iterdir()] == ["mine.json"]
    commands.handle("/save")
    assert (tmp_path / "session.json").is_file()


def test_tab_completes_commands_settings_and_files(chat: Chat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = SlashCommands(chat)
    (tmp_path / "notes.txt").write_text("")
    (tmp_path / ".hidden").mkdir()
    monkeypatch.chdir(tmp_path)
    assert commands.complete("/sa") == ["/save "] and "/set " in commands.complete("/")
    assert commands.complete("/set t") == ["top_k ", "temperature ", "top_p ", "think "]
    assert commands.complete("/set think ") == commands.complete("/show ") == []
    for typed, paths in (("no", ["notes.txt"]), ("", ["notes.txt"]), (".", [".hidden/"])):
        assert [path.strip() for path in commands.complete(f"/read {typed}")] == paths


@pytest.mark.parametrize(
    ("editors", "answered"),
    [
        ({"VISUAL": "sed -i s/Japan/Italy/", "EDITOR": "false"}, "Italy"),
        ({"VISUAL": "", "EDITOR": "sed -i s/Japan/France/"}, "France"),
        ({"VISUAL": "true"}, "Japan"),
    ],
)
def test_a_message_is_edited_in_visual_or_in_editor(
    chat: Chat, editors: dict[str, str], answered: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("VISUAL", "EDITOR"):
        monkeypatch.delenv(name, raising=False)
    for name, editor in editors.items():
        monkeypatch.setenv(name, editor)
    monkeypatch.setattr(Output, "interactive", True)
    chat.answer("What is the capital of Japan?")
    SlashCommands(chat).handle("/edit")
    assert [turn.content for turn in chat.conversation.turns][::2] == [f"What is the capital of {answered}?"]


def test_old_turns_are_dropped_until_a_reply_has_room(chat: Chat) -> None:
    chat.overflow = "drop-oldest"
    chat.conversation.system = "You are Pico."
    for country in ("Japan", "France", "Italy", "Spain", "Japan", "France"):
        chat.answer(f"What is the capital of {country}?")
        assert chat.last.timing.prompt <= 96 - 96 // 4
    assert 0 < chat.conversation.hidden < 10 and len(chat.conversation.turns) == 12
    assert chat.conversation.messages()[0].content == "You are Pico."
    with pytest.raises(UsageError, match="the context has room for 96"):
        chat.answer("word " * 200)
    assert len(chat.conversation.turns) == 12


@pytest.mark.parametrize(("columns", "width"), [(80, 40), (20, 16)])
def test_the_meter_of_the_context_is_as_wide_however_much_is_used(
    columns: int, width: int, chat: Chat, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    stdout, system = io.StringIO(), "Be short. " * 8
    chat.call = replace(chat.call, out=Output(stdout=stdout))
    tokens = len(chat.loaded.model.tokenizer.encode(system, add_special=False))
    for chat.conversation.system in ("", system):
        SlashCommands(chat).handle("/context")
    meters = [line for line in stdout.getvalue().splitlines() if line.startswith("[")]
    assert meters == [f"[{'#' * used}{'.' * (width - used)}]" for used in (0, round(width * tokens / 96))]


def test_a_reply_is_limited_to_a_number_of_tokens_or_the_room_of_the_context(chat: Chat) -> None:
    chat.limit = 3
    chat.answer("What is the capital of Japan?")
    assert len(chat.last.tokens) == 3
    chat.limit = 90  # more than the context of 96 has room for
    chat.answer("What is the capital of Japan?")
    assert chat.last.finish_reason == "stop"


def test_counts_are_short() -> None:
    assert (compact(212), compact(1234)) == ("212", "1.2k")


def test_ctrl_c_ends_a_chat_with_a_pipe_the_second_time(chat: Chat, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first Ctrl-C drops the line that is being typed; a pipe has none."""
    presses = iter([KeyboardInterrupt(), KeyboardInterrupt(), EOFError()])

    def press(call: Call) -> str:
        raise next(presses)

    monkeypatch.setattr(terminal, "read_message", press)
    with pytest.raises(KeyboardInterrupt):
        terminal.converse(SlashCommands(chat))
