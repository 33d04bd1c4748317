"""Test calibration windows: their sources and number, reproducible by seed, never from evaluation data."""

import json
import shutil
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from mycli.quant.calibration import sampler as calibration
from mycli.quant.calibration.sampler import Calibration, _windows
from mycli.quant.evaluate import held_out_text
from mycli.runtime.errors import ModelError, NotFoundError, UsageError
from mycli.runtime.tokenizer.chat_template import Message
from mycli.runtime.tokenizer.tokenizer import Tokenizer
from tests.support.paths import PICO, ROOT

VOCABULARY = 4096
WIKITEXT = ROOT.parent / "shared" / "data" / "wikitext-2"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(PICO, VOCABULARY)


@pytest.fixture(scope="module")
def mixed(tokenizer: Tokenizer) -> Calibration:
    return calibration.bundled(tokenizer, VOCABULARY, 30, 256, seed=0)


def test_windows_are_whole_and_of_all_kinds(tokenizer: Tokenizer, mixed: Calibration) -> None:
    assert mixed.windows.shape == (30, 256) and mixed.tokens == 7680
    assert mixed.mix == {"prose": 8, "conversations": 8, "code": 8, "languages": 4, "random": 2}
    assert (mixed.windows[::2, 0] == tokenizer.bos).all() and (mixed.windows[1::2, 0] != tokenizer.bos).all()
    turns = tokenizer.encode("<|im_start|>user\n", add_special=False, allow_special=True)
    opened = mixed.windows.unfold(1, len(turns), 1).eq(torch.tensor(turns)).all(-1).any(-1)
    assert 6 <= int(opened.sum()) <= 8, "conversations go through the model's own template"
    assert len(mixed.windows.unique()) > 500


def test_shares_of_few_windows_are_rounded_up_by_the_largest_remainder(tokenizer: Tokenizer) -> None:
    few = calibration.bundled(tokenizer, VOCABULARY, 7, 64, seed=0)
    assert few.mix == {"prose": 2, "conversations": 2, "code": 2, "languages": 1} and len(few.windows) == 7


def test_users_and_assistants_take_turns() -> None:
    dialogues = islice(calibration._dialogues(torch.Generator()), 60)  # all that are bundled, with passages of prose
    roles = {tuple(message.role for message in dialogue.messages) for dialogue in dialogues}
    assert roles == {("user", "assistant"), ("user", "assistant", "user", "assistant")}


def test_every_second_conversation_is_followed_by_a_passage_of_prose() -> None:
    written = len(json.loads(calibration._bundled("conversations.json")))
    every = islice(calibration._dialogues(torch.Generator()), written + (written + 1) // 2)
    passages = [part for part in every if part.messages[0].content.startswith("Continue this text:")]
    assert len(passages) == (written + 1) // 2


@pytest.mark.usefixtures("short_calibration_text")
def test_a_text_of_the_user_replaces_the_bundled_ones(tmp_path: Path, tokenizer: Tokenizer) -> None:
    (tmp_path / "text.txt").write_text(" ".join(str(number) for number in range(400)))
    mixes = [calibration.calibrate(text, tokenizer, VOCABULARY, 4, 64, 0).mix for text in (tmp_path / "text.txt", None)]
    assert mixes[0] == {"file": 4} and "prose" in mixes[1]


def test_a_seed_is_a_calibration(tokenizer: Tokenizer, mixed: Calibration) -> None:
    again, other = (calibration.bundled(tokenizer, VOCABULARY, 30, 256, seed) for seed in (0, 1))
    assert torch.equal(mixed.windows, again.windows) and mixed.sha256 == again.sha256
    assert not torch.equal(mixed.windows, other.windows) and mixed.sha256 != other.sha256


def with_template(folder: Path, template: str) -> Tokenizer:
    """Load pico's tokenizer with another chat template, from `folder`."""
    shutil.copy(PICO / "tokenizer.json", folder)
    settings = json.loads((PICO / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": template}))
    return Tokenizer.load(folder, VOCABULARY)


@pytest.mark.usefixtures("short_calibration_text")
def test_a_template_with_tools_shows_calls_and_reasoning(tmp_path: Path) -> None:
    template = "{{ tools }}{% for m in messages %}{{ m.reasoning_content }}<tool_call>{{ m.tool_calls }}{% endfor %}"
    tools = with_template(tmp_path, template)
    drawn = calibration.bundled(tools, VOCABULARY, 30, 64, seed=0)
    assert drawn.mix == {"prose": 6, "conversations": 6, "calls": 4, "code": 8, "languages": 4, "random": 2}
    ids = calibration._conversations(tools, calibration._calls(torch.Generator()), 9000)
    text = tools.decode(ids.tolist())
    assert "'name': 'read_file', 'arguments': {'path'" in text and "I do not know the code yet." in text
    refusing = template + "{% if tools %}{{ raise_exception('no tools') }}{% endif %}"
    assert "calls" not in calibration.bundled(with_template(tmp_path, refusing), VOCABULARY, 30, 64, seed=0).mix


def test_without_a_template_there_are_no_conversations(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((PICO / "tokenizer.json").read_bytes())
    plain = Tokenizer.load(tmp_path, VOCABULARY)
    windows = calibration.bundled(plain, VOCABULARY, 15, 32, seed=0)
    assert windows.mix == {"prose": 8, "code": 4, "languages": 2, "random": 1}


@pytest.mark.usefixtures("short_calibration_text")
def test_a_template_that_fails_is_as_none(tmp_path: Path) -> None:
    drawn = calibration.bundled(with_template(tmp_path, "{{ raise_exception('no') }}"), VOCABULARY, 15, 32, seed=0)
    assert drawn.mix == {"prose": 8, "code": 4, "languages": 2, "random": 1}


def stretches(text: str, length: int = 60) -> set[str]:
    words = " ".join(text.split())
    return {words[start : start + length] for start in range(0, len(words) - length, length)}


def package_text() -> str:
    folder = ROOT / "quant" / "calibration_text"
    return " ".join(" ".join((folder / f"{name}.txt").read_text("utf-8").split()) for name in ("prose", "code"))


def test_nothing_that_is_measured_is_calibrated_on() -> None:
    text = package_text()
    shared = [piece for piece in stretches(held_out_text()) if piece in text]
    assert len(shared) <= 1, f"{shared}: the held-out text repeats a heading at most"


@pytest.mark.skipif(not WIKITEXT.exists(), reason="needs the shared data")
def test_no_wikitext() -> None:
    text = package_text()
    for path in WIKITEXT.glob("*.txt"):
        content = path.read_text("utf-8", errors="replace")
        assert not any(piece in text for piece in stretches(content[:300_000]))


def test_a_file_is_cut_evenly_and_never_twice(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = tmp_path / "text.txt"
    path.write_text(" ".join(str(number) for number in range(2000)))
    ids = tokenizer.encode(path.read_text(), add_special=False)
    few = calibration.from_file(path, tokenizer, 4, 128, seed=0)
    assert few.windows.shape == (4, 128) and few.mix == {"file": 4}
    many = calibration.from_file(path, tokenizer, 10_000, 128, seed=0)
    assert len(many.windows) == len(ids) // 128
    plain = sorted(window.tolist() for window in many.windows[1::2])
    for window in plain:
        assert any(ids[start : start + 128] == window for start in range(len(ids)))


@example(length=10, count=2, seq=8, seed=0)
@given(length=st.integers(1, 200), count=st.integers(0, 12), seq=st.integers(1, 40), seed=st.integers(0, 9))
def test_windows_overlap_only_where_the_text_is_too_short_and_are_spread_evenly_there(
    length: int, count: int, seq: int, seed: int
) -> None:
    windows = _windows(torch.arange(length), count, seq, torch.Generator().manual_seed(seed))
    assert windows.shape == (count, seq)
    starts = [int(window[0]) for window in windows]
    assert windows.tolist() == [[(start + at) % length for at in range(seq)] for start in starts]
    steps = [after - before for before, after in pairwise(starts)]
    if count * seq <= length:
        assert all(step >= seq for step in steps)
    elif count > 1:
        assert starts[0] == 0 and starts[-1] == max(length, -(-seq // length) * length) - seq
        assert max(steps) - min(steps) <= 1


def test_rows_are_read_until_they_suffice_and_conversations_are_written_by_the_template(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    path, talk = tmp_path / "rows.jsonl", [Message("user", "Hello"), Message("assistant", "Good morning")]
    row = json.dumps({"messages": [{"role": turn.role, "content": turn.content} for turn in talk]})
    path.write_text((row + "\n") * 200 + "not read any more")
    written = tokenizer.apply_chat_template(talk, add_generation_prompt=False)
    found = calibration.from_file(path, tokenizer, 4, 64, seed=0)
    ids = written * 200
    assert found.windows.shape == (4, 64) and len(ids) > 4 * 4 * 64
    for window in found.windows[1::2].tolist():
        assert any(ids[start : start + 64] == window for start in range(len(written)))
    # Windows come from four times as many tokens as they have.
    path.write_text((row + "\n") * (3 * 4 * 64 // len(written)) + "read")
    with pytest.raises(UsageError, match="rows.jsonl"):
        calibration.from_file(path, tokenizer, 4, 64, seed=0)


@pytest.mark.parametrize("content", ["", "One sentence."], ids=["E4-empty", "E4-short"])
def test_a_file_with_too_little_is_refused(tmp_path: Path, tokenizer: Tokenizer, content: str) -> None:
    path = tmp_path / "text.txt"
    path.write_text(content)
    with pytest.raises(UsageError, match="tokens; calibration needs 512"):
        calibration.from_file(path, tokenizer, 4, 512, seed=0)
    with pytest.raises(NotFoundError, match="none.txt"):
        calibration.from_file(tmp_path / "none.txt", tokenizer, 4, 512, seed=0)


@pytest.mark.parametrize(
    ("samples", "seq", "message"),
    [
        (1, 128, "fewer than 256"),
        (0, 512, "fewer than 256"),
        (8, 1, "windows of 1 tokens"),
        (8, 4096, "2 to 2048"),
    ],
    ids=["E4-one-sample", "E4-none", "E4-one-token", "E4-longer-than-the-context"],
)
def test_numbers_that_give_no_calibration_are_refused(samples: int, seq: int, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        calibration.check_windows(samples, seq, 2048)


@pytest.mark.parametrize(("samples", "seq"), [(1, 2048), (128, 2)])
def test_the_longest_and_the_shortest_windows_are_possible(samples: int, seq: int) -> None:
    calibration.check_windows(samples, seq, 2048)


def test_a_file_is_used_to_its_last_token(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = tmp_path / "text.txt"
    path.write_text(" ".join(str(number) for number in range(100)))
    ids = tokenizer.encode(path.read_text(), add_special=False)
    whole = calibration.from_file(path, tokenizer, 4, len(ids), seed=0)
    assert whole.windows.tolist() == [[tokenizer.bos, *ids[:-1]]] and len(ids) > 256
    with pytest.raises(UsageError, match=f"has {len(ids)} tokens; calibration needs {len(ids) + 1}"):
        calibration.from_file(path, tokenizer, 4, len(ids) + 1, seed=0)
    path.write_text(" ".join(str(number) for number in range(40)))
    with pytest.raises(UsageError, match="tokens; calibration needs 256"):
        calibration.from_file(path, tokenizer, 4, 32, seed=0)


def test_a_busy_machine_changes_no_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """A template that timed out is retried; one that fails is not."""
    tokenizer = Tokenizer.load(PICO, 4096)
    expected = calibration.bundled(tokenizer, 4096, 8, 64, 0)
    chat, late = Tokenizer.apply_chat_template, [0]

    def slow(self: Tokenizer, *arguments: Any, **options: Any) -> list[int]:
        late[0] += 1
        if late[0] % 3:
            raise ModelError("chat template: Deadline: took more than 2 s", "")
        return chat(self, *arguments, **options)

    monkeypatch.setattr(Tokenizer, "apply_chat_template", slow)
    assert calibration.bundled(tokenizer, 4096, 8, 64, 0).sha256 == expected.sha256
    assert late[0] > 3
