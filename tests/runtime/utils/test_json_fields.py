"""Test JSON fields of untrusted files: B1 and the types and ranges of B3, each refused naming file and key."""

from pathlib import Path

import pytest

from mycli.cli.remedies import remedy
from mycli.runtime.errors import ModelError
from mycli.runtime.utils.json_fields import MAX_JSON_BYTES, Fields, parse_object, read_object, strict_json

HOSTILE = {
    "B1-empty": (b"", "empty"),
    "B1-blank": (b" \n", "empty"),
    "B1-not-json": (b"{'a': 1}", r":1:2: not JSON"),
    "B1-truncated": (b'{"a": 1,\n "b":', r":2:"),
    "B1-bom": (b'\xef\xbb\xbf{"a": 1}', "byte-order mark"),
    "B1-nan": (b'{"a": NaN}', "NaN"),
    "B1-infinity": (b'{"a": -Infinity}', "Infinity"),
    "B1-duplicate-key": (b'{"a": 1, "b": {"c": 1, "c": 2}}', "duplicate key 'c'"),
    "B1-list-at-top": (b"[1, 2]", "object, not a list"),
    "B1-number-at-top": (b"7", "object, not a int"),
    "B1-too-large": (b'{"a": "' + b"x" * MAX_JSON_BYTES + b'"}', "more than"),
    "B1-not-utf8": (b'{"a": "\xff"}', "utf-8"),
    "B1-deep": (b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "deep"),
    "B1-huge-integer": (b'{"a": ' + b"9" * 5000 + b"}", "digits"),
}


@pytest.mark.parametrize("case", HOSTILE, ids=str)
def test_hostile_json_is_refused(case: str, tmp_path: Path) -> None:
    data, message = HOSTILE[case]
    with pytest.raises(ModelError, match=message) as caught:
        parse_object(data, "config.json")
    assert caught.value.message.startswith("config.json") and remedy(caught.value)
    (tmp_path / "config.json").write_bytes(data)
    with pytest.raises(ModelError, match="config.json"):
        read_object(tmp_path / "config.json")


def test_only_files_may_hold_infinity_and_numbers_may_not() -> None:
    data = b'{"time_step_limit": [0.0, Infinity], "theta": Infinity}'
    fields = parse_object(data, "config.json")
    assert fields.values["time_step_limit"] == [0.0, float("inf")]
    with pytest.raises(ModelError, match="config.json: theta"):
        fields.number("theta")
    with pytest.raises(ValueError, match="Infinity is not JSON"):
        strict_json(data)


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    for path, problem in ((tmp_path / "none.json", "no such file"), (tmp_path, "not a regular file")):
        with pytest.raises(ModelError, match=problem):
            read_object(path)


@pytest.mark.parametrize("value", [True, 1.5, 1.0, "7", -1, 0, 1 << 40, [7], {}], ids=lambda value: f"B3-{value!r}")
def test_an_integer_is_nothing_else(value: object) -> None:
    with pytest.raises(ModelError, match="config.json: size"):
        Fields({"size": value}, "config.json").integer("size")


@pytest.mark.parametrize("value", [True, "1", float("nan"), float("inf"), -1.0, []], ids=repr)
def test_a_number_is_finite_and_in_range(value: object) -> None:
    with pytest.raises(ModelError, match="config.json: theta"):
        Fields({"theta": value}, "config.json").number("theta")


@pytest.mark.parametrize("value", [0, 1, "true", []], ids=repr)
def test_a_boolean_is_true_or_false(value: object) -> None:
    with pytest.raises(ModelError, match="true or false"):
        Fields({"flag": value}, "config.json").boolean("flag", False)


def test_missing_and_null_are_the_default_or_an_error() -> None:
    fields = Fields({"null": None}, "config.json")
    assert (fields.integer("null", 4), fields.number("gone", 0.5), fields.text("gone", "x")) == (4, 0.5, "x")
    assert fields.boolean("null", False) is False
    with pytest.raises(ModelError, match="config.json: null must be true or false"):
        fields.boolean("null", True)
    assert fields.boolean("gone", True) and fields.array("null", int) == [] and fields.object("gone").values == {}
    for read in (fields.integer, fields.number, fields.text):
        with pytest.raises(ModelError, match="config.json: null is missing"):
            read("null")


def test_nested_objects_name_their_path_and_lists_their_type() -> None:
    fields = Fields({"rope": {"factor": "x"}, "ids": [1, True], "many": [0] * 11}, "config.json")
    with pytest.raises(ModelError, match="config.json: rope: factor"):
        fields.object("rope").number("factor")
    with pytest.raises(ModelError, match="type int, not True"):
        fields.array("ids", int)
    for value, limit in (("many", 10), ("rope", 11)):
        with pytest.raises(ModelError, match=f"a list of at most {limit} values"):
            fields.array(value, int, limit)
    assert fields.array("many", int, 11) == [0] * 11
