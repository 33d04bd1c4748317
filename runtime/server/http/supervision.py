"""Ends a server when the process that started it has ended."""

import os
import signal
import threading
import time

_END_SECONDS = 10.0  # to end in order; the clients of its replies are gone


def end_with_parent() -> None:
    """Start a thread that ends this process when the other end of the pipe on stdin is closed."""

    def wait() -> None:
        while os.read(0, 1):
            pass
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(_END_SECONDS)
        os._exit(1)  # loading, or a pass that takes minutes

    threading.Thread(target=wait, name="parent", daemon=True).start()
