"""The programs that documents name start: nothing that they import has moved."""

import importlib
from pathlib import Path

import pytest

# Run by other environments, with modules of theirs.
ELSEWHERE = {"compressor_child", "transformers_child", "vllm_child", "vllm_plain"}
PROGRAMS = sorted(
    path.stem
    for path in Path(__file__).parent.glob("*.py")
    if "__main__" in path.read_text() and path.stem not in ELSEWHERE and not path.stem.startswith("test_")
)


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_finds_what_it_imports(name: str) -> None:
    assert callable(importlib.import_module(f"tests.benchmarks.{name}").main)
