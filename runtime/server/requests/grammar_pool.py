"""Compiles the grammars of requests in threads of their own, so that a costly one delays no other kind of request."""

import asyncio
import queue
from concurrent.futures import ThreadPoolExecutor
from threading import Lock
from typing import Any

from mycli.runtime.sampling.grammars.grammar import Grammar
from mycli.runtime.sampling.grammars.probe import GrammarProbe
from mycli.runtime.server.http.api_error import ApiError, as_api_errors

_THREADS = 2


class _Job:
    # One compilation. `cancel` may be called from another thread at any time.

    def __init__(self, grammar: Grammar, probes: "queue.SimpleQueue[GrammarProbe]") -> None:
        self._grammar, self._probes = grammar, probes
        self._lock = Lock()
        self._cancelled = False
        self._probe: GrammarProbe | None = None

    def run(self) -> None:
        probe = self._probes.get()
        try:
            with self._lock:
                if self._cancelled:
                    return
                self._probe = probe
            self._grammar.compile(probe)
        finally:
            with self._lock:
                self._probe = None
            self._probes.put(probe)

    def cancel(self) -> None:
        with self._lock:
            self._cancelled = True
            if self._probe is not None:
                self._probe.interrupt()


class GrammarPool:
    """Threads and worker processes for grammars over `vocabulary` tokens."""

    def __init__(self, vocabulary: int) -> None:
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="grammar")
        self._probes: queue.SimpleQueue[GrammarProbe] = queue.SimpleQueue()
        for _ in range(_THREADS):
            self._probes.put(GrammarProbe(vocabulary))

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def compile(self, grammar: Grammar, gone: "asyncio.Task[Any]") -> None:
        """Compile `grammar` unless it is; cancelled when `gone` ends. Raises ApiError."""
        if grammar.ready:
            return
        job = _Job(grammar, self._probes)
        work = asyncio.get_running_loop().run_in_executor(self._threads, job.run)
        try:
            await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not work.done():
                job.cancel()
                work.cancel()
        if work.cancelled() or not work.done():
            raise ApiError(499, "the client has disconnected", "client_gone")
        with as_api_errors(grammar.field):
            work.result()
