"""Test the metadata of tokenizers in GGUF: types and scores of tokens, spaces and ends, and what GGUF cannot hold."""

import json
from typing import Any

import pytest

from mycli.quant.export._gguf_tokenizer import tokenizer_metadata
from mycli.runtime.errors import ModelError
from mycli.runtime.tokenizer.gguf_vocabulary import BYTE, CONTROL, NORMAL, UNKNOWN, UNUSED, USER
from mycli.runtime.tokenizer.split_patterns import PRE_TOKENIZERS
from mycli.runtime.utils.json_fields import Fields
from tests.support.paths import PICO

REPLACE = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
PREPEND = {"type": "Prepend", "prepend": "▁"}
BOTH = {"type": "Sequence", "normalizers": [PREPEND, REPLACE]}
CUT = {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False}
METASPACE = {"type": "Metaspace", "replacement": "▁", "split": False}
TEXT, SPECIAL = {"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": "<s>", "type_id": 0}}


def sentencepiece(tokens: list[str], merges: list[Any] | None = None, **sections: Any) -> dict[str, Any]:
    vocabulary = {text: index for index, text in enumerate(tokens)}
    model = {"type": "BPE", "byte_fallback": True, "vocab": vocabulary, "merges": merges or [], "unk_token": "<unk>"}
    return {"model": model, "normalizer": REPLACE, "added_tokens": [], **sections}


def written(raw: dict[str, Any], rows: int, architecture: str = "llama", **settings: Any) -> dict[str, Any]:
    keys = tokenizer_metadata(Fields(raw, "tokenizer.json"), Fields(settings, "x.json"), rows, architecture)
    return {key.removeprefix("tokenizer.ggml."): value for key, value in keys.items()}


def scores(tokens: list[str], merges: list[Any]) -> dict[str, float]:
    return dict(zip(tokens, written(sentencepiece(tokens, merges), len(tokens))["scores"], strict=True))


def byte_level(ignore_merges: bool = False) -> dict[str, Any]:
    """Return a model with one token; `ignore_merges` is left out where it is the default."""
    return {"type": "BPE", "vocab": {"a": 0}, "merges": [], **({"ignore_merges": True} if ignore_merges else {})}


def pico() -> dict[str, Any]:
    raw: dict[str, Any] = json.loads((PICO / "tokenizer.json").read_text("utf-8"))
    return raw


@pytest.mark.parametrize(
    ("normalizer", "pre_tokenizer", "prefix"),
    [
        (REPLACE, None, False),
        (REPLACE, CUT, False),  # of Gemma
        (BOTH, None, True),
        (None, {**METASPACE, "prepend_scheme": "always"}, True),
        (None, {**METASPACE, "prepend_scheme": "first"}, True),
        (None, {**METASPACE, "prepend_scheme": "never"}, False),
        (None, METASPACE, True),
        (None, {**METASPACE, "add_prefix_space": False}, False),
        (None, {**METASPACE, "split": True}, None),
        (None, {"type": "Metaspace", "replacement": "▁"}, None),
        (None, {**METASPACE, "replacement": "_"}, None),
        (None, {"type": "Sequence", "pretokenizers": [METASPACE, METASPACE]}, None),
        (None, None, None),
        (PREPEND, None, None),
        (REPLACE, METASPACE, None),
        (None, {**METASPACE, "type": "Whitespace"}, None),
    ],
)
def test_a_space_in_front_is_that_of_the_tokenizer(normalizer: Any, pre_tokenizer: Any, prefix: bool | None) -> None:
    raw = sentencepiece(["<unk>", "a"], normalizer=normalizer, pre_tokenizer=pre_tokenizer)
    if prefix is None:
        with pytest.raises(ModelError, match="normalizer and pre-tokenizer are not SentencePiece's"):
            written(raw, 2)
    else:
        assert written(raw, 2)["add_space_prefix"] is prefix


def test_tokens_of_sentencepiece_have_types_and_scores_of_their_kind() -> None:
    """An unused row and an added token score below every learned token; bytes score 0, as in published files."""
    tokens = ["<unk>", "<0x0A>", "a", "b", "ab", "▁"]
    added = [{"id": 6, "content": "<▁s>", "special": True}, {"id": 7, "content": "<▁t>", "special": False}]
    keys = written(sentencepiece(tokens, ["a b"], added_tokens=added), 9)
    assert keys["tokens"] == [*tokens, "<▁s>", "< t>", "[PAD8]"], "a token to look for in the text has plain spaces"
    assert keys["token_type"] == [UNKNOWN, BYTE, NORMAL, NORMAL, NORMAL, NORMAL, CONTROL, USER, UNUSED]
    assert keys["scores"] == [0, 0, -2, -3, -4, -5, -1000, -1000, -10000]
    assert (keys["model"], keys["pre"]) == ("llama", "default") and "merges" not in keys


def test_gemma_4_has_its_merges_in_the_file() -> None:
    tokens = ["<unk>", "a", "b", "ab", "aba"]
    keys = written(sentencepiece(tokens, [["ab", "a"], "a b"]), 5, "gemma4")
    assert (keys["model"], keys["pre"], keys["merges"]) == ("gemma4", "gemma4", ["ab a", "a b"])
    assert len(keys["scores"]) == 5


def test_scores_fall_in_the_order_of_the_merges_where_ids_do_not() -> None:
    found = scores(["<unk>", "c", "b", "a", "bc", "ab"], [["a", "b"], ["b", "c"]])
    assert sorted(found, key=lambda text: -found[text])[:2] == ["ab", "bc"]
    assert len(set(found.values())) == 6


def test_runs_of_spaces_whose_merges_are_mixed_score_below_all_others() -> None:
    """Llama 2 and Gemma have them at the end; no order of scores would express them anywhere else."""
    tokens = ["<unk>", "a", "b", "ab", "▁", "▁▁", "▁▁▁"]
    pair, in_order, mixed = ["a", "b"], ["▁ ▁", "▁ ▁▁", "▁▁ ▁"], ["▁ ▁▁", "▁ ▁", "▁▁ ▁"]
    found = scores(tokens, [pair, *mixed])
    runs = {found.pop(text) for text in tokens[4:]}
    assert len(runs) == 1 and max(runs) < min(found.values())
    plain = scores(tokens, [pair, *in_order])
    assert plain["▁▁"] == plain["▁▁▁"] + 1
    with pytest.raises(ModelError, match="merges into '▁▁▁' have ranks with others between them"):
        scores(tokens, [*mixed, pair])


def test_mixed_merges_of_two_letters_are_refused_at_the_end_too() -> None:
    with pytest.raises(ModelError, match="merges into 'aab' have ranks with others between them"):
        scores(["<unk>", "a", "b", "aa", "ab", "aab"], ["a a", "aa b", "a b", "a ab"])


def test_a_vocabulary_that_is_no_object_of_ids_is_refused() -> None:
    for vocabulary in ([["a", 0.0]], {"a": 0, "b": "1"}):
        raw = sentencepiece([])
        raw["model"]["vocab"] = vocabulary
        with pytest.raises(ModelError, match="not an object of ids"):
            written(raw, 2)


@pytest.mark.parametrize("flag", ["lstrip", "rstrip", "single_word"])
@pytest.mark.parametrize("rows", [1, 2])
def test_added_tokens_that_change_the_text_around_them_are_refused(flag: str, rows: int) -> None:
    """One without an embedding row is not written."""
    raw = sentencepiece(["a"], added_tokens=[{"id": 1, "content": "<mask>", flag: True}])
    if rows == 1:
        assert written(raw, rows)["tokens"] == ["a"]
        return
    with pytest.raises(ModelError, match="'<mask>' strips spaces or matches whole words"):
        written(raw, rows)


@pytest.mark.parametrize(
    ("pieces", "ends"),
    [
        ([TEXT], ""),
        ([SPECIAL, TEXT], "bos"),
        ([TEXT, SPECIAL], "eos"),
        ([SPECIAL, TEXT, SPECIAL], "bos eos"),
        ([SPECIAL, SPECIAL, TEXT], None),
        ([TEXT, SPECIAL, SPECIAL], None),
        ([SPECIAL, TEXT, SPECIAL, SPECIAL], None),
        ([SPECIAL], None),
        ([TEXT, TEXT], None),
    ],
)
def test_at_most_one_token_is_added_at_each_end_of_a_text(pieces: list[Any], ends: str | None) -> None:
    template = {"type": "TemplateProcessing", "single": pieces}
    raw = {**pico(), "post_processor": {"type": "Sequence", "processors": [{"type": "ByteLevel"}, template]}}
    if ends is None:
        with pytest.raises(ModelError, match="more than one token before and one after a text"):
            written(raw, 4096)
    else:
        keys = written(raw, 4096)
        assert [name for name in ("bos", "eos") if keys[f"add_{name}_token"]] == ends.split()


def test_tokens_of_a_byte_level_vocabulary_have_types_of_their_kind() -> None:
    raw = pico()
    count = 1 + max((*raw["model"]["vocab"].values(), *(token["id"] for token in raw["added_tokens"])))
    raw["added_tokens"] += [{"id": count, "content": "<a>", "special": True}, {"id": count + 1, "content": "<b>"}]
    first = raw["model"]["merges"][0]
    keys = written(raw, count + 3, eos_token={"content": "<a>"}, pad_token="<none>")
    assert keys["tokens"][count:] == ["<a>", "<b>", f"[PAD{count + 2}]"]
    assert keys["token_type"][count:] == [CONTROL, USER, UNUSED] and NORMAL in keys["token_type"]
    assert keys["merges"][0] == (first if isinstance(first, str) else " ".join(first))
    assert keys["eos_token_id"] == count and "padding_token_id" not in keys


@pytest.mark.parametrize("name", PRE_TOKENIZERS)
@pytest.mark.parametrize("published", [False, True])
def test_a_rule_is_named_if_it_and_the_use_of_whole_tokens_are_those_of_the_tokenizer(
    name: str, published: bool
) -> None:
    rule = PRE_TOKENIZERS[name]
    raw = {"model": byte_level(rule.ignore_merges), "added_tokens": [], **rule.sections(published)}
    found = PRE_TOKENIZERS[written(raw, 1)["pre"]]
    assert (found.sections(published), found.ignore_merges) == (rule.sections(published), rule.ignore_merges)


def test_what_a_byte_level_step_leaves_out_is_true() -> None:
    sections = PRE_TOKENIZERS["gpt-2"].sections()
    (step,) = sections["pre_tokenizer"]["pretokenizers"]
    assert step.pop("use_regex") and not step["add_prefix_space"]
    raw = {"model": byte_level(), "added_tokens": [], **sections}
    assert PRE_TOKENIZERS[written(raw, 1)["pre"]] == PRE_TOKENIZERS["gpt-2"]
    del step["add_prefix_space"]
    with pytest.raises(ModelError, match="not a rule of llama.cpp"):
        written(raw, 1)


@pytest.mark.parametrize("changes", [{"type": "WordPiece"}, {"vocab": [["a", 0.0]]}], ids=str)
def test_a_model_that_is_not_byte_level_bpe_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match="the model is not byte-level BPE"):
        written({**pico(), "model": {**byte_level(), **changes}}, 4096)
