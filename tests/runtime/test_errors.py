"""Test what is shown of an error with causes: what failed, and why in the first place."""

from mycli.runtime.errors import summarize_error


def test_an_error_is_shown_with_the_first_of_its_causes() -> None:
    first = OSError("no compiler\nsearched in 3 folders")
    second = ValueError("not a constant")
    last = RuntimeError("at line 3\nof the kernel")
    last.__cause__, second.__cause__ = second, first
    assert summarize_error(last) == "RuntimeError: at line 3 OSError: no compiler"
    assert summarize_error(second) == "ValueError: not a constant OSError: no compiler"
    assert summarize_error(first) == "OSError: no compiler" and summarize_error(KeyError()) == "KeyError"
