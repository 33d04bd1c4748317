"""The oldest supported Triton is the one that `make test-floor` compiles kernels with."""

import re
import tomllib

from tests.support.paths import ROOT


def test_the_floor_of_triton_is_what_make_compiles_with() -> None:
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["dependencies"]
    (allowed,) = (
        re.match(r"triton>=([\d.]+)", dependency)[1] for dependency in dependencies if dependency.startswith("triton")
    )  # type: ignore[index]  # always matches
    (pinned,) = re.findall(r"triton==([\d.]+)", (ROOT / "Makefile").read_text("utf-8"))
    assert pinned.split(".")[:2] == allowed.split(".")[:2]
    assert "make test-floor" in (ROOT / ".ci" / "run").read_text("utf-8")
