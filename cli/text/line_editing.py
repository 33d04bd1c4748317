"""A line that a person types at a terminal, with what the line editor does not do by itself.

Knows GNU readline and signals. Does not know what is asked for, nor what becomes of the line.
"""

import os
import signal
from types import FrameType


class _Stopped(Exception):
    """Ctrl-Z: the shell takes the terminal until `fg`."""


def typed_line(prompt: str) -> str:
    """What a person types after `prompt`, without the end of the line.

    Ctrl-Z gives the shell the terminal in the modes that it had, and after `fg` the line is begun anew with what had
    been typed: the line editor would think that both are still there.
    Raises EOFError at the end, KeyboardInterrupt for Ctrl-C, UnicodeDecodeError.
    """
    import readline

    typed = ""

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal typed
        typed = readline.get_line_buffer()
        raise _Stopped  # through `input`, which takes the terminal out of its modes

    def restore() -> None:
        readline.insert_text(typed)
        readline.redisplay()

    before = signal.signal(signal.SIGTSTP, stop)
    readline.set_pre_input_hook(restore)
    try:
        while True:
            try:
                return input(prompt)
            except _Stopped:
                signal.signal(signal.SIGTSTP, signal.SIG_DFL)
                os.kill(os.getpid(), signal.SIGTSTP)  # returns when the process goes on
                signal.signal(signal.SIGTSTP, stop)
    finally:
        readline.set_pre_input_hook(None)
        signal.signal(signal.SIGTSTP, before)
