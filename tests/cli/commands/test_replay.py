"""Test `mycli run --receipt` and `mycli replay`: the same tokens, or exit 6 at the first one that differs."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from mycli.runtime.diagnostics.receipt import Receipt
from tests.support.command_line import Mycli
from tests.support.paths import PICO

CPU = ("--device", "cpu")
THINKS = "{% for message in messages %}{{ message.content }}\n{% endfor %}<think>\n{# closed by </think> #}"


@pytest.fixture
def receipt(mycli: Mycli, tmp_path: Path) -> Path:
    copy, path = shutil.copytree(PICO, tmp_path / "copy"), tmp_path / "r.json"
    done = mycli("run", str(copy), "Tell me a story.", "-t", "0.9", "-n", "12", "--receipt", str(path), *CPU)
    assert done.returncode == 0, done.stderr
    return path


def test_a_sampled_reply_is_made_again(receipt: Path, mycli: Mycli) -> None:
    recorded = Receipt.read(receipt)
    assert len(recorded.tokens) == 12 and recorded.sampling.seed is not None and recorded.limit == 12
    done = mycli("replay", str(receipt))
    assert done.returncode == 0 and "tokens   12 of 12 are the same" in done.stdout, done.stderr
    assert "program  the same" in done.stdout
    answer = json.loads(mycli("replay", str(receipt), "--json").stdout)
    assert (answer["same"], answer["tokens"], answer["program_changes"]) == (True, 12, [])


def test_a_missing_receipt_is_no_missing_model(mycli: Mycli, tmp_path: Path) -> None:
    done = mycli("replay", str(tmp_path / "missing.json"))
    assert done.returncode == 4 and "missing.json: no such file" in done.stderr
    assert "check the path" in done.stderr and "mycli pull" not in done.stderr


def test_a_flipped_bit_in_a_weight_is_found(receipt: Path, mycli: Mycli) -> None:
    weights = receipt.parent / "copy" / "model.safetensors"
    weights.chmod(0o644)
    data = bytearray(weights.read_bytes())
    data[len(data) // 2] ^= 1
    weights.write_bytes(data)
    done = mycli("replay", str(receipt))
    assert done.returncode == 6 and "model.safetensors is not the file of the receipt" in done.stderr


def test_it_ends_at_the_first_token_that_differs(receipt: Path, mycli: Mycli) -> None:
    recorded = Receipt.read(receipt)
    tokens = list(recorded.tokens)
    tokens[7] = 5 if tokens[7] != 5 else 6
    replace(recorded, tokens=tuple(tokens), program={**recorded.program, "torch": "1.0"}).write(receipt)
    done = mycli("replay", str(receipt), "--json")
    answer = json.loads(done.stdout)
    assert done.returncode == 6 and answer["error"]["message"].startswith("token 8 of 12 differs")
    assert answer["first_difference"]["index"] == 7 and not answer["same"]
    assert [change.split()[0] for change in answer["program_changes"]] == ["torch"]
    assert answer["error"]["hint"] == answer["program_changes"][0]
    replace(recorded, tokens=recorded.tokens[:5]).write(receipt)
    longer = mycli("replay", str(receipt)).stderr
    assert "token 6 of 5 differs: the end in the receipt" in longer and "with the same program" in longer


def test_another_end_of_the_same_tokens_is_a_difference(receipt: Path, mycli: Mycli) -> None:
    replace(Receipt.read(receipt), finish_reason="stop").write(receipt)
    done = mycli("replay", str(receipt))
    assert done.returncode == 6 and "the reply ended by length, not by stop" in done.stderr


@pytest.mark.parametrize(("token", "inside"), [(-1, False), (0, True), (4095, True), (4096, False)])
def test_tokens_outside_the_vocabulary_are_refused(token: int, inside: bool, receipt: Path, mycli: Mycli) -> None:
    recorded = Receipt.read(receipt)
    replace(recorded, tokens=(*recorded.tokens[:-1], token)).write(receipt)
    done = mycli("replay", str(receipt))
    words = "token 12 of 12 differs" if inside else "the receipt has tokens outside the vocabulary of 4096"
    assert done.returncode == (6 if inside else 2) and words in done.stderr


def test_a_format_is_part_of_the_receipt(mycli: Mycli, tmp_path: Path) -> None:
    path = str(tmp_path / "r.json")
    done = mycli("run", "pico", "How old is Leo?", "--regex", "Leo is [0-9]{2}", "--receipt", path, "--json", *CPU)
    assert done.returncode == 0 and json.loads(done.stdout)["text"].startswith("Leo is ")
    assert mycli("replay", path).returncode == 0


@pytest.mark.parametrize("raw", [True, False])
def test_stop_strings_match_as_they_did(raw: bool, mycli: Mycli, tmp_path: Path) -> None:
    """SentencePiece's space before the first word is part of a text that continues another, not of an answer."""
    copy, path = shutil.copytree(PICO, tmp_path / "copy"), tmp_path / "r.json"
    tokenizer = json.loads((copy / "tokenizer.json").read_text())
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    replace_spaces = {"type": "Replace", "pattern": {"String": "Ġ"}, "content": " "}
    tokenizer["decoder"] = {"type": "Sequence", "decoders": [replace_spaces, {"type": "Fuse"}, strip]}
    (copy / "tokenizer.json").chmod(0o644)
    (copy / "tokenizer.json").write_text(json.dumps(tokenizer))
    words = ("--raw",) if raw else ()
    run = ("run", str(copy), "Once upon a", *words, "-n", "6", "--seed", "1", *CPU)
    text = json.loads(mycli(*run, "--json").stdout)["text"]
    stop = text[:3]
    assert text.startswith(" ") == raw
    done = mycli(*run, "--stop", stop, "--receipt", str(path))
    assert done.returncode == 0 and len(Receipt.read(path).tokens) <= 2, done.stderr
    done = mycli("replay", str(path))
    assert done.returncode == 0, done.stderr


def test_a_reasoning_budget_is_part_of_the_receipt(mycli: Mycli, tmp_path: Path) -> None:
    copy, path = shutil.copytree(PICO, tmp_path / "copy"), tmp_path / "r.json"
    settings = copy / "tokenizer_config.json"
    settings.chmod(0o644)
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "chat_template": THINKS}))
    done = mycli(
        "run", str(copy), "Tell me a story.", "--reasoning-budget", "4", "-n", "16", "--receipt", str(path), *CPU
    )
    assert done.returncode == 0 and "</think>" in done.stdout, done.stderr
    done = mycli("replay", str(path))
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "words", [("--samples", "2"), ("--beams", "2"), ("--draft", "pico-draft"), ("--batch", "-"), ("--deadline", "9s")]
)
def test_what_a_receipt_cannot_describe_is_refused_first(words: tuple[str, ...], mycli: Mycli, tmp_path: Path) -> None:
    prompt = () if words[0] == "--batch" else ("Hi",)
    done = mycli("run", "pico", *prompt, *words, "--receipt", str(tmp_path / "r.json"), *CPU)
    assert done.returncode == 2 and "--receipt" in done.stderr
    assert words[0] in done.stderr or words[0] == "--draft" and "draft model" in done.stderr


def test_a_file_that_is_no_receipt_is_refused(mycli: Mycli, tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    path.write_text('{"receipt_version": 1}')
    assert mycli("replay", str(path)).returncode == 3
    path.write_text("")
    empty = mycli("replay", str(path))
    assert empty.returncode == 3 and empty.stderr.splitlines()[1] == "hint: make a new receipt"
    assert mycli("replay", str(tmp_path / "none.json")).returncode in (2, 3, 4)
