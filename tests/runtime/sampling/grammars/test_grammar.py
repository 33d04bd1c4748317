"""Test constrained output: every sampled reply matches the grammar on real vocabularies; bad grammars are refused."""

import contextlib
import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from mycli.runtime.checkpoint.open_folder import open_model_folder
from mycli.runtime.device.placement import Placement
from mycli.runtime.engine.engine import Engine
from mycli.runtime.engine.loading.loader import load_model
from mycli.runtime.engine.replies.completion import generate
from mycli.runtime.engine.sequence import Request
from mycli.runtime.errors import ModelError, UsageError
from mycli.runtime.memory.cache_shape import CacheShape
from mycli.runtime.sampling.grammars import grammar
from mycli.runtime.sampling.grammars.grammar import (
    JSON_MODE,
    MAX_DEPTH,
    MAX_SOURCE,
    Grammar,
    GrammarCompiler,
)
from mycli.runtime.sampling.params import SamplingParams
from mycli.runtime.sampling.sampler import Sampler
from mycli.runtime.speculative.draft_length import FixedDraftLength
from mycli.runtime.speculative.lookup import PromptLookup
from mycli.runtime.speculative.proposers import Proposer, load_draft
from mycli.runtime.speculative.speculator import ProposerSpeculator
from mycli.runtime.tokenizer.tokenizer import Tokenizer
from tests.support.grammars import matches
from tests.support.paths import DRAFT, PICO, ROOT

SHARED = ROOT.parent / "shared" / "data" / "tokenizers"
END = {"pico": "<|im_end|>", "llama-3": "<|eot_id|>", "qwen2": "<|im_end|>"}
ROWS = {"pico": 4096, "llama-3": 128_256, "qwen2": 151_936}
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0, "maximum": 120}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def load(name: str, folder: Path) -> Tokenizer:
    if name == "pico":
        return Tokenizer.load(PICO, ROWS[name])
    shutil.copy(SHARED / f"{name}.json", folder / "tokenizer.json")
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": END[name]}))
    return Tokenizer.load(folder, ROWS[name])


@pytest.fixture(scope="module", params=["pico", "llama-3", "qwen2"])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    name = str(request.param)
    if name != "pico" and not (SHARED / f"{name}.json").exists():
        pytest.skip("the full-size tokenizers are not beside this checkout")
    return load(name, tmp_path_factory.mktemp(name))


@pytest.fixture(scope="module")
def pico() -> Tokenizer:
    return Tokenizer.load(PICO, ROWS["pico"])


def draw(tokenizer: Tokenizer, grammar: Grammar, seed: int, limit: int = 400) -> tuple[str, bool]:
    size = len(tokenizer.vocabulary)
    noise = torch.Generator().manual_seed(seed)
    sampler = Sampler(
        SamplingParams(temperature=1.0, top_k=50, seed=seed), size, torch.device("cpu"), constraint=grammar.start()
    )
    ids = []
    for _ in range(limit):
        token = int(sampler.sample(torch.randn(1, size, generator=noise)))
        if token in tokenizer.eos:
            return tokenizer.decode(ids), True
        ids.append(token)
    return tokenizer.decode(ids), False


@pytest.mark.parametrize("pattern", [r"[0-9]{3}-[a-c]+x", r"(yes|no), (sir|madam)", "👩‍👩‍👧|é|日本"])
def test_what_is_drawn_matches_the_expression(tokenizer: Tokenizer, pattern: str) -> None:
    grammar = Grammar.from_regex(pattern, tokenizer, frozenset(tokenizer.eos))
    done = 0
    for seed in range(4):
        text, ended = draw(tokenizer, grammar, seed)
        done += ended
        assert not ended or re.fullmatch(pattern, text), text
    assert done


def test_what_is_drawn_is_of_the_schema(tokenizer: Tokenizer) -> None:
    schema = {"type": "array", "items": {"enum": ["a", "bé", 3]}, "minItems": 2, "maxItems": 2}
    grammar = Grammar.from_schema(json.dumps(schema), "s.json", tokenizer, frozenset(tokenizer.eos))
    texts = [draw(tokenizer, grammar, seed) for seed in range(4)]
    assert any(ended for _, ended in texts)
    for text, ended in texts:
        if ended:
            value = json.loads(text)
            assert len(value) == 2 and all(item in ("a", "bé", 3) for item in value)


def test_control_tokens_are_no_text(tokenizer: Tokenizer) -> None:
    grammar = Grammar.from_regex(r"(?s:.)+", tokenizer, frozenset(tokenizer.eos))
    constraint = grammar.start()
    constraint.accept(tokenizer.encode("a", add_special=False)[0])
    allowed = constraint.apply(torch.zeros(1, len(tokenizer.vocabulary)))[0].isfinite()
    permitted = {index for index in tokenizer.control_ids if allowed[index]}
    assert permitted == set(tokenizer.eos)


def test_endless_whitespace_is_bounded(pico: Tokenizer) -> None:
    """F17: a model that prefers blanks must continue."""
    blanks = [
        index
        for index, token in enumerate(pico.vocabulary)
        if token is not None and (piece := pico.piece(index, first=False)) and not piece.strip()
    ]
    logits = torch.zeros(1, len(pico.vocabulary))
    logits[0, blanks] = 50.0
    logits[0, list(pico.eos)] = 20.0
    grammar = Grammar.from_schema(JSON_MODE, "--json-mode", pico, frozenset(pico.eos))
    sampler = Sampler(SamplingParams(), len(pico.vocabulary), torch.device("cpu"), constraint=grammar.start())
    ids: list[int] = []
    while not ids or ids[-1] not in pico.eos:
        ids.append(int(sampler.sample(logits)))
        logits[0, pico.encode("}", add_special=False)] = 10.0
        assert len(ids) < 400
    text = pico.decode(ids)
    assert json.loads(text) == {} or isinstance(json.loads(text), dict)
    assert max(len(run) for run in re.findall(r"[ \t\r\n]*", text)) <= 40


@pytest.mark.parametrize(
    "sampling", [SamplingParams(), SamplingParams(1.0, 1, 0.01, 1.0, seed=1)], ids=["greedy", "narrow"]
)
def test_one_token_stays_under_every_filter(pico: Tokenizer, sampling: SamplingParams) -> None:
    """F7: top-k, top-p and min-p would keep only forbidden tokens, yet an allowed one is drawn."""
    grammar = Grammar.from_regex("[xyz]", pico, frozenset(pico.eos))
    logits = torch.full((1, len(pico.vocabulary)), -30.0)
    logits[0, pico.encode("a", add_special=False)] = 30.0
    sampler = Sampler(sampling, len(pico.vocabulary), torch.device("cpu"), constraint=grammar.start())
    assert pico.decode([int(sampler.sample(logits))]) in ("x", "y", "z")


def test_a_dead_end_is_an_error(pico: Tokenizer) -> None:
    """F7: no token can continue because the end of the vocabulary that holds it is cut off."""
    grammar = Grammar.from_regex("é", pico, frozenset(pico.eos))
    with pytest.raises(ModelError, match="dead end"):
        grammar.start().apply(torch.zeros(1, 3))


def test_replies_of_a_grammar_end_one_by_one(pico: Tokenizer) -> None:
    grammar = Grammar.from_regex("ab?", pico, frozenset(pico.eos))
    first, second = grammar.start(), grammar.start()
    end, a, b = pico.eos[0], *(pico.encode(letter, add_special=False)[0] for letter in "ab")
    for state in (first, second):
        state.accept(a)
        assert state.complete
    first.accept(end)
    second.accept(b)
    logits = torch.zeros(1, len(pico.vocabulary))
    assert first.apply(logits).isfinite().all()
    assert second.apply(logits)[0].isfinite().nonzero().flatten().tolist() == [end]
    assert first.accept(17) == 17 and second.accept(end) == end
    assert first.complete and second.complete


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


HOSTILE = {
    "remote-reference": {"$ref": "http://localhost:1/x"},
    "file-reference": {"$ref": "file:///etc/passwd"},
    "endless-reference": {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
    "nothing-matches": {"type": "integer", "minimum": 5, "maximum": 3},
    "unknown-type": {"type": "nope"},
    "not-supported": {"not": {}},
    "lenient-asked-for": {"x-guidance": {"lenient": True}, "type": "array", "uniqueItems": True},
    "product": {
        "allOf": [
            {"anyOf": [{"type": "object", "properties": {f"k{i}": {"const": j}}} for j in range(3)]} for i in range(14)
        ]
    },
    "deep": nested(300),
    "large": {"enum": list(range(MAX_SOURCE // 4))},
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_schema_refused_before_generation(pico: Tokenizer, name: str) -> None:
    with pytest.raises(UsageError):
        Grammar.from_schema(json.dumps(HOSTILE[name]), "s.json", pico, frozenset(pico.eos))


def test_the_deepest_schema_has_as_many_levels_as_the_limit(pico: Tokenizer) -> None:
    """Text and innermost schema are two of the levels."""
    stop_ids = frozenset(pico.eos)
    assert Grammar.from_schema(json.dumps(nested(MAX_DEPTH - 2)), "s.json", pico, stop_ids).ready
    with pytest.raises(UsageError, match=f"nested more than {MAX_DEPTH} levels deep"):
        Grammar.from_schema(json.dumps(nested(MAX_DEPTH - 1)), "s.json", pico, stop_ids)


@pytest.mark.parametrize("text", ["", "{", "[]", "true", "nul", '"a"', "[" * 100_000])
def test_what_is_no_schema_is_refused(pico: Tokenizer, text: str) -> None:
    with pytest.raises(UsageError, match="s.json"):
        Grammar.from_schema(text, "s.json", pico, frozenset(pico.eos))


MISFITS = [
    ({"type": "string", "minLength": "x"}, "/minLength must be an integer of at least 0"),
    ({"type": "array", "maxItems": -1}, "/maxItems must be an integer of at least 0"),
    ({"type": "number", "minimum": "low"}, "/minimum must be a number"),
    ({"type": "number", "multipleOf": "x"}, "/multipleOf must be a number"),
    ({"type": ["integer", "string"], "multipleOf": 0}, "/multipleOf must be above 0"),
    ({"minimum": 10, "multipleOf": 0}, "/multipleOf must be above 0"),
    ({"type": "integer", "multipleOf": -2}, "/multipleOf must be above 0"),
    ({"type": "integer", "minimum": 10, "multipleOf": 0}, "/multipleOf must be above 0"),
    ({"type": "string", "pattern": 5}, "/pattern must be a string"),
    ({"allOf": [{"pattern": "a"}, {"pattern": "^[^b]/\t\\n(a$"}]}, "/allOf/1/pattern: unclosed group"),
    (
        {"type": "object", "patternProperties": {"b": {}, "[z-a]": {}}},
        "/patternProperties: invalid character class range, the start must be <= the end",
    ),
    ({"$ref": 5}, "/$ref must be a string"),
    ({"type": ["string", 5]}, "/type must be a string or a list of strings"),
    ({"anyOf": {}}, "/anyOf must be a list"),
    ({"properties": 5}, "/properties must be an object"),
    ({"oneOf": [{"type": "null"}, 5]}, "/oneOf/1 must be an object, true or false"),
    ("string", " must be an object, true or false"),
]


@pytest.mark.parametrize(("part", "problem"), MISFITS, ids=lambda value: str(value)[:30])
@pytest.mark.parametrize("strict", [True, False])
def test_a_value_of_a_wrong_type_is_refused_with_its_path(
    pico: Tokenizer, part: Any, problem: str, strict: bool
) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "array", "items": part}}}
    with pytest.raises(UsageError) as refused:
        GrammarCompiler(pico, frozenset(pico.eos)).schema(json.dumps(schema), "schema", strict=strict).compile()
    assert refused.value.message == f"schema: not a usable JSON schema: #/properties/a/items{problem}"


def test_a_value_of_a_wrong_type_that_applies_to_nothing_is_ignored(pico: Tokenizer) -> None:
    schema = {"type": "integer", "minimum": 5, "maximum": 7, "pattern": 5}
    grammar = GrammarCompiler(pico, frozenset(pico.eos)).schema(json.dumps(schema), "schema")
    grammar.compile()
    assert grammar.ready


@pytest.mark.parametrize("pattern", ["", "[", "(?=a)b", r"(a)\1", r"\ba", "x" * (MAX_SOURCE + 1)])
def test_bad_expression_refused(pico: Tokenizer, pattern: str) -> None:
    with pytest.raises(UsageError, match="regular expression"):
        Grammar.from_regex(pattern, pico, frozenset(pico.eos))


def test_what_is_wrong_with_an_expression_is_said_without_the_library_s_grammar(pico: Tokenizer) -> None:
    with pytest.raises(UsageError) as refused:
        Grammar.from_regex("a[b", pico, frozenset(pico.eos))
    assert refused.value.message == "regular expression: unclosed character class"


@pytest.mark.parametrize("pattern", ["a{100000000}", "(a{1000}){1000}", "(.*a.{20}){20}", "(x+x+)+y"])
def test_expressions_that_explode_elsewhere_take_their_steps(pico: Tokenizer, pattern: str) -> None:
    """The patterns may be refused or work, but must not run without end."""
    with contextlib.suppress(ModelError, UsageError):
        text, _ = draw(pico, Grammar.from_regex(pattern, pico, frozenset(pico.eos)), seed=0, limit=10)
        assert text


@pytest.mark.parametrize(
    ("source", "text", "other"),
    [
        (r'root ::= "\u00e9"', "é", "e"),
        (r"root ::= [\u00e0-\u00ff]", "é", "e"),
        (r"root ::= [\U0001F600-\U0001F64F]", "😀", "e"),
        (r'root ::= "\\u00e9"', r"\u00e9", "é"),
        (r'root ::= "\[\x41\]" # "[', "[A]", "A"),
        ('root ::= "a" .', "a\n", "aab"),
        ("root ::= [.a&&b]+", ".&b", "c"),
        ('root ::= ([x]* )+ n\nn ::= ("y"{2} ){2} | "z"', "xxyyyy", "xyyy"),
        (r"root ::= [a\-z]+", "-az", "b"),
        ('root ::= start\nstart ::= "x"', "x", "start"),
        ('?start: "x" | y\ny: "z"', "z", "y"),
    ],
)
def test_gbnf_is_read_as_llama_cpp_reads_it(pico: Tokenizer, source: str, text: str, other: str) -> None:
    """Regression: the converter refused or changed these."""
    grammar = GrammarCompiler(pico, frozenset(pico.eos)).gbnf(source)
    grammar.compile()
    assert matches(grammar, pico, text) and not matches(grammar, pico, other)


@pytest.mark.parametrize("character", [r"\ud800", r"\udfff"])
def test_half_a_character_in_gbnf_is_refused(pico: Tokenizer, character: str) -> None:
    grammar = GrammarCompiler(pico, frozenset(pico.eos)).gbnf(f"root ::= [{character}]")
    with pytest.raises(UsageError, match="grammar: hexadecimal literal is not a Unicode scalar value"):
        grammar.compile()


@pytest.mark.parametrize(
    ("pattern", "text", "other"),
    [
        (r"[[]a[a&&b~~]+", "[a&~", "[ac"),
        (r"[+--][\w-.]", ",.", "a."),
        (r'{"a": \d{2}}{}', '{"a": 12}{}', "a"),
        (r"a{,2}b{1,}", "aabb", "aaab"),
        (r"[^]]", "a", "]"),
        (r"[\b]\cA\0", "\b\x01\0", "b"),
        (r"\<\/\_\p{L}{2}\x{41}\u{42}", "</_éüAB", "/_éüAB"),
        (r"\A\ud83d\ude00[\ud83d\ude00-\ud83d\ude01]\Z", "😀😁", "😀a"),
        (r"[[:alpha:]_]", "_", "["),
        (r"\\1[(?=]", r"\1=", "1="),
        ("a[^]", "a\n", "a"),
        ("a[^]b", "a\nb", "a\n"),
        (r"[-^][^-^][]a-]", "-a]", "-^a"),
        (r'[^"]{2}', "a\\", 'a"'),
        (r"[^\\]{2}", 'a"', "a\\"),
    ],
)
def test_expressions_of_other_dialects(pico: Tokenizer, pattern: str, text: str, other: str) -> None:
    """Regression: Rust's syntax was assumed, in which these are errors or mean something else."""
    stops = frozenset(pico.eos)
    regex = Grammar.from_regex(pattern, pico, stops)
    assert matches(regex, pico, text) and not matches(regex, pico, other)
    schema = Grammar.from_schema(json.dumps({"type": "string", "pattern": f"^{pattern}$"}), "s.json", pico, stops)
    quoted, other_quoted = (json.dumps(value, ensure_ascii=False) for value in (text, other))
    assert matches(schema, pico, quoted) and not matches(schema, pico, other_quoted)


def test_ordinary_schemas_are_not_too_large(pico: Tokenizer) -> None:
    fields = {f"property_{i}": {"enum": [f"value {j} of {i}" for j in range(20)]} for i in range(100)}
    schema = {"type": "object", "properties": {**fields, "person": PERSON}, "required": list(fields)}
    Grammar.from_schema(json.dumps(schema), "s.json", pico, frozenset(pico.eos))


def test_a_model_that_cannot_end_is_refused(pico: Tokenizer) -> None:
    with pytest.raises(ModelError, match="end token"):
        Grammar.from_regex("a", pico, frozenset())


def test_masked_logits_are_minus_infinity(pico: Tokenizer) -> None:
    logits = torch.randn(1, len(pico.vocabulary))
    logits[0, list(pico.eos)] = -math.inf
    masked = Grammar.from_regex("a|b", pico, frozenset(pico.eos)).start().apply(logits)
    kept = masked.isfinite()
    assert torch.equal(masked[kept], logits[kept]) and (masked[~kept] == -math.inf).all() and kept.sum() >= 2


@pytest.mark.parametrize("name", ["ngram", "draft"])
def test_a_draft_does_not_loosen_a_constraint(name: str, pico: Tokenizer) -> None:
    """The tokens equal those without a draft, also sampled: allowed tokens depend on the text, so none are drafted."""
    placement = Placement(torch.device("cpu"), torch.float32)
    runner = load_model(open_model_folder(PICO), placement)
    shape = CacheShape.contiguous(128)
    proposer: Proposer = PromptLookup()
    if name == "draft":
        proposer = load_draft(open_model_folder(DRAFT), pico, runner, shape)
    prompt = tuple(pico.encode("abbb abbb abbb a", add_special=True))
    for sampling in (SamplingParams(), SamplingParams(temperature=1.0, seed=3)):
        replies = []
        for speculator in (None, ProposerSpeculator(proposer, lambda: FixedDraftLength(4))):
            grammar = Grammar.from_regex("a(b{3} ab{3}){2}", pico, frozenset(pico.eos))
            request = Request(prompt, sampling, 40, frozenset(pico.eos), grammar)
            replies.append(generate(Engine(runner, shape, 4096, speculator=speculator), request)[0])
            assert re.fullmatch("a(b{3} ab{3}){2}", pico.decode(replies[-1]))
        assert replies[0] == replies[1]


def test_control_tokens_of_the_grammar_are_those_of_the_tokenizer_and_the_stops(pico: Tokenizer) -> None:
    word = next(index for index in range(len(pico.vocabulary)) if pico.piece(index, first=False) == b"the")
    vocabulary = grammar._Vocabulary(pico, frozenset({word}))
    unwritten = {index for index in range(len(pico.vocabulary)) if pico.piece(index, first=False) is None}
    assert set(vocabulary.special_token_ids) == {word} | pico.control_ids | unwritten
    assert vocabulary.eos_token_id == word and vocabulary.tokens[word] == b"the"
