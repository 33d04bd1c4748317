"""Test tokenizers converted to GGUF metadata and back: the ids of the original tokenizer.json, and of llama.cpp."""

import json
import random
from array import array
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from transformers.integrations.gguf import gguf_tokenizer_mapping as theirs

from mycli.quant.export._gguf_tokenizer import tokenizer_metadata
from mycli.runtime.errors import ModelError
from mycli.runtime.tokenizer.gguf_bpe import _stored_merges, derived_merges, pre_tokenizer
from mycli.runtime.tokenizer.gguf_tokenizer import eos_token_ids, tokenizer_json, tokenizer_settings
from mycli.runtime.tokenizer.split_patterns import PRE_TOKENIZERS
from mycli.runtime.tokenizer.tokenizer import Tokenizer
from mycli.runtime.utils.json_fields import Fields
from tests.support.grids import chosen
from tests.support.paths import PICO, ROOT

_DATA = Path("shared") / "data" / "tokenizers"  # next to a checkout or further up, on machines that have it
PUBLISHED = next((folder / _DATA for folder in ROOT.parents if (folder / _DATA).exists()), ROOT.parent / _DATA)
REAL = {
    "pico": (PICO / "tokenizer.json", "smollm"),
    "llama-3": (PUBLISHED / "llama-3.json", "llama-bpe"),
    "qwen2": (PUBLISHED / "qwen2.json", "qwen2"),
}
_POOLS = (
    "abcdefghijklmnopqrstuvwxyz",
    "ABCDEFGHIJ",
    " \t\n\r  ",
    "0123456789",
    "!?.,;:'\"-_()[]{}<>|/\\",
    "äöüßéèñçåøł",
    "中文日本語한국어",
    "🙂🚀👨‍👩‍👧",
    "'s't're've'll",
    "\u0301\u0308a\u030a",
    "ⅣⅫ²½٣",
)
_WORDS = ("Hello", "world", "the", "I'm", "DON'T", "<|im_start|>", "3.14159", "f(x):", "  return", "\n\n", "a.b/c?d=e")


def strings(count: int, seed: int = 0) -> Iterator[str]:
    rng = random.Random(seed)
    for _ in range(count):
        parts = []
        for _ in range(rng.randint(1, 20)):
            kind = rng.random()
            if kind < 0.25:
                parts.append(rng.choice(_WORDS))
            elif kind < 0.9:
                parts.append("".join(rng.choice(rng.choice(_POOLS)) for _ in range(rng.randint(1, 8))))
            else:
                parts.append(chr(rng.choice([rng.randrange(0x20, 0xD800), rng.randrange(0xE000, 0x20000)])))
        yield "".join(parts)


def as_read(metadata: dict[str, Any], architecture: str = "llama") -> Fields:
    """Convert metadata as the header reader does: lists of numbers become arrays."""
    values = {"general.architecture": architecture, **metadata}
    for key, value in values.items():
        if isinstance(value, list) and value and isinstance(value[0], int | float):
            values[key] = array("f" if isinstance(value[0], float) else "i", value)
    return Fields(values, "x.gguf")


@cache
def _made(name: str) -> tuple[tokenizers.Tokenizer, tokenizers.Tokenizer]:
    path, rule = REAL[name]
    raw = Fields(json.loads(path.read_text("utf-8")), path.name)
    ids = [*raw.object("model").values["vocab"].values(), *(token["id"] for token in raw.array("added_tokens", dict))]
    metadata = tokenizer_metadata(raw, Fields({}, "tokenizer_config.json"), max(ids) + 3)
    assert metadata["tokenizer.ggml.pre"] == rule
    converted = tokenizer_json(as_read(metadata))
    return tokenizers.Tokenizer.from_str(json.dumps(converted)), tokenizers.Tokenizer.from_file(str(path))


def _check_against_its_source(name: str, count: int) -> None:
    if not REAL[name][0].exists():
        pytest.skip(f"{REAL[name][0]} is not here")
    ours, reference = _made(name)
    for text in strings(count):
        assert ours.encode(text).ids == reference.encode(text).ids, text
    assert ours.get_vocab(with_added_tokens=True) == reference.get_vocab(with_added_tokens=True)


@pytest.mark.parametrize("name", chosen(REAL, quick=["pico", "qwen2"]))
def test_ids_are_those_of_tokenizer_json(name: str) -> None:
    _check_against_its_source(name, 300)


@pytest.mark.slow
@pytest.mark.parametrize("name", REAL)
def test_ids_of_many_texts_are_those_of_tokenizer_json(name: str) -> None:
    _check_against_its_source(name, 10_000)


def test_llama_cpps_own_cases() -> None:
    texts, expected = (PUBLISHED / f"ggml-vocab-llama-bpe.gguf.{kind}" for kind in ("inp", "out"))
    if not texts.exists():
        pytest.skip(f"{texts} is not here")
    ours, _ = _made("llama-3")
    cases = texts.read_text("utf-8").split("\n__ggml_vocab_test__\n")
    lines = expected.read_text("utf-8").splitlines()
    assert len(cases) >= len(lines) > 40
    for text, line in zip(cases, lines, strict=False):
        assert ours.encode(text, add_special_tokens=False).ids == [int(word) for word in line.split()], text


SENTENCEPIECE_TOKENS = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
SENTENCEPIECE_TYPES = [2, 3, 3, *[6] * 256]


def sentencepiece(**more: Any) -> dict[str, Any]:
    words = ["▁t", "he", "▁the", "in", "er", "▁a", "▁w", "▁in", "re", "on", "▁▁"]
    words += ["the", "▁wor", "or", "ld", "world", "▁world"]
    letters = ["▁", *"abcdefghijklmnopqrstuvwxyzABC.,!éß"]
    tokens = [*SENTENCEPIECE_TOKENS, *words, *letters, "<|user|>", "<think>"]
    scores = [0.0] * 259 + [-float(index) for index in range(len(words))]
    scores += [-1000.0 - index for index in range(len(letters))] + [0.0, 0.0]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": [*SENTENCEPIECE_TYPES, *[1] * (len(words) + len(letters)), 3, 4],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        **more,
    }


@pytest.mark.parametrize("architecture", ["phi3", "gemma2", "gemma3"])
def test_sentencepiece_is_cut_as_transformers_cuts_it(architecture: str) -> None:
    """The reference is the tokenizer that transformers builds from the same metadata."""
    metadata = sentencepiece(**{"tokenizer.ggml.add_space_prefix": architecture == "phi3"})
    reference, _ = theirs.convert_gguf_tokenizer(
        architecture,
        {
            "tokenizer_type": "llama",
            "tokens": metadata["tokenizer.ggml.tokens"],
            "scores": metadata["tokenizer.ggml.scores"],
            "token_type": metadata["tokenizer.ggml.token_type"],
        },
    )
    converted = tokenizer_json(as_read(metadata, architecture))
    ours = tokenizers.Tokenizer.from_str(json.dumps(converted))
    for text in [*strings(300, seed=1), "the world", " the  world", "in the world in the", "", " ", "  "]:
        if "<unk>" in text or "<s>" in text:
            continue
        ids, expected = (t.encode(text, add_special_tokens=False).ids for t in (ours, reference))
        assert ids == expected, text


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_no_merge_makes_a_token_that_is_matched_by_its_spelling(architecture: str) -> None:
    """Text that spells one as plain characters would become it."""
    metadata = sentencepiece()
    texts, kinds = ["<td", "<", ">", "<td>", "▁▁▁"], [1, 1, 1, 4, 4]
    metadata["tokenizer.ggml.tokens"] += texts
    metadata["tokenizer.ggml.scores"] += len(texts) * [-1.0]
    metadata["tokenizer.ggml.token_type"] += kinds
    merges = tokenizer_json(as_read(metadata, architecture))["model"]["merges"]
    assert ["<td", ">"] not in merges and ["▁▁", "▁"] in merges


def test_a_vocabulary_of_sentencepiece_with_merges_and_the_name_of_byte_level_ones() -> None:
    """Sarvam's: spaces are letters, other characters bytes, and no token is added in front."""
    metadata = sentencepiece()
    del metadata["tokenizer.ggml.scores"]
    merges = ["t h", "h e", "▁ t", "▁t he", "▁ a"]
    metadata["tokenizer.ggml.tokens"][-3] = "th"
    metadata |= {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "sarvam-moe", "tokenizer.ggml.merges": merges}
    ours = tokenizers.Tokenizer.from_str(json.dumps(tokenizer_json(as_read(metadata, "bailingmoe2"))))
    assert ours.encode(" a ü").tokens == ["▁a", "▁", "<0xC3>", "<0xBC>"]
    assert ours.encode("a <think> th").tokens == ["a", "▁", "<think>", "▁", "th"]
    for text in ("the theater", " a ü", "\n a\n\n b"):
        assert ours.decode(ours.encode(text).ids) == text


def test_sentencepiece_puts_its_start_token_first_and_decodes_to_the_text() -> None:
    metadata = as_read(sentencepiece())
    converted = Fields(tokenizer_json(metadata), "x.gguf")
    tokenizer = Tokenizer.from_fields(converted, Fields(tokenizer_settings(metadata), "x.gguf"), 400)
    ids = tokenizer.encode("the world é🙂", add_special=True)
    assert ids[0] == tokenizer.bos == 1 and tokenizer.eos == (2,)
    assert tokenizer.decode(ids) == "the world é🙂"
    assert tokenizer.vocabulary[ids[1]] == "▁the"


@pytest.mark.parametrize(
    ("changes", "added"),
    [
        ({}, [1, 5]),
        ({"tokenizer.ggml.add_bos_token": False}, [5, 5]),
        ({"tokenizer.ggml.add_bos_token": False, "tokenizer.ggml.add_eos_token": True}, [5, 2]),
        ({"tokenizer.ggml.bos_token_id": (1 << 32) - 1, "tokenizer.ggml.add_eos_token": True}, [5, 2]),
    ],
    ids=["default", "neither", "eos", "no-bos"],
)
def test_tokens_around_a_text_are_those_that_the_file_asks_for(changes: dict[str, Any], added: list[int]) -> None:
    converted = tokenizer_json(as_read(sentencepiece(**changes)))
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(converted))
    ids = tokenizer.encode("x").ids
    assert [5 if index not in (1, 2) else index for index in (ids[0], ids[-1])] == added
    plain, end = tokenizer.encode("y", add_special_tokens=False).ids, [2] if added[1] == 2 else []
    assert tokenizer.encode("x", "y").ids == [*ids, *plain, *end], "a second text has no begin token"


@pytest.mark.parametrize("prefix", [True, False])
def test_a_sentencepiece_tokenizer_is_written_and_read_back(prefix: bool) -> None:
    """The written scores rank the merges as those that they were derived from, and count the ids."""
    metadata = sentencepiece(**{"tokenizer.ggml.add_space_prefix": prefix})
    raw, settings = tokenizer_json(as_read(metadata)), tokenizer_settings(as_read(metadata))
    count = len(metadata["tokenizer.ggml.tokens"])
    written = tokenizer_metadata(Fields(raw, "tokenizer.json"), Fields(settings, ""), count + 2)
    assert written["tokenizer.ggml.model"] == "llama" and written["tokenizer.ggml.add_space_prefix"] == prefix
    types = [*metadata["tokenizer.ggml.token_type"], 5, 5]
    assert written["tokenizer.ggml.token_type"] == types
    first = written["tokenizer.ggml.tokens"].index("▁t")
    scores = written["tokenizer.ggml.scores"][first : first + 4]
    assert [score - scores[0] for score in scores] == [0.0, -1.0, -2.0, -3.0]
    assert tokenizer_json(as_read(written))["model"] == raw["model"]


@pytest.mark.parametrize(
    ("merges", "message"),
    [
        ([["a", "b"], ["b", "c"], ["ab", "c"]], "'a bc' is no merge"),
        ([["a", "bc"], ["a", "b"], ["ab", "c"], ["b", "c"]], "ranks with others between"),
    ],
)
def test_merges_that_scores_do_not_express_are_refused(merges: list[list[str]], message: str) -> None:
    raw = tokenizer_json(as_read(sentencepiece()))
    vocabulary = {"<unk>": 0, "a": 1, "b": 2, "c": 3, "ab": 4, "bc": 5, "abc": 6}
    raw |= {"model": {**raw["model"], "vocab": vocabulary, "merges": merges}, "added_tokens": []}
    with pytest.raises(ModelError, match=message):
        tokenizer_metadata(Fields(raw, "tokenizer.json"), Fields({}, ""), 7)


def test_merges_of_tokens_with_spaces_are_split_between_two_tokens() -> None:
    vocabulary = {text: index for index, text in enumerate(("a b", "c", "a bc", "x", "y z", "xy z"))}
    metadata = Fields({"tokenizer.ggml.merges": ["a b c", "x y z"]}, "x.gguf")
    assert _stored_merges(metadata, vocabulary) == [["a b", "c"], ["x", "y z"]]


def test_merges_follow_scores_not_places() -> None:
    vocabulary = {"a": 0, "b": 1, "c": 2, "ab": 3, "bc": 4, "abc": 5}
    better_bc = derived_merges(vocabulary, {"ab": -2.0, "bc": -1.0, "abc": -3.0})
    assert better_bc == [["b", "c"], ["a", "b"], ["a", "bc"], ["ab", "c"]]
    assert derived_merges({"b": 0, "a": 1, "bb": 2, "aa": 3}, {"bb": -1.0, "aa": -1.0}) == [["b", "b"], ["a", "a"]]


def test_ends_by_key_and_by_text() -> None:
    metadata = sentencepiece(**{"tokenizer.ggml.eot_token_id": 3})
    metadata["tokenizer.ggml.tokens"][-2] = "<|im_end|>"
    assert eos_token_ids(as_read(metadata)) == [2, 3, len(metadata["tokenizer.ggml.tokens"]) - 2]
    assert eos_token_ids(as_read(sentencepiece(**{"tokenizer.ggml.eos_token_ids": [4, 0, 1 << 30, -1]}))) == [2, 4, 0]
    assert eos_token_ids(as_read(sentencepiece(**{"tokenizer.ggml.eos_token_ids": [4.0]}))) == [2]


@pytest.mark.parametrize(
    ("texts", "ends"),
    [
        (["<|call|>", "<|end|>", "<|return|>"], ["<|call|>", "<|return|>"]),  # gpt-oss
        (["<|calls|>", "<|end|>", "<|flush|>"], ["<|calls|>", "<|flush|>"]),  # Solar Open
        (["<|end|>", "<|call|>", "[EOT]", "<s>x"], ["<|end|>", "<|call|>", "[EOT]"]),
    ],
)
@pytest.mark.parametrize("kind", [1, 3, 4])
def test_ends_are_those_of_llama_cpp(texts: list[str], ends: list[str], kind: int) -> None:
    """They count whatever their type; an end of a message does not end the reply."""
    metadata = sentencepiece()
    tokens = [*metadata["tokenizer.ggml.tokens"], *texts]
    metadata |= {"tokenizer.ggml.tokens": tokens}
    metadata["tokenizer.ggml.token_type"] += len(texts) * [kind]
    metadata["tokenizer.ggml.scores"] += len(texts) * [0.0]
    found = eos_token_ids(as_read({**metadata, "tokenizer.ggml.eot_token_id": tokens.index("<|end|>")}))
    assert {tokens[index] for index in found} == {"</s>", *ends}
    added = {token["content"]: token["special"] for token in tokenizer_json(as_read(metadata))["added_tokens"]}
    assert all(added[text] for text in ends)


def test_several_templates_keep_their_names() -> None:
    metadata = sentencepiece(
        **{
            "tokenizer.chat_template": "plain",
            "tokenizer.chat_template.tool_use": "tools",
            "tokenizer.chat_templates": ["tool_use"],
        }
    )
    templates = tokenizer_settings(as_read(metadata))["chat_template"]
    assert templates == [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]


@pytest.mark.parametrize(
    ("name", "pieces"),
    [
        ("deepseek-llm", "I|'|m| |中文|abc| |1|2|3|4| don|'|t|한글|x|\n|\n| | é|\u0301| ab|!!| "),
        ("kimi-k2", "I'm| |中文|abc| |123|4| don't|한글x|\n\n| | é\u0301| ab|!!| "),
        ("youtu", "I'm| |中文|abc| |1|2|3|4| don't|한글|x|\n\n| | é\u0301| ab|!!| "),
        ("bailingmoe2", "I|'m| 中文abc| |1|2|3|4| don|'t|한글x|\n\n| | é|\u0301| ab|!!| "),
        ("minicpm5", "I|'m| 中文abc| |123|4| don|'t|한글x|\n\n| | é|\u0301| ab|!!| "),
        ("minerva-7b", "I|'m| 中文abc| |1|2|3|4| don|'t|한글x|\n\n | é|\u0301| ab|!!| "),
        ("default", "I|'|m| 中文abc| |123|4| don|'|t한글x|\n\n | é|\u0301| ab|!!| "),
        ("falcon", "I|'|m| 中文abc| |123|4| don|'|t한글x|\n\n| é|\u0301| ab|!!| "),
        ("gigachat", "I|'m| 中文abc| 1234| don|'t|한글x|\n\n | é|\u0301| ab|!!| "),
        ("jais-2", "|".join(["x", *(" " * count for count in (512, 256, 128, 64, 32, 16, 8, 4, 2, 1))])),
    ],
)
def test_rules_that_transformers_does_not_know(name: str, pieces: str) -> None:
    """llama.cpp cuts so, too: `python -m tests.benchmarks.gguf_rules`."""
    text = pieces.replace("|", "")
    empty = json.loads(tokenizers.Tokenizer(tokenizers.models.BPE()).to_str())
    cutter: Any = tokenizers.Tokenizer.from_str(json.dumps({**empty, **PRE_TOKENIZERS[name].sections()})).pre_tokenizer
    assert [text[start:stop] for _, (start, stop) in cutter.pre_tokenize_str(text)] == pieces.split("|")


@pytest.mark.parametrize("name", theirs.GGUF_PRE_TOKENIZER_SPLITS)
def test_rules_are_those_that_transformers_knows(name: str) -> None:
    if name not in PRE_TOKENIZERS:
        pytest.skip("not read here")
    assert PRE_TOKENIZERS[name].patterns == (theirs.GGUF_PRE_TOKENIZER_SPLITS[name],)


@pytest.mark.parametrize(
    ("architecture", "tokens", "rule"),
    [
        ("qwen2", 9, "qwen2"),
        ("phi2", 9, "phi-2"),
        ("falcon", 9, "falcon"),
        ("gptneox", 9, "gpt-2"),
        ("gpt2", 9, "gpt-2"),
        ("starcoder", 9, "starcoder"),
        ("starcoder2", 9, "starcoder"),
        ("llama", 9, "default"),
        ("stablelm", 51200, "gpt-2"),
        ("stablelm", 51201, "stablelm2"),
    ],
)
def test_a_file_of_before_may_2024_names_no_rule(architecture: str, tokens: int, rule: str) -> None:
    metadata = {"tokenizer.ggml.tokens": [str(index) for index in range(tokens)]}
    assert pre_tokenizer(as_read(metadata, architecture)) is PRE_TOKENIZERS[rule]
    assert pre_tokenizer(as_read({**metadata, "tokenizer.ggml.pre": ""}, architecture)) is PRE_TOKENIZERS[rule]


def test_texts_are_split_by_our_patterns_where_the_published_ones_are_slow() -> None:
    rules = [rule for rule in PRE_TOKENIZERS.values() if rule.published]
    assert rules
    for rule in rules:
        steps = rule.sections()["pre_tokenizer"]["pretokenizers"]
        assert tuple(step["pattern"]["Regex"] for step in steps if "pattern" in step) == rule.patterns


@pytest.mark.parametrize(
    ("section", "value", "message"),
    [
        ("pre_tokenizer", {"type": "Whitespace"}, "not a rule of llama.cpp"),
        ("normalizer", {"type": "Lowercase"}, "not a rule of llama.cpp"),
        ("post_processor", {"type": "BertProcessing"}, "post-processor"),
        ("model", {"type": "Unigram", "vocab": [["a", 0.0]]}, "byte-level BPE"),
        (
            "model",
            {"type": "BPE", "byte_fallback": True, "vocab": {"a": 0}, "merges": []},
            "normalizer and pre-tokenizer are not SentencePiece's",
        ),
    ],
    ids=str,
)
def test_a_tokenizer_that_llama_cpp_has_no_rule_for_is_refused(section: str, value: Any, message: str) -> None:
    raw = json.loads((PICO / "tokenizer.json").read_text("utf-8"))
    with pytest.raises(ModelError, match=message):
        tokenizer_metadata(Fields({**raw, section: value}, "tokenizer.json"), Fields({}, ""), 4096)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"tokenizer.ggml.unknown_token_id": 1}, "<s>"),  # although another token has the type of unknown ones
        ({"tokenizer.ggml.unknown_token_id": None}, "<unk>"),
        ({"tokenizer.ggml.unknown_token_id": None, "tokenizer.ggml.token_type": 3}, None),
    ],
    ids=["by-key", "by-type", "none"],
)
def test_the_unknown_token_of_sentencepiece(changes: dict[str, Any], expected: str | None) -> None:
    metadata = sentencepiece()
    if (kind := changes.get("tokenizer.ggml.token_type")) is not None:
        changes = {**changes, "tokenizer.ggml.token_type": [kind, *metadata["tokenizer.ggml.token_type"][1:]]}
    metadata = {key: value for key, value in {**metadata, **changes}.items() if value is not None}
    assert tokenizer_json(as_read(metadata))["model"]["unk_token"] == expected


def test_merges_are_derived_for_4_million_characters_at_most() -> None:
    """More would take hours."""
    count = 4096
    metadata = sentencepiece()
    more = {"tokens": [f"{index:04}" + 1020 * "a" for index in range(count)], "scores": count * [0.0]}
    for name, values in {**more, "token_type": count * [1]}.items():
        metadata[f"tokenizer.ggml.{name}"] += values
    with pytest.raises(ModelError, match="characters, more than the 4194304 allowed"):
        tokenizer_json(as_read(metadata))
