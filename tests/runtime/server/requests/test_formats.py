"""Test which format of a reply follows from the fields of every interface."""

from typing import Any

import pytest
from pydantic import ValidationError

from mycli.runtime.server.http.api_error import ApiError
from mycli.runtime.server.requests.formats import Constraints, ResponseFormat, output_format

SCHEMA = {"type": "integer"}
TEXT_SCHEMA = '{"type": "integer"}'


def format_of(**fields: Any) -> ResponseFormat | None:
    return output_format(Constraints.model_validate(fields))


@pytest.mark.parametrize(
    ("fields", "complete"),
    [
        ({"type": "text"}, True),
        ({"type": "json_object"}, True),
        ({"type": "json_schema"}, False),
        ({"type": "json_schema", "json_schema": {"schema": {}}}, True),
        ({"type": "json_schema", "schema": {}}, True),
        ({"type": "json_schema", "json_schema": {"name": "n"}}, False),
        ({"type": "json_schema", "json_schema": {"name": "n"}, "schema": {}}, False),
        *(({"type": kind, kind: "a"}, True) for kind in ("regex", "lark", "gbnf")),
        *(({"type": kind, "text": "a"}, False) for kind in ("regex", "lark", "gbnf")),
        ({"type": "regex", "lark": "a"}, False),
    ],
    ids=str,
)
def test_a_format_has_what_its_type_needs(fields: Any, complete: bool) -> None:
    if complete:
        assert ResponseFormat.model_validate(fields).type == fields["type"]
    else:
        with pytest.raises(ValidationError, match="is missing"):
            ResponseFormat.model_validate(fields)


@pytest.mark.parametrize(("strict", "refuses"), [(True, True), (False, False), (None, False)])
def test_a_strict_schema_is_marked(strict: bool | None, refuses: bool) -> None:
    schema = {"type": "json_schema", "json_schema": {"schema": SCHEMA, "strict": strict}}
    assert ResponseFormat.model_validate(schema).strict == refuses
    assert not ResponseFormat.model_validate({"type": "json_object"}).strict


@pytest.mark.parametrize(
    ("fields", "place", "kind", "value"),
    [
        ({"response_format": {"type": "json_object"}}, "response_format", "json_object", None),
        ({"response_format": {"type": "text"}, "regex": "a"}, "regex", "regex", "a"),
        ({"guided_regex": "a"}, "guided_regex", "regex", "a"),
        ({"structured_outputs": {"regex": "a"}}, "structured_outputs.regex", "regex", "a"),
        ({"json_schema": TEXT_SCHEMA}, "json_schema", "json_schema", SCHEMA),
        ({"guided_json": SCHEMA}, "guided_json", "json_schema", SCHEMA),
        ({"structured_outputs": {"json": {}}}, "structured_outputs.json", "json_schema", {}),
        (
            {"structured_outputs": {"json_object": True}},
            "structured_outputs.json_object",
            "json_schema",
            {"type": "object"},
        ),
        ({"guided_choice": ["é", 'b"']}, "guided_choice", "lark", 'start: "é" | "b\\""'),
        ({"structured_outputs": {"choice": ["a"]}}, "structured_outputs.choice", "lark", 'start: "a"'),
        ({"grammar": 'root ::= "a"'}, "grammar", "gbnf", 'root ::= "a"'),
        ({"ebnf": 'root ::= "a"'}, "ebnf", "gbnf", 'root ::= "a"'),
        ({"guided_grammar": 'root ::= "a"'}, "guided_grammar", "gbnf", 'root ::= "a"'),
        ({"structured_outputs": {"grammar": 'root ::= "a"'}}, "structured_outputs.grammar", "gbnf", 'root ::= "a"'),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_the_words_of_every_server_are_a_format_in_its_place(fields: Any, place: str, kind: str, value: Any) -> None:
    answer = format_of(**fields)
    assert answer is not None and (answer.place, answer.type) == (place, kind)
    schema = None if answer.json_schema is None else answer.json_schema.schema_
    assert (schema if kind == "json_schema" else getattr(answer, kind, None)) == value


@pytest.mark.parametrize("fields", [{}, {"response_format": {"type": "text"}}, {"grammar": ""}])
def test_any_text_has_no_format(fields: Any) -> None:
    assert format_of(**fields) is None


@pytest.mark.parametrize(
    ("fields", "names", "param"),
    [
        ({"guided_regex": "a", "grammar": 'root ::= "a"'}, "guided_regex and grammar", "grammar"),
        ({"grammar": 'root ::= "a"', "json_schema": {}, "regex": "a"}, "json_schema and regex", "grammar"),
    ],
)
def test_formats_that_contradict_are_named(fields: Any, names: str, param: str) -> None:
    with pytest.raises(ApiError, match=f"^{names} cannot be combined$") as error:
        format_of(**fields)
    assert (error.value.status, error.value.param) == (400, param)


@pytest.mark.parametrize("schema", ["", "{", "[]", "5", "[" * 100_000])
def test_a_text_that_is_no_schema_is_refused(schema: str) -> None:
    with pytest.raises(ApiError, match="guided_json: not a JSON schema"):
        format_of(guided_json=schema)
