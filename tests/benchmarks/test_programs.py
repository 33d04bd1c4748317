"""The tests that the programs named in the documentation start with all their imports."""

import importlib
from pathlib import Path

import pytest

# Run in other environments, with packages installed there.
ELSEWHERE = {"peer_child", "transformers_child", "vllm_child", "vllm_plain"}
PROGRAMS = sorted(
    path.stem
    for path in Path(__file__).parent.glob("*.py")
    if "__main__" in path.read_text() and path.stem not in ELSEWHERE and not path.stem.startswith("test_")
)


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_finds_what_it_imports(name: str) -> None:
    assert callable(importlib.import_module(f"tests.benchmarks.{name}").main)
