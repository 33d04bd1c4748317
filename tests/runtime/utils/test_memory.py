"""Test pausing the garbage collector: only within the context, then restored, without scanning frozen objects."""

import gc
import subprocess
import sys

import pytest

from mycli.runtime.utils.memory import gc_paused
from tests.support.paths import ROOT

EXEMPT = """
import gc
from mycli.runtime.utils.memory import gc_freeze
kept = [[] for _ in range(10_000)]
gc_freeze()
print(gc.get_freeze_count() > 10_000, gc.isenabled(), len(gc.get_objects()) < 10_000)
"""


@pytest.mark.parametrize("before", [True, False])
def test_it_is_as_before_afterwards_whatever_happens(before: bool) -> None:
    was = gc.isenabled()
    try:
        (gc.enable if before else gc.disable)()
        with pytest.raises(KeyError), gc_paused():
            assert not gc.isenabled()
            raise KeyError
        assert gc.isenabled() == before
    finally:
        (gc.enable if was else gc.disable)()


def test_what_is_exempted_is_not_looked_at_again() -> None:
    command = [sys.executable, "-c", EXEMPT]
    done = subprocess.run(command, env={"PYTHONPATH": str(ROOT / ".links")}, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "True", "True"]
