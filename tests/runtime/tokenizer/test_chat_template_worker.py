"""Test what a chat template can do, in this process: values as JSON, lists, namespaces, and the limit of its output."""

from typing import Any

import pytest
from jinja2.exceptions import SecurityError

from mycli.runtime.tokenizer import chat_template_worker as worker


def render(source: str, *variables: dict[str, Any]) -> list[str]:
    return worker.handler(None)({"template": source, "variables": variables or ({},)})


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ {'b': '<é>', 'a': [1, none]} | tojson }}", '{"b": "<é>", "a": [1, null]}'),
        ("{{ {'b': 'é', 'a': 1} | tojson(ensure_ascii=true) }}", r'{"b": "\u00e9", "a": 1}'),
        ("{{ {'b': 2, 'a': 1} | tojson(sort_keys=true, separators=(',', ':')) }}", '{"a":1,"b":2}'),
        ("{{ [1] | tojson(indent=2) }}", "[\n  1\n]"),
        ("a{% generation %}b{{ 1 }}{% endgeneration %}c", "ab1c"),
        ("  {% if true %}\na\n  {% endif %}\nb", "a\nb"),
        ("{{ dict([('a', 1)], b=2) }} {{ dict.fromkeys('ab', 0) }}", "{'a': 1, 'b': 2} {'a': 0, 'b': 0}"),
        ("{% set n = namespace({'a': 1}, b=2) %}{% set n.c = 3 %}{{ n.a }}{{ n.b }}{{ n.c }}", "123"),
        ("{% set rows = [1, 2] %}{% do rows.append(3) %}{{ rows.pop() }}{{ rows }}", "3[1, 2]"),
    ],
)
def test_a_template_is_rendered_as_its_author_meant(source: str, text: str) -> None:
    assert render(source) == [text]


@pytest.mark.parametrize(
    "source",
    [
        "{% set n = namespace(_a=1) %}",
        "{% set n = namespace({'_a': 1}) %}",
        "{% set n = namespace() %}{% set n._a = 1 %}",
        "{{ {'a': 1}.pop('a') }}",
        "{{ [1].clear() }}",
        "{{ rows.append(1) }}",
        "{{ rows[0].parts.pop() }}",
        "{{ rows[1][0].append(1) }}",
    ],
)
def test_a_template_changes_only_lists_that_it_made(source: str) -> None:
    with pytest.raises(SecurityError):
        render(source, {"rows": [{"parts": ["a"]}, [["b"]]]})


def test_a_conversation_has_a_text_of_limited_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "MAX_OUTPUT", 5)
    assert render("{{ a }}{{ b }}", {"a": "ab", "b": "cde"}, {"a": "fghi", "b": "j"}) == ["abcde", "fghij"]
    with pytest.raises(worker.OutputTooLong):
        render("{{ a }}{{ b }}", {"a": "ab", "b": "cdef"})


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("{{ a }}{{ raise_exception }}{{ namespace }}", ["a"]),
        ("{% set a = 1 %}{{ a }}{{ b }}", ["b"]),
        ("{% if b %}{% set a = 1 %}{% endif %}{{ a }}", ["b"]),
        ("{% if a is not defined %}{% set a = 1 %}{% endif %}{{ a }}", ["a"]),
        ("{% if a is undefined %}{% set a = 1 %}{% endif %}{{ a }}", ["a"]),
        ("{% if a is none %}{% set a = 1 %}{% endif %}{{ a }}", []),
        ("{% if b.a is defined %}{% set a = 1 %}{% endif %}{{ a }}", ["b"]),
    ],
)
def test_the_arguments_of_a_template_are_what_it_reads_and_does_not_set(source: str, names: list[str]) -> None:
    assert worker.handler(None)({"template": source}) == names
