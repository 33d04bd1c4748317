"""Reads the format that a reply must have from the fields of every interface into one `ResponseFormat`."""

import json
from typing import Annotated, Any, Literal

from pydantic import Field, PrivateAttr, model_validator

from mycli.runtime.server.http.api_error import ApiError, invalid_value
from mycli.runtime.server.requests.schemas import LongText, No, Strict


class SchemaFormat(Strict):
    """A JSON schema with its name."""

    name: Annotated[str, Field(max_length=256)] = "schema"
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Strict):
    """The format of a reply: any text, a JSON object, a JSON schema, a regular expression, or a grammar."""

    type: Literal["text", "json_object", "json_schema", "regex", "lark", "gbnf"]
    json_schema: SchemaFormat | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")  # as in llama.cpp, without json_schema
    regex: LongText | None = None
    lark: LongText | None = None
    gbnf: LongText | None = None
    _place: str = PrivateAttr("response_format")

    @property
    def place(self) -> str:
        """The field of the request that holds the format, for messages."""
        return self._place

    @property
    def strict(self) -> bool:
        """Whether keywords that are not supported are refused instead of left out."""
        return self.json_schema is not None and bool(self.json_schema.strict)

    def at(self, place: str) -> "ResponseFormat":
        """Return this format, held by the field `place` of the request."""
        self._place = place
        return self

    @model_validator(mode="after")
    def _complete(self) -> "ResponseFormat":
        nested = None if self.json_schema is None else self.json_schema.schema_
        if self.type == "json_schema" and nested is None and (self.json_schema is not None or self.schema_ is None):
            raise ValueError("json_schema.schema is missing")
        if self.type in ("regex", "lark", "gbnf") and getattr(self, self.type) is None:
            raise ValueError(f"{self.type} is missing")
        return self


Schema = dict[str, Any] | LongText  # some clients send a schema as JSON in a string
Choices = Annotated[list[Annotated[str, Field(min_length=1, max_length=4096)]], Field(min_length=1, max_length=1024)]


class StructuredOutputs(Strict):
    """vLLM's constraint of a reply; exactly one of the first five."""

    json_: Schema | None = Field(None, alias="json")
    regex: LongText | None = None
    choice: Choices | None = None
    grammar: LongText | None = None
    json_object: bool | None = None
    structural_tag: None = None
    whitespace_pattern: None = None
    disable_any_whitespace: No | None = None
    disable_additional_properties: No | None = None


class Constraints(Strict):
    """The constraints of a reply of OpenAI, llama.cpp, SGLang and vLLM; a request may use one."""

    response_format: ResponseFormat | None = None
    grammar: LongText | None = None
    json_schema: Schema | None = None
    regex: LongText | None = None
    ebnf: LongText | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | None = None
    guided_regex: LongText | None = None
    guided_choice: Choices | None = None
    guided_grammar: LongText | None = None


def output_format(body: Constraints) -> ResponseFormat | None:
    """Return the format that a request asks for; None for any text. Raises ApiError for more than one."""
    formats = _requested(body)
    if len(formats) > 1:
        names = " and ".join(list(formats)[:2])
        param = next(reversed(formats))
        raise ApiError(400, f"{names} cannot be combined", "invalid_value", param=param)
    return next(iter(formats.values()), None)


def _requested(body: Constraints) -> dict[str, ResponseFormat]:
    formats: dict[str, ResponseFormat] = {}
    if body.response_format is not None and body.response_format.type != "text":
        formats["response_format"] = body.response_format
    vllm = body.structured_outputs or StructuredOutputs.model_validate({})
    schemas: dict[str, Schema | None] = {
        "json_schema": body.json_schema,
        "guided_json": body.guided_json,
        "structured_outputs.json": vllm.json_,
        "structured_outputs.json_object": {"type": "object"} if vllm.json_object else None,
    }
    for field, schema in schemas.items():
        if schema is not None:
            formats[field] = json_schema_format(_parsed(schema, field), field)
    patterns = {"regex": body.regex, "guided_regex": body.guided_regex, "structured_outputs.regex": vllm.regex}
    for field, pattern in patterns.items():
        if pattern is not None:
            formats[field] = _format(type="regex", regex=pattern).at(field)
    choices = {"guided_choice": body.guided_choice, "structured_outputs.choice": vllm.choice}
    for field, words in choices.items():
        if words is not None:
            rule = " | ".join(json.dumps(word, ensure_ascii=False) for word in words)
            formats[field] = _format(type="lark", lark=f"start: {rule}").at(field)
    grammars = {
        "grammar": body.grammar,
        "ebnf": body.ebnf,
        "guided_grammar": body.guided_grammar,
        "structured_outputs.grammar": vllm.grammar,
    }
    for field, grammar in grammars.items():
        if grammar:
            formats[field] = _format(type="gbnf", gbnf=grammar).at(field)
    return formats


def _format(**fields: Any) -> ResponseFormat:
    return ResponseFormat.model_validate(fields)


def json_schema_format(schema: dict[str, Any], place: str) -> ResponseFormat:
    """Return the format of JSON that matches `schema`, held by the field `place` of the request."""
    return _format(type="json_schema", json_schema={"schema": schema}).at(place)


def _parsed(schema: Schema, field: str) -> dict[str, Any]:
    if isinstance(schema, dict):
        return schema
    try:
        value = json.loads(schema)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise invalid_value(field, "not a JSON schema")
    return value
