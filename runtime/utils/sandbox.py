"""A helper process for work that a model's files decide: killed when late, bounded in memory, restarted when needed.

Knows pipes, limits and deadlines. Does not know what is asked: `serve` is given a handler, `ask` returns its JSON.
The helper runs this package's own code with an almost empty environment (no tokens, no keys) and imports no torch.
It finds that code wherever this process found it: in a wheel, an editable install, a zip file or a bare checkout.
"""

import contextlib
import json
import os
import resource
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mycli.runtime.errors import ResourceError

START_SECONDS = 60.0  # our own imports only; long because a busy machine is not the model's fault
# The namespace `mycli` is given, not searched: an editable install finds it through an import hook, which this isolated
# interpreter has only where the hook was set up by its own site-packages.
_BOOT = """
import json, sys, types
sys.path[:], home = json.loads(sys.stdin.buffer.readline())
sys.modules["mycli"] = namespace = types.ModuleType("mycli")
namespace.__path__ = [home]
from mycli.runtime.utils.sandbox import serve
from {} import handler
serve(handler)
"""
_HOME = Path(__file__).parents[2]  # the folder that holds the package `runtime`
_KEPT = ("PATH", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "TZ", "SYSTEMROOT")


class ChildError(Exception):
    """The helper did not answer: `kind` is the name of the exception inside it, or "Deadline" or "Death"."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        with contextlib.suppress(OSError):  # the unflushed rest of a request to a dead process
            if pipe:
                pipe.close()


def _search_path() -> list[str]:
    """Where this process finds modules, each entry as it stands: one may be a name that only an import hook knows.

    Without the working folder, which Python puts in front for `-c` and `-m`: whose files lie there, nobody knows.
    """
    first, *others = sys.path
    try:
        unknown = first == os.getcwd() != str(_HOME.parent)
    except FileNotFoundError:  # the working folder was removed
        unknown = False
    return [entry for entry in (others if unknown else sys.path) if entry]


class Child:
    """One helper process serving `module`.handler, started at the first question or before; it ends with this object.

    `setup` is JSON that the handler is built from, `memory` the address space in bytes, `reply_bytes` the longest
    answer that is read. Safe to use from several threads; one question at a time.
    """

    def __init__(self, module: str, setup: object, memory: int, reply_bytes: int) -> None:
        self._module = module
        self._first = json.dumps({"setup": setup, "memory": memory})
        self._reply_bytes = reply_bytes
        self._process: subprocess.Popen[bytes] | None = None
        self._starting = False
        self._lock = threading.Lock()

    def start(self) -> None:
        """Begin to start the helper: it comes up while its caller does something else. Nothing is waited for."""
        with self._lock:
            if self._process is None:
                self._process = self._begin()

    def ask(self, request: object, seconds: float) -> Any:
        """The handler's answer to `request`.

        Raises ChildError, after which the next question gets a new helper, and ResourceError where none can be started.
        """
        with self._lock:
            if self._process is None or (not self._starting and self._process.poll() is not None):
                self._process = self._begin()
            if self._starting:
                self._finish(self._process)
            line = json.dumps({"seconds": seconds, "request": request})
            reply = self._exchange(self._process, line, seconds)
        if "kind" in reply:
            raise ChildError(reply["kind"], reply["message"])
        return reply["answer"]

    def _begin(self) -> subprocess.Popen[bytes]:
        """A helper that has been sent what it begins with, and has not answered yet."""
        environment = {name: os.environ[name] for name in _KEPT if name in os.environ}
        environment |= {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"}
        process = subprocess.Popen(
            [sys.executable, "-I", "-c", _BOOT.format(self._module)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,  # Ctrl-C is for the person's process, which then ends this one
        )
        weakref.finalize(self, _stop, process)
        self._starting = True
        assert process.stdin
        with contextlib.suppress(OSError):  # it died at once: there will be no answer
            process.stdin.write(f"{json.dumps([_search_path(), str(_HOME)])}\n{self._first}\n".encode())
            process.stdin.flush()
        return process

    def _finish(self, process: subprocess.Popen[bytes]) -> None:
        """Wait until the helper has come up. Raises ResourceError where it does not."""
        self._starting = False
        try:
            self._exchange(process, "", START_SECONDS)
        except ChildError as error:  # no request was seen yet, so no model is to blame
            problem = f"the helper process for {self._module} did not start ({error.kind})"
            raise ResourceError(problem, "check whether memory is limited, or reinstall this program") from None

    def _exchange(self, process: subprocess.Popen[bytes], line: str, seconds: float) -> dict[str, Any]:
        """Send a line, if there is one, and return the line that comes back.

        The pipes may block, so a timer ends the wait by killing.
        """
        assert process.stdin and process.stdout
        late = threading.Event()

        def expire() -> None:
            late.set()
            process.kill()

        timer = threading.Timer(seconds, expire)
        timer.daemon = True
        timer.start()
        reply = b""
        try:
            if line:
                process.stdin.write(line.encode() + b"\n")
                process.stdin.flush()
            reply = process.stdout.readline(self._reply_bytes)
        except OSError:
            pass  # it died with the request half written: the same as no reply
        except BaseException:  # Ctrl-C between request and reply: the pipe is out of step
            _stop(process)
            raise
        finally:
            timer.cancel()
        if reply.endswith(b"\n") and not late.is_set():
            result: dict[str, Any] = json.loads(reply)
            return result
        _stop(process)
        if late.is_set():
            raise ChildError("Deadline", f"took more than {seconds:g} s")
        raise ChildError("Death", "needed too much memory or time, or answered too much")


def _limit(which: int, soft: int) -> None:
    with contextlib.suppress(ValueError, OSError):  # macOS refuses some limits; the deadline still holds there
        _, hard = resource.getrlimit(which)
        resource.setrlimit(which, (soft, hard))


def serve(build: Callable[[Any], Callable[[Any], Any]]) -> None:
    """The helper's side: answer lines from stdin until it closes. `build(setup)` gives what answers, at first use.

    The processor limit of each request covers a parent that was killed and cannot enforce the deadline.
    """
    first = json.loads(sys.stdin.buffer.readline())
    _limit(resource.RLIMIT_AS, first["memory"])
    _limit(resource.RLIMIT_FSIZE, 0)
    _limit(resource.RLIMIT_CORE, 0)
    sys.stdout.write("{}\n")
    sys.stdout.flush()
    handler: Callable[[Any], Any] | None = None
    for line in sys.stdin.buffer:
        question = json.loads(line)
        _limit(resource.RLIMIT_CPU, int(time.process_time() + question["seconds"] + 2))
        try:
            handler = handler or build(first["setup"])
            reply = json.dumps({"answer": handler(question["request"])})
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic of a Rust library is no Exception
            reply = json.dumps({"kind": type(error).__name__, "message": str(error)[:1000]})
        sys.stdout.write(reply + "\n")
        sys.stdout.flush()
