"""The three standard streams of the process, made fit to be written to before the first word.

Knows descriptors and encodings; does not know what is said.
"""

import io
import os
import sys


def prepare_streams() -> None:
    """Make the standard streams able to write anything; once, before the first word.

    A closed one is opened on nothing, in such a way that standard output still takes nothing: a reply that went nowhere
    must not look like one that arrived. A character that the terminal's encoding lacks is written as an escape, and the
    bytes of a file name that is not UTF-8 as they are.
    """
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:  # the lowest free number is this one
            os.open(os.devnull, os.O_WRONLY if number == 2 else os.O_RDONLY)
    sys.stdin = sys.stdin or os.fdopen(0)
    sys.stdout = sys.stdout or os.fdopen(1, "w")
    sys.stderr = sys.stderr or os.fdopen(2, "w")
    if isinstance(sys.stdout, io.TextIOWrapper):
        unicode = sys.stdout.encoding.lower().replace("-", "") == "utf8"
        sys.stdout.reconfigure(errors="surrogateescape" if unicode else "backslashreplace")
