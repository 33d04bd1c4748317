"""Test what the process of a model is given."""

import os

import pytest

from mycli.runtime.server.router.process import child_environment


def test_an_environment_has_all_variables_but_those_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MYCLI_API_KEY", "secret")
    expected = {name: value for name, value in os.environ.items() if name != "MYCLI_API_KEY"}
    assert child_environment(("MYCLI_API_KEY", "ABSENT")) == expected and "PATH" in expected
