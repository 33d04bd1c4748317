"""A worker process for code and patterns from model files: killed at a deadline, bounded in memory, restarted on use.

The worker runs this package's own code, found where this process found it, with an almost empty environment: no tokens,
no keys.
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

START_SECONDS = 60.0  # imports only; long, so that a busy machine does not fail a good model
# The namespace `mycli` is created here: an editable install finds it through an import hook, which an isolated
# interpreter (-I) lacks unless its own site-packages installs the hook.
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
_PASSED_VARIABLES = ("PATH", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "TZ", "SYSTEMROOT")


class WorkerError(Exception):
    """The call failed. kind: the exception's name in the worker, "Deadline" or "Death"."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        with contextlib.suppress(OSError):  # unflushed data for a dead process
            if pipe:
                pipe.close()


def _search_path() -> list[str]:
    # Without the working folder, which Python prepends for -c and -m: its files are not trusted. Entries are passed
    # unchanged, as one may be a name that only an import hook knows.
    first, *others = sys.path
    try:
        untrusted = first == os.getcwd() != str(_HOME.parent)
    except FileNotFoundError:  # the working folder was removed
        untrusted = False
    return [entry for entry in (others if untrusted else sys.path) if entry]


class WorkerProcess:
    """One worker process that serves `module`.handler(setup) with `memory` bytes of address space; thread-safe."""

    def __init__(self, module: str, setup: object, memory: int, reply_bytes: int) -> None:
        self._module = module
        self._first = json.dumps({"setup": setup, "memory": memory})
        self._reply_bytes = reply_bytes
        self._process: subprocess.Popen[bytes] | None = None
        self._starting = False
        self._lock = threading.Lock()

    def start(self) -> None:
        with self._lock:
            if self._process is None:
                self._process = self._begin()

    def call(self, request: object, seconds: float) -> Any:
        """Return the handler's answer. Raises WorkerError, also after `seconds`, or ResourceError without a process."""
        with self._lock:
            if self._process is None or (not self._starting and self._process.poll() is not None):
                self._process = self._begin()
            if self._starting:
                self._finish(self._process)
            line = json.dumps({"seconds": seconds, "request": request})
            reply = self._exchange(self._process, line, seconds)
        if "kind" in reply:
            raise WorkerError(reply["kind"], reply["message"])
        return reply["answer"]

    def interrupt(self) -> None:
        """Kill the process: a call that another thread waits for fails, and the next one starts it again."""
        process = self._process
        if process is not None:
            process.kill()

    def _begin(self) -> subprocess.Popen[bytes]:
        environment = {name: os.environ[name] for name in _PASSED_VARIABLES if name in os.environ}
        environment |= {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"}
        process = subprocess.Popen(
            [sys.executable, "-I", "-c", _BOOT.format(self._module)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,  # Ctrl-C goes to the main process, which then ends this one
        )
        weakref.finalize(self, _stop, process)
        self._starting = True
        assert process.stdin
        with contextlib.suppress(OSError):  # it has died; `_finish` reports it
            process.stdin.write(f"{json.dumps([_search_path(), str(_HOME)])}\n{self._first}\n".encode())
            process.stdin.flush()
        return process

    def _finish(self, process: subprocess.Popen[bytes]) -> None:
        self._starting = False
        try:
            self._exchange(process, "", START_SECONDS)
        except WorkerError as error:  # no request was read yet, so no model is at fault
            problem = f"the worker process for {self._module} did not start ({error.kind})"
            raise ResourceError(problem, "check whether memory is limited, or reinstall this program") from None

    def _exchange(self, process: subprocess.Popen[bytes], line: str, seconds: float) -> dict[str, Any]:
        # Both pipes may block, so a timer kills the process at the deadline.
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
            pass  # it died while reading the request: no reply
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
            raise WorkerError("Deadline", f"took more than {seconds:g} s")
        raise WorkerError("Death", "needed too much memory or time, or answered too much")


def _limit(which: int, soft: int) -> None:
    with contextlib.suppress(ValueError, OSError):  # macOS refuses some limits; the deadline still holds there
        _, hard = resource.getrlimit(which)
        resource.setrlimit(which, (soft, hard))


def serve(build: Callable[[Any], Callable[[Any], Any]]) -> None:
    """Run in the worker: answer JSON lines from stdin until it closes, with the handler `build(setup)`."""
    first = json.loads(sys.stdin.buffer.readline())
    _limit(resource.RLIMIT_AS, first["memory"])
    _limit(resource.RLIMIT_FSIZE, 0)
    _limit(resource.RLIMIT_CORE, 0)
    sys.stdout.write("{}\n")
    sys.stdout.flush()
    handler: Callable[[Any], Any] | None = None
    for line in sys.stdin.buffer:
        request = json.loads(line)
        # Also ends a request whose parent was killed and cannot enforce the deadline.
        _limit(resource.RLIMIT_CPU, int(time.process_time() + request["seconds"] + 2))
        try:
            handler = handler or build(first["setup"])
            reply = json.dumps({"answer": handler(request["request"])})
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a Rust panic is not an Exception
            reply = json.dumps({"kind": type(error).__name__, "message": str(error)[:1000]})
        sys.stdout.write(reply + "\n")
        sys.stdout.flush()
