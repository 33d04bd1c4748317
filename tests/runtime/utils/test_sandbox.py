"""Test the helper process with the template renderer: answers, errors, deadlines, crashes, and restart."""

import os
import signal
import sys
import threading
import zipfile
from pathlib import Path
from typing import Any

import pytest

from mycli.runtime.errors import ResourceError
from mycli.runtime.utils.sandbox import WorkerError, WorkerProcess


def ask(child: WorkerProcess, source: str, seconds: float = 20.0) -> Any:
    return child.call({"template": source, "variables": [{"x": "é\ud800\n"}]}, seconds)


@pytest.fixture
def child() -> WorkerProcess:
    return WorkerProcess("mycli.runtime.tokenizer.chat_template_worker", None, 256 << 20, reply_bytes=10_000)


def test_answers_and_stays(child: WorkerProcess) -> None:
    assert ask(child, "{{ x }}") == ["é\ud800\n"]
    process = child._process
    assert ask(child, "b") == ["b"] and child._process is process


def test_one_that_was_started_before_answers_the_first_question(child: WorkerProcess) -> None:
    child.start()
    process = child._process
    assert process is not None and process.poll() is None
    child.start()
    assert ask(child, "{{ x }}") == ["é\ud800\n"] and child._process is process


def test_one_that_died_before_it_was_asked_is_told(child: WorkerProcess) -> None:
    child.start()
    process = child._process
    assert process is not None
    process.kill()
    process.wait()
    with pytest.raises(ResourceError, match="did not start"):
        ask(child, "a")
    assert ask(child, "a") == ["a"] and child._process is not process


def test_error_inside_keeps_the_process(child: WorkerProcess) -> None:
    with pytest.raises(WorkerError) as caught:
        ask(child, "{{ 1 // 0 }}")
    assert caught.value.kind == "ZeroDivisionError"
    process = child._process
    assert ask(child, "b") == ["b"] and child._process is process


@pytest.mark.parametrize(
    ("source", "seconds", "kind"),
    [
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", 0.5, "Deadline"),
        ("{{ 'a' * 20000 }}", 20.0, "Death"),  # longer than reply_bytes
    ],
)
def test_new_process_after_a_lost_one(child: WorkerProcess, source: str, seconds: float, kind: str) -> None:
    assert ask(child, "a") == ["a"]
    process = child._process
    assert process is not None
    with pytest.raises(WorkerError) as caught:
        ask(child, source, seconds)
    assert caught.value.kind == kind and process.returncode is not None
    assert ask(child, "b") == ["b"]


def test_killed_from_outside(child: WorkerProcess) -> None:
    ask(child, "a")
    assert child._process is not None
    os.kill(child._process.pid, signal.SIGKILL)
    child._process.wait()
    assert ask(child, "b") == ["b"]


def test_request_larger_than_a_pipe_to_a_process_that_stopped_reading(child: WorkerProcess) -> None:
    ask(child, "a")
    assert child._process is not None
    os.kill(child._process.pid, signal.SIGSTOP)
    with pytest.raises(WorkerError) as caught:
        ask(child, "a" * 1_000_000, 0.5)
    assert caught.value.kind == "Deadline"


def test_interrupt_while_waiting_leaves_no_process(child: WorkerProcess) -> None:  # D15
    ask(child, "a")
    process = child._process
    assert process is not None
    timer = threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        ask(child, "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}")
    assert process.returncode is not None
    assert ask(child, "b") == ["b"]


def test_ends_with_its_owner() -> None:
    owner = WorkerProcess("mycli.runtime.tokenizer.chat_template_worker", None, 256 << 20, reply_bytes=10_000)
    ask(owner, "a")
    process = owner._process
    assert process is not None
    del owner
    process.wait(10)


PROBE = """
import sys
from mycli.runtime.utils import sandbox

def handler(setup):
    return lambda request: [sys.path, sandbox.__file__]
"""


def test_finds_modules_as_its_owner_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The child gets a zip file and an import hook's name unchanged, but not the working folder."""
    work, eggs = tmp_path / "work", tmp_path / "probe.egg"
    work.mkdir()
    (work / "probe.py").write_text("raise ValueError('not this one')")
    with zipfile.ZipFile(eggs, "w") as file:
        file.writestr("probe.py", PROBE)
    monkeypatch.chdir(work)
    hook = "__editable__.some_package.finder.__path_hook__"
    for first in ("", str(work)):  # as under `-c`, as under `-m`
        monkeypatch.setattr(sys, "path", [first, str(eggs), hook, *sys.path])
        modules, program = WorkerProcess("probe", None, 256 << 20, reply_bytes=100_000).call(None, 20.0)
        assert modules == [str(eggs), hook, *modules[2:]] and not {"", str(work)} & set(modules)
        assert program == sys.modules[WorkerProcess.__module__].__file__, "the code of the owner, not another install"


def test_the_working_folder_may_be_gone(child: WorkerProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    work.rmdir()
    assert ask(child, "a") == ["a"]


def test_one_that_does_not_start_is_no_fault_of_the_model() -> None:
    with pytest.raises(ResourceError, match="did not start"):
        WorkerProcess("mycli.runtime.none", None, 256 << 20, reply_bytes=100).call(None, 20.0)
