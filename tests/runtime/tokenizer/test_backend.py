"""Test which tokenizers run in this process, and that these cannot hang it."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import normalizers

from mycli.runtime.errors import ModelError
from mycli.runtime.tokenizer import backend as encoding
from mycli.runtime.tokenizer.backend import KNOWN_PATTERNS, MAX_STEPS, GuardedPipeline, Pipeline, is_trusted
from mycli.runtime.utils.sandbox import WorkerProcess
from tests.support.paths import PICO
from tests.support.small_tokenizers import ATTACKS

QWEN = sorted(KNOWN_PATTERNS, key=len)[-1]


def split(**pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}


def replace(source: str, content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"String": source}, "content": content}


def special(name: str, count: int = 1) -> dict[str, Any]:
    pieces = [{"SpecialToken": {"id": name}}] * count
    return {"type": "TemplateProcessing", "single": pieces, "special_tokens": {"<s>": {"ids": [1]}}}


WORDS = {"type": "WordPiece", "continuing_subword_prefix": "##", "max_input_chars_per_word": 100}
TEXT_A = {"Sequence": {"id": "A", "type_id": 0}}


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"normalizer": {"type": "NFC"}, "pre_tokenizer": split(Regex=QWEN)},
        {"model": {"type": "BPE", "continuing_subword_prefix": "", "end_of_word_suffix": None}},
        {"normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}] * MAX_STEPS}},
        {"normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, replace(" ", "▁")]}},
        {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [split(String=" "), {"type": "ByteLevel"}]}},
        {"post_processor": {"type": "Sequence", "processors": [{"type": "ByteLevel"}, special("<s>")]}},
        {"normalizer": {"type": "BertNormalizer"}, "pre_tokenizer": {"type": "BertPreTokenizer"}, "model": WORDS},
        {"model": {**WORDS, "continuing_subword_prefix": "#" * 8, "max_input_chars_per_word": 1000}},
        {"normalizer": {"type": "Prepend", "prepend": "a" * 8}},
        {"post_processor": {**special("<s>"), "pair": [TEXT_A, *special("<s>", 2 * MAX_STEPS - 2)["single"]]}},
    ],
)
def test_tame(values: dict[str, Any]) -> None:
    assert is_trusted(values)


@pytest.mark.parametrize(
    "values",
    [
        pytest.param({"normalizer": replace("a", "aa")}, id="C5-growing"),
        pytest.param({"normalizer": replace("", "")}, id="C5-empty-pattern"),
        pytest.param({"normalizer": {"type": "Replace", "pattern": {"Regex": " +"}, "content": " "}}, id="C5-regex"),
        pytest.param({"normalizer": {"type": "Prepend", "prepend": "a" * 9}}, id="C5-prepend"),
        pytest.param({"normalizer": {"type": "Precompiled"}}, id="C2-precompiled"),
        pytest.param(
            {"normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}] * (MAX_STEPS + 1)}}, id="long"
        ),
        pytest.param({"normalizer": {"type": "Sequence", "normalizers": None}}, id="malformed"),
        pytest.param({"normalizer": ["NFC"]}, id="list"),
        pytest.param({"pre_tokenizer": {"type": "Split", "pattern": " "}}, id="split-malformed"),
        pytest.param({"post_processor": {**special("<s>"), "pair": special("</s>")["single"]}}, id="C2-pair"),
        pytest.param({"post_processor": {**special("<s>"), "pair": None}}, id="pair-malformed"),
        pytest.param({"pre_tokenizer": split(Regex="(a+)+")}, id="C4-regex"),
        pytest.param({"pre_tokenizer": split(String="")}, id="C4-empty-pattern"),
        pytest.param({"pre_tokenizer": {"type": "New"}}, id="unknown-kind"),
        pytest.param({"post_processor": special("</s>")}, id="C2-missing-template-token"),
        pytest.param({"model": {"type": "BPE", "continuing_subword_prefix": "#" * 13}}, id="S9-prefix"),
        pytest.param({"model": {"type": "WordPiece"}}, id="S9-model"),
        pytest.param({"model": WORDS | {"max_input_chars_per_word": 10**6}}, id="slow-words"),
        pytest.param({"model": WORDS | {"max_input_chars_per_word": 1001}}, id="slow-word"),
        pytest.param({"model": WORDS | {"max_input_chars_per_word": "9"}}, id="no-length-of-words"),
        pytest.param({"model": WORDS | {"continuing_subword_prefix": "#" * 9}}, id="long-prefix-of-words"),
        pytest.param({"model": {"type": "WordLevel"}}, id="unknown-model"),
        pytest.param({"model": ["BPE"]}, id="S9-no-model"),
        pytest.param({"post_processor": special("<s>", 2 * MAX_STEPS + 1)}, id="long-template"),
        pytest.param({"post_processor": {**special("<s>"), "special_tokens": None}}, id="template-without-tokens"),
        pytest.param({"post_processor": {**special("<s>"), "special_tokens": {"<s>": {}}}}, id="token-without-ids"),
        pytest.param(
            {"post_processor": {**special("<s>"), "special_tokens": {"<s>": {"ids": [1] * (MAX_STEPS + 1)}}}},
            id="token-of-many-ids",
        ),
        pytest.param({"post_processor": {"type": "TemplateProcessing", "special_tokens": {}}}, id="empty-template"),
    ],
)
def test_not_tame(values: dict[str, Any]) -> None:
    assert not is_trusted(values)


def test_interrupt_passes_through() -> None:  # C2
    class Stopped(BaseException):
        """The exception that a signal handler raises."""

    for kind in (KeyboardInterrupt, SystemExit, Stopped):

        def stop(kind: type[BaseException] = kind) -> None:
            raise kind

        with pytest.raises(kind):
            encoding._call(stop)


@pytest.mark.parametrize("pattern", sorted(encoding.KNOWN_PATTERNS))
def test_known_pattern_is_quick(pattern: str) -> None:
    """Check that long runs of one or two alternating classes do not make a known pattern backtrack excessively."""
    split: Any = tokenizers.pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
    for run in ("a", "A", "aA", "1", " ", "\n", " \n", "!", " !", "é", "日", "'s", "\u0301"):
        for end in ("", "a", "!", "\n"):
            assert split.pre_tokenize_str(run * 2000 + end)


@pytest.mark.parametrize(("plain", "inside"), [(False, False), (True, False), (True, True)])
def test_a_long_text_has_the_tokens_of_a_short_one(plain: bool, inside: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline, text = Pipeline((PICO / "tokenizer.json").read_bytes(), lower=False), "<|im_end|> A short text"
    expected = pipeline.encode(text, False, plain, inside)
    monkeypatch.setattr(encoding, "LONG_TEXT", 3)
    assert pipeline.encode(text, False, plain, inside) == expected


def with_ends() -> Any:
    vocabulary = {text: index for index, text in enumerate(("[UNK]", "[CLS]", "[SEP]", "a", "bb"))}
    library: Any = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, "[UNK]"))
    library.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    library.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    return library


def test_a_pair_is_cut_as_the_library_cuts_the_longest_text_first() -> None:
    library = with_ends()
    pipeline = Pipeline(library.to_str().encode())
    for longest, first, second in itertools.product(range(3, 12), range(6), range(6)):
        library.enable_truncation(longest, strategy="longest_first")
        texts = " ".join("a" * first), " ".join(["bb"] * second)
        expected = library.encode(*texts)
        assert pipeline.encode_pair(*texts, plain=False, longest=longest) == (expected.ids, expected.type_ids)
    assert pipeline.encode_pair("a", "bb", plain=True, longest=2)[0] == [1, 2, 2], "special tokens stay"
    assert pipeline.encode_pair("a", "bb", plain=False) == ([1, 3, 2, 4, 2], [0, 0, 0, 1, 1])


@pytest.mark.parametrize(
    ("steps", "lower", "text"),
    [
        (None, False, "A\ufb00"),
        (None, True, "a\ufb00"),
        (normalizers.NFKC(), False, "Aff"),
        (normalizers.NFKC(), True, "aff"),
        (normalizers.Sequence([normalizers.Replace("A", "x"), normalizers.NFKC()]), True, "aff"),
        (normalizers.Sequence([normalizers.Replace("A", "x"), normalizers.Lowercase()]), True, "x\ufb00"),
    ],
    ids=["none", "none-lower", "step", "step-lower", "steps-lower", "steps-with-lower"],
)
def test_lower_case_comes_before_all_steps_that_do_not_include_it(steps: Any, lower: bool, text: str) -> None:
    library = with_ends()
    library.normalizer = steps
    pipeline = Pipeline(library.to_str().encode(), lower) if lower else Pipeline(library.to_str().encode())
    assert pipeline.normalize("A\ufb00") == text


def test_failures_and_panics_of_the_library_are_errors_of_the_file() -> None:
    with pytest.raises(ModelError, match=r"^tokenizer\.json: the tokenizer fails: "):
        Pipeline(b"{}")
    panicking = Pipeline((ATTACKS / "C2-panic-missing-template-token.json").read_bytes())
    with pytest.raises(ModelError, match=r"^tokenizer\.json: the tokenizer fails: no entry found"):
        panicking.encode("a", True, plain=False, inside=False)


def test_a_worker_answers_as_this_process(tmp_path: Path) -> None:
    library = with_ends()
    library.normalizer = normalizers.NFKC()
    library.save(str(tmp_path / "tokenizer.json"))
    ours = Pipeline((tmp_path / "tokenizer.json").read_bytes(), lower=True)
    theirs = GuardedPipeline(tmp_path / "tokenizer.json", lower=True)
    assert theirs.token_ids(("bb", "c")) == ours.token_ids(("bb", "c")) == [4, None]
    assert theirs.normalize("A\ufb00") == ours.normalize("A\ufb00") == "aff"
    assert theirs.beginning("A bb a", 2, False) == ours.beginning("A bb a", 2, False) == "A bb"
    assert theirs.encode_pair("A", "bb a", False, 5) == ours.encode_pair("A", "bb a", False, 5)
    handle = encoding.handler(json.dumps([str(tmp_path / "tokenizer.json"), False]))
    assert handle(["beginning", "A bb a", 2, False]) == "A bb" and handle(["normalize", "A\ufb00"]) == "Aff"
    text = "A bb " * 40_000
    assert theirs.encode(text, False, True, True) == [3, 4] * 40_000


def test_a_worker_has_a_second_for_100_000_characters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds: list[float] = []
    monkeypatch.setattr(encoding, "ENCODE_SECONDS", 0.5)
    monkeypatch.setattr(WorkerProcess, "call", lambda worker, request, limit: seconds.append(limit) or [[], []])
    pipeline, text = GuardedPipeline(tmp_path / "tokenizer.json"), "a" * 300_000
    pipeline.encode(text, False, False, False)
    pipeline.encode_pair(text, text, False)
    pipeline.beginning(text, 3, False)
    pipeline.normalize(text)
    assert seconds == [3.5, 6.5, 3.5, 3.5]


@pytest.mark.parametrize(
    ("tokens", "beginning"), [(0, ""), (1, "a"), (2, "a bb"), (3, "a bb  a"), (4, "a bb  a bb "), (5, "a bb  a bb ")]
)
def test_a_text_is_cut_after_its_tokens(tokens: int, beginning: str) -> None:
    assert Pipeline(with_ends().to_str().encode()).beginning("a bb  a bb ", tokens, plain=False) == beginning


def test_a_text_is_not_cut_inside_a_character() -> None:
    pipeline, text = Pipeline((PICO / "tokenizer.json").read_bytes()), "a\U0001fac3b"
    count = len(pipeline.encode(text, False, plain=False, inside=False))
    found = [pipeline.beginning(text, tokens, plain=True) for tokens in range(count + 1)]
    assert count > 4 and found == ["", *["a"] * (count - 2), text[:2], text]
