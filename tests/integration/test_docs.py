"""The documentation matches the code: generated parts are fresh, and files and tests that pages name exist."""

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

from tests.support.code_examples import EXAMPLE, with_code
from tests.support.family_tables import gpu_pass, with_tables
from tests.support.forked import ForkedProcess
from tests.support.language import files as language_files
from tests.support.language import pages
from tests.support.paths import ROOT
from tests.support.published import PUBLISHED, published

DOCS = ROOT / "docs"


def test_examples_of_contributing_are_up_to_date() -> None:
    text = (DOCS / "contributing.md").read_text()
    assert len(EXAMPLE.findall(text)) >= 10
    assert with_code(text) == text, "run: make docs"


def test_files_that_pages_name_exist() -> None:
    files = [f"/{path.as_posix()}" for path in language_files("cli", "quant", "runtime", "tests")]
    for page in pages():
        names = re.findall(r"`([\w/]+\.(?:py|cpp|h))(?:::\w+)?`", (ROOT / page).read_text())
        missing = [name for name in names if not any(file.endswith(f"/{name}") for file in files)]
        assert not missing, f"{page}: {missing}"


def _anchors(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.+)$", page.read_text(), re.M)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def test_links_between_pages_lead_somewhere() -> None:
    for page in pages():
        for target, anchor in re.findall(r"\]\(([^)#:\s]*)(?:#([^)]+))?\)", (ROOT / page).read_text()):
            path = (ROOT / page).parent / target if target else ROOT / page
            assert path.exists(), f"{page}: {target}"
            assert not anchor or anchor in _anchors(path), f"{page}: {target}#{anchor}"


def test_server_faults_name_existing_tests() -> None:
    table = re.findall(r"^\| G(\d+) \|.*$", text := (DOCS / "results" / "server.md").read_text(), re.M)
    assert sorted({int(number) for number in table}) == list(range(1, 44))
    tests = re.findall(r"`([\w/]+\.py)::(test_\w+)`", text)
    assert len(tests) >= 43
    assert not [test for test in tests if f"def {test[1]}(" not in (ROOT / "tests" / test[0]).read_text()]


def test_tables_of_families_are_up_to_date() -> None:
    text = (DOCS / "families.md").read_text()
    assert with_tables(text) == text, "run: make docs"


def test_counts_of_gpu_passes_are_up_to_date() -> None:
    kinds = Counter(re.split("[:,]", gpu_pass(published(name)))[0] for name in PUBLISHED)
    counts = f"the fused pass decodes {kinds['fused']}, the captured pass {kinds['captured']} and the plain pass"
    text = " ".join((DOCS / "kernels.md").read_text().split())
    assert f"Of {len(PUBLISHED)} published models {counts} {kinds['plain']}" in text


def test_the_program_of_python_md_prints_what_its_comments_say(environment: dict[str, str], tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / "python.md").read_text(), re.S)
    expected = re.findall(r"^ *print\(.*\)  # (.+)$", "".join(blocks), re.M)
    assert len(blocks) >= 7 and len(expected) >= 7
    with ForkedProcess(
        [sys.executable, "-c", "".join(blocks)],
        cwd=tmp_path,
        env=environment | {"PYTHONPATH": str(ROOT / ".links")},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        output, errors = process.communicate(timeout=240)
    assert (process.returncode, errors) == (0, "") and output.splitlines() == expected
