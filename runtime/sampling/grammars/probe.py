"""Compiles a grammar in a worker process first, with limits of time and memory, to find out whether it is too costly.

llguidance's limits do not cover merged patterns and deep schemas, and a compilation in this process cannot be
interrupted.
"""

from mycli.runtime.errors import UsageError
from mycli.runtime.utils.sandbox import WorkerError, WorkerProcess

WALL_SECONDS = 4.0  # of wall-clock time: the worker yields to replies
CPU_SECONDS = 1.0
MEMORY = 1 << 30  # address space, of which an idle worker has a fifth
_HINT = "use a simpler one: fewer alternatives, references and repetitions"


class GrammarProbe:
    """One worker process for grammars over `vocabulary` tokens; started by the first check."""

    def __init__(self, vocabulary: int) -> None:
        self._worker = WorkerProcess("mycli.runtime.sampling.grammars.worker", vocabulary, MEMORY, reply_bytes=1 << 14)

    def check(self, source: str, kind: str) -> None:
        """Raise UsageError if compiling `source` exceeds the limits. Invalid sources pass, and fail when compiled."""
        try:
            seconds = float(self._worker.call(source, WALL_SECONDS))
        except WorkerError as error:
            limit = f"{WALL_SECONDS:g} s" if error.kind == "Deadline" else f"{MEMORY >> 20} MiB"
            raise UsageError(f"{kind}: compiling it takes more than {limit}", _HINT) from None
        if seconds > CPU_SECONDS:
            raise UsageError(f"{kind}: compiling it takes more than {CPU_SECONDS:g} s", _HINT)

    def interrupt(self) -> None:
        """End a check that another thread waits for."""
        self._worker.interrupt()
