"""Test JSON schemas before compilation: which are too large, which keywords are dropped, which objects are closed."""

import json
import time
from typing import Any

import pytest

from mycli.runtime.errors import UsageError
from mycli.runtime.sampling.grammars import probe
from mycli.runtime.sampling.grammars.json_schema import LARGEST_INTEGER, MAX_NODES, UNSUPPORTED, count_values, prepare
from tests.support.bombs import BOMBS, doubling

NAMES = {"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "number"}}}


def closed(schema: dict[str, Any]) -> Any:
    return prepare(schema, strict=False, closed=True).schema


@pytest.mark.parametrize("name", BOMBS)
def test_s1_a_bomb_is_refused_at_once_with_its_path(name: str) -> None:
    start = time.process_time()
    with pytest.raises(ValueError, match=r"#.*: more than \d+ (nodes|combinations)"):
        prepare(BOMBS[name](), strict=False, closed=True)
    assert time.process_time() - start < 2


def test_s1_the_largest_schema_has_as_many_nodes_as_the_limit() -> None:
    properties: dict[str, Any] = {f"p{index}": {} for index in range(MAX_NODES - 1)}
    assert prepare({"properties": properties}, strict=False, closed=True).nodes == MAX_NODES
    with pytest.raises(ValueError, match=f"#/properties/more: more than {MAX_NODES} nodes"):
        prepare({"properties": {**properties, "more": {}}}, strict=False, closed=True)


NOWHERE = ("2", "x", "-1", "0/x", "", "٠", "00", "0000000009", "0" * 5000, "9" * 5000)


@pytest.mark.parametrize("part", NOWHERE, ids=lambda part: part[:10])
def test_a_reference_into_a_list_that_leads_nowhere_stays(part: str) -> None:
    """Regression: an index that began with nine zeros raised IndexError."""

    def schema(part: str) -> dict[str, Any]:
        return {"anyOf": [NAMES, {}], "properties": {"a": {"title": "A", "$ref": f"#/anyOf/{part}", "minLength": 1}}}

    prepared = prepare(schema(part), strict=False, closed=False)
    assert prepared.schema == schema(part)
    assert prepare(schema("0"), strict=False, closed=False).nodes == prepared.nodes + 2


def test_shared_and_recursive_references_are_no_bombs() -> None:
    shared = {
        f"a{i}": {
            "type": "object",
            "properties": {"p": {"$ref": f"#/$defs/a{i + 1}"}, "q": {"$ref": f"#/$defs/a{i + 1}"}},
        }
        for i in range(50)
    }
    assert prepare({"$ref": "#/$defs/a0", "$defs": {**shared, "a50": {}}}, True, True).nodes < 500
    tree = {"allOf": [{"$ref": "#"}, {"properties": {"child": {"$ref": "#"}}}]}
    assert prepare(tree, strict=True, closed=True).nodes < 100
    assert prepare(doubling(3, "allOf"), True, True).nodes < 100
    alternatives = {"anyOf": [{"$ref": "#/$defs/a"}] * 30, "$defs": {"a": {"enum": [*range(1000)]}}}
    assert prepare(alternatives, strict=True, closed=True).nodes < 1100, "not merged, so not copied"


@pytest.mark.parametrize("keyword", sorted(UNSUPPORTED))
def test_f9_an_unsupported_keyword_is_left_out_or_refused_by_name(keyword: str) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "object", keyword: {"type": "array"}}}}
    prepared = prepare(schema, strict=False, closed=False)
    assert prepared.loosened == (f"#/properties/a/{keyword}",)
    assert prepared.schema["properties"]["a"] == {"type": "object"}
    with pytest.raises(
        ValueError, match=rf"#/properties/a/{keyword.replace('$', '[$]')}: this keyword is not supported"
    ):
        prepare(schema, strict=True, closed=False)


@pytest.mark.parametrize(
    "entry", [{"format": "binary"}, {"pattern": "(?=a)b"}, {"pattern": r"(a)\1"}, {"pattern": r"\ba"}]
)
def test_f9_formats_and_patterns_that_are_not_regular(entry: dict[str, str]) -> None:
    (keyword,) = entry
    assert prepare({"type": "string", **entry}, False, True).loosened == (f"#/{keyword}",)
    with pytest.raises(ValueError, match=f"#/{keyword}: .*not supported"):
        prepare({"type": "string", **entry}, True, True)


@pytest.mark.parametrize(
    "written, read",
    [
        ({"type": "ARRAY", "items": {"type": "STRING"}, "minItems": "1"}, ("array", {"type": "string"}, 1)),
        ({"type": "list", "items": {"type": ""}, "minItems": 2.0}, ("array", {}, 2)),
        ({"type": ["ARRAY", "NULL"], "items": {"type": "any"}, "minItems": 0}, (["array", "null"], {}, 0)),
    ],
    ids=["gemini", "python", "list"],
)
def test_types_and_lengths_of_other_dialects(written: dict[str, Any], read: tuple[Any, ...]) -> None:
    prepared = prepare(written, strict=True, closed=True)
    assert (prepared.schema["type"], prepared.schema["items"], prepared.schema["minItems"]) == read
    assert not prepared.fault


@pytest.mark.parametrize(
    "written, read",
    [
        ({"type": "STRING", "nullable": True}, {"type": ["string", "null"]}),
        ({"type": "string", "enum": ["a"], "nullable": True}, {"type": ["string", "null"], "enum": ["a", None]}),
        ({"type": "string", "enum": [None, "a"], "nullable": True}, {"type": ["string", "null"], "enum": [None, "a"]}),
        ({"type": "string", "nullable": False}, {"type": "string"}),
    ],
    ids=["type", "enum", "enum-with-null", "false"],
)
def test_nullable_of_openapi(written: dict[str, Any], read: dict[str, Any]) -> None:
    assert prepare(written, strict=True, closed=True).schema == read


@pytest.mark.parametrize(
    "written, read",
    [
        ({"required": "a", "additionalProperties": True}, {"required": ["a"], "additionalProperties": True}),
        ({"enum": "x"}, {"enum": ["x"]}),
        ({"additionalProperties": "False"}, {"additionalProperties": False}),
        ({"additionalProperties": "true"}, {"additionalProperties": True}),
        ({"type": "integer", "minimum": "-1"}, {"type": "integer", "minimum": -1}),
        ({"type": "number", "multipleOf": "0.5"}, {"type": "number", "multipleOf": 0.5}),
        ({"type": "number", "maximum": "1e3"}, {"type": "number", "maximum": "1e3"}),
        ({"properties": {"required": {"enum": ["a"], "default": "a"}}, "additionalProperties": "x"}, None),
        ({"enum": {"a": 1}}, None),
    ],
)
def test_values_in_strings_and_names_without_a_list(written: dict[str, Any], read: dict[str, Any] | None) -> None:
    """None: left as written, for the compiler to refuse."""
    assert prepare(written, strict=True, closed=True).schema == (written if read is None else read)


def test_an_unknown_type_is_left_out_or_refused() -> None:
    assert prepare({"type": "date"}, strict=False, closed=True).loosened == ("#/type",)
    with pytest.raises(ValueError, match="#/type: type 'date' is not supported"):
        prepare({"type": ["string", "date"]}, strict=True, closed=True)


@pytest.mark.parametrize(
    "written, read",
    [
        ({"properties": []}, {}),
        ({"required": {}}, {}),
        ({"required": True}, {}),
        ({"required": ""}, {}),
        ({"required": "true"}, {}),
        ({"format": ""}, {}),
        ({"anyOf": [None]}, {"anyOf": [True]}),
        (
            {"properties": {"a": None}, "required": ["a"]},
            {"properties": {"a": True}, "required": ["a"], "additionalProperties": False},
        ),
    ],
)
def test_parts_that_state_nothing(written: dict[str, Any], read: dict[str, Any]) -> None:
    prepared = prepare(written, strict=True, closed=True)
    assert (prepared.schema, prepared.loosened) == (read, ())


def test_a_property_may_be_called_like_a_keyword() -> None:
    schema = {"type": "object", "properties": {"not": {"type": "string"}, "if": {"type": "string"}}}
    assert prepare(schema, strict=True, closed=False).schema == schema


def test_f10_an_object_with_named_properties_is_closed() -> None:
    assert closed(NAMES) == {**NAMES, "additionalProperties": False}
    nested = closed({"type": "array", "items": NAMES})
    assert nested["items"]["additionalProperties"] is False
    assert closed({"anyOf": [NAMES, {"type": "string"}]})["anyOf"][0]["additionalProperties"] is False
    for part in ({"properties": {"a": {}}}, {"type": "object", "required": ["a"]}):
        assert closed(part)["additionalProperties"] is False
    required = closed({**NAMES, "required": ["name", "id"]})
    assert required["properties"]["id"] is True and required["additionalProperties"] is False


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object"},
        {"required": ["name"]},
        {**NAMES, "additionalProperties": True},
        {**NAMES, "additionalProperties": {"type": "string"}},
        {**NAMES, "patternProperties": {"^x": {}}},
    ],
    ids=["no names", "required alone", "true", "schema", "patterns"],
)
def test_f10_what_is_said_of_other_properties_stays(schema: dict[str, Any]) -> None:
    assert closed(schema) == schema
    assert prepare(NAMES, strict=False, closed=False).schema == NAMES


def test_no_object_is_closed_where_references_depend_on_an_inner_identifier() -> None:
    inner = {"type": "string", "$id": "http://a/b"}
    for part in ({"$defs": {"a": inner, "b": NAMES}}, {"anyOf": [inner, NAMES]}):
        assert closed({**NAMES, **part}) == {**NAMES, **part}


@pytest.mark.parametrize("reference", ["#/$defs/Base%20<id>", "#/$defs/Base <id>", "#base", "http://a/b#base"])
def test_parts_found_by_any_reference_are_closed_together(reference: str) -> None:
    """Regression: only plain JSON pointers were followed, so the base alone was closed and no other property fit."""
    base = {"$anchor": "base", "type": "object", "properties": {"id": {"type": "string"}}}
    schema = closed({"$id": "http://a/b", "$defs": {"Base <id>": base}, "allOf": [{"$ref": reference}, NAMES]})
    assert set(schema["properties"]) == {"id", "name", "age"}
    with pytest.raises(ValueError, match="more than"):
        prepare(json.loads(json.dumps(doubling(20, "anyOf")).replace("#/$defs", "#/%24defs")), True, True)


@pytest.mark.parametrize(
    ("part", "is_closed"),
    [
        ({"description": "anything"}, False),
        ({"type": "object"}, False),
        ({"type": ["null", "object"]}, False),
        ({"type": "null"}, True),
    ],
    ids=["any value", "object", "object or null", "null"],
)
def test_an_alternative_that_may_be_any_object_leaves_its_object_open(part: dict[str, Any], is_closed: bool) -> None:
    for kind in ({"type": "object"}, {}):
        schema = closed({**kind, "properties": {"id": {}}, "anyOf": [NAMES, part]})
        assert ("additionalProperties" in schema) == is_closed
        assert "additionalProperties" not in schema["anyOf"][0]


@pytest.mark.parametrize(
    ("schema", "count"),
    [
        ({"type": "string"}, 1),
        ({"enum": ["a", "b"]}, 1),
        ({"type": "object", "properties": {"a": {"const": 1}, "b": NAMES}}, 3),
        ({"type": "object", "properties": {"a": {"type": "array"}}}, None),
        ({"type": "object"}, None),
        ({"type": "array", "properties": {"a": {"const": 1}}}, None),
        ({**NAMES, "additionalProperties": True}, None),
        ({**NAMES, "allOf": [{"required": ["more"]}]}, None),
        ({"type": "string", "$ref": "#/$defs/a"}, None),
    ],
)
def test_values_are_counted_where_a_schema_bounds_them(schema: dict[str, Any], count: int | None) -> None:
    """The default length of a reply of `mycli run` follows from the count."""
    assert count_values(schema) == count


def test_references_and_identifiers_become_uris() -> None:
    """Regression: the compiler refused names of types that are no part of a URI."""
    schema = closed(
        {"$id": "My type", "properties": {"a": {"$ref": "#/$defs/Page<Größe>"}}, "$defs": {"Page<Größe>": {}}}
    )
    assert schema["$id"] == "My%20type"
    assert schema["properties"]["a"]["$ref"] == "#/$defs/Page%3CGr%C3%B6%C3%9Fe%3E"


def test_a_property_called_like_the_identifier_leaves_objects_closed() -> None:
    """Regression: `$id` among the properties counted as an identifier of a part, in which nothing was closed."""
    schema = {"type": "object", "properties": {"$id": {"type": "string"}}}
    assert closed(schema) == {**schema, "additionalProperties": False}


@pytest.mark.parametrize(
    ("dialect", "known"),
    [
        ("https://json-schema.org/draft-07/schema#", "http://json-schema.org/draft-07/schema"),
        ("http://json-schema.org/draft/2020-12/schema", "https://json-schema.org/draft/2020-12/schema"),
        ("http://json-schema.org/schema#", None),
        ("https://spec.openapis.org/oas/3.1/dialect/base", None),
    ],
)
def test_dialects_the_compiler_does_not_know(dialect: str, known: str | None) -> None:
    """Regression: it would fetch them, which is refused."""
    assert closed({"$schema": dialect, "type": "string"}).get("$schema") == known


def test_not_anything_is_false() -> None:
    """Regression: zod's never() and undefined() made the whole schema unusable."""
    for anything in ({}, True):
        assert closed({"anyOf": [{"type": "string"}, {"not": anything}]})["anyOf"] == [{"type": "string"}, False]
    with pytest.raises(ValueError, match="#/not: nothing can match"):
        closed({"not": {}})


def test_bounds_beyond_what_the_compiler_computes() -> None:
    """Regression: the ranges of int64 and of floats, which zod and schemars write, were refused."""
    low, high = -(1 << 63), (1 << 63) - 1
    assert closed({"type": "integer", "minimum": low, "maximum": high}) == {
        "type": "integer",
        "minimum": low + 1024,
        "maximum": high,
    }
    assert closed({"type": "number", "minimum": -3.4e38, "maximum": 3.4e38}) == {
        "type": "number",
        "minimum": -(10**18),
        "maximum": 10**18,
    }
    assert closed({"type": "number", "minimum": -1.7976931348623157e308}) == {"type": "number"}
    assert closed({"type": "number", "exclusiveMinimum": 1e30}) == {"type": "number", "exclusiveMinimum": 1e30}
    assert closed({"minimum": -3.4e38}) == {"minimum": -(10**18)}
    assert closed({"type": "string", "maxLength": LARGEST_INTEGER}) == {"type": "string"}
    assert closed({"type": "string", "maxLength": (1 << 31) - 1}) == {"type": "string", "maxLength": (1 << 31) - 1}


@pytest.mark.parametrize("entry", [{"propertyNames": {"type": "string"}}, {"uniqueItems": False}])
def test_an_unsupported_keyword_that_restricts_nothing_is_left_out(entry: dict[str, Any]) -> None:
    """Regression: zod's records were refused as strict schemas."""
    prepared = prepare({"type": "object", **entry}, strict=True, closed=True)
    assert prepared.schema == {"type": "object"} and not prepared.loosened


def test_formats_of_numbers_restrict_nothing() -> None:
    """Regression: OpenAPI's int32 made a strict schema unusable."""
    for kind, name in (("integer", "int32"), ("number", "double")):
        assert "format" not in prepare({"type": kind, "format": name}, strict=True, closed=True).schema
    with pytest.raises(ValueError, match="format 'int32' is not supported"):
        prepare({"type": ["integer", "string"], "format": "int32"}, strict=True, closed=True)


def test_a_pattern_says_more_than_a_format_of_times() -> None:
    """Regression: zod's local times have no time zone, so nothing matched both."""
    schema = {"type": "string", "format": "time", "pattern": r"^\d\d:\d\d$"}
    assert closed(schema) == {"type": "string", "pattern": schema["pattern"]}
    assert closed({"type": "string", "format": "time"}) == {"type": "string", "format": "time"}


def test_numbers_of_optional_properties_that_cannot_be_counted_are_left_out() -> None:
    """Regression: such a tool was refused although nothing asked for strict calls."""
    names = {"type": "object", "properties": {"a": {}, "b": {}, "c": {}}}
    for schema in (
        {**names, "minProperties": 2},
        {**names, "minProperties": 1, "additionalProperties": True},
        {**names, "required": ["a"], "maxProperties": 1},
    ):
        (count,) = {"minProperties", "maxProperties"} & set(schema)
        prepared = prepare(schema, strict=False, closed=True)
        assert prepared.loosened == (f"#/{count}",) and count not in prepared.schema
        with pytest.raises(ValueError, match=f"#/{count}: is not supported where properties are optional"):
            prepare(schema, strict=True, closed=True)
    for schema in (
        {**names, "minProperties": 1},
        {**names, "required": ["b"], "maxProperties": 2},
        {**names, "required": ["b"], "minProperties": 2},
        {**names, "required": ["b"], "minProperties": 1, "additionalProperties": True},
        {**names, "required": ["a", "b", "c"], "minProperties": 4, "additionalProperties": True},
        {"type": "object", "minProperties": 2},
    ):
        assert set(schema) <= set(prepare(schema, strict=True, closed=True).schema)


@pytest.mark.parametrize(
    "wrong", [{"minProperties": 2.5}, {"minProperties": 2, "maxProperties": 2.5}, {"minProperties": 3, "required": 3}]
)
def test_an_invalid_number_of_properties_is_left_for_the_compiler_to_refuse(wrong: dict[str, Any]) -> None:
    schema = {"type": "object", "properties": {"a": {}, "b": {}}, **wrong}
    prepared = prepare(schema, strict=True, closed=True)
    assert prepared.fault and wrong.items() <= prepared.schema.items()


def test_f10_parts_of_one_object_are_closed_together() -> None:
    base = {"type": "object", "properties": {"id": {"type": "string"}}}
    schema = closed({"$defs": {"base": base}, "allOf": [{"$ref": "#/$defs/base"}, NAMES]})
    assert schema["additionalProperties"] is False and set(schema["properties"]) == {"id", "name", "age"}
    assert "additionalProperties" not in schema["allOf"][1]
    assert "additionalProperties" not in schema["$defs"]["open-0"]
    assert schema["allOf"][0] == {"$ref": "#/$defs/open-0"}
    assert schema["$defs"]["base"]["additionalProperties"] is False
    either = closed({**NAMES, "anyOf": [{"required": ["name"]}, {"required": ["age"]}]})
    assert set(either["properties"]) == {"name", "age"} and either["additionalProperties"] is False


def test_a_keyword_that_is_null_is_not_set() -> None:
    """Go and others write null for an empty map or list of a schema."""
    data = {"const": None, "default": {"type": None}, "examples": [{"a": None}]}
    unset = {"properties": None, "required": None, "additionalProperties": None, "minLength": None, "enum": None}
    schema = {**unset, "type": "object", "properties": {"enum": {**data, **unset}, "b": {"items": None}}}
    for strict in (True, False):
        prepared = prepare(schema, strict, closed=True)
        assert prepared.loosened == ()
        assert prepared.schema == {
            "type": "object",
            "properties": {"enum": data, "b": {}},
            "additionalProperties": False,
        }


def test_integers_have_the_range_of_exact_json_integers() -> None:
    assert closed({"type": "integer"}) == {"type": "integer", "minimum": -LARGEST_INTEGER, "maximum": LARGEST_INTEGER}
    assert closed({"type": "integer", "minimum": 3}) == {"type": "integer", "minimum": 3}


def test_s1_what_only_compiling_shows_ends_in_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """The merged pattern is below the node limit, so the worker's limits apply and the error states them."""
    monkeypatch.setattr(probe, "WALL_SECONDS", 0.001)
    grammar_probe = probe.GrammarProbe(300)
    with pytest.raises(UsageError, match="S: compiling it takes more than 0.001 s"):
        grammar_probe.check(json.dumps({"grammars": [{"lark_grammar": "start: /a{1000}/"}]}), "S")
