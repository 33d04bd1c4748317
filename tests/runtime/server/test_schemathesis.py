"""Test the OpenAPI description with schemathesis: generated requests are answered as described, and never by a 500.

Runs if its program is on PATH, since it has dependencies of its own.
"""

import shutil
import subprocess
from pathlib import Path

import pytest

from mycli.runtime.engine.loading.loader import LoadedModel
from tests.support.served import ScriptedEngine, serving

PROGRAM = shutil.which("schemathesis")
# Its own list of refusals lacks 413, for a body with more items than a schema allows.
CONFIG = """
[checks.negative_data_rejection]
expected-statuses = [400, 401, 403, 404, 405, 406, 409, 413, 415, 422, 428, 429, "5xx"]
"""
# A request may match its schema and still be refused: for the context, the vocabulary, or a combination of fields.
CHECKS = ("--checks", "all", "--exclude-checks", "positive_data_acceptance", "--max-response-time", "60")


@pytest.mark.slow
@pytest.mark.skipif(PROGRAM is None, reason="schemathesis is not on PATH")
def test_requests_made_from_the_description_are_answered_as_it_says(loaded: LoadedModel, tmp_path: Path) -> None:
    assert PROGRAM is not None
    (tmp_path / "schemathesis.toml").write_text(CONFIG)
    with serving(loaded, ScriptedEngine(lambda request: [5, 6, 7])) as served:
        done = subprocess.run(
            [PROGRAM, "run", f"{served.url}/openapi.json", *CHECKS, "--phases", "coverage,fuzzing", "--seed", "1"]
            + ["--max-examples", "25", "--continue-on-failure", "--suppress-health-check", "all"],
            capture_output=True,
            text=True,
            cwd=tmp_path,  # where it finds its settings and stores its results
        )
        assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
        assert not [line for line in served.log if "failed:" in line or "Error:" in line]
