"""Imports torch, then forks a child for each request on a socket: the child runs a Python command as if started anew.

Nothing of mycli is imported before the fork, only large packages that every command with a model imports. It runs as a
script: the child's import path must not contain the checkout. `forked` is the client.
"""

import fcntl
import gc
import io
import json
import os
import runpy
import signal
import socket
import sys
import termios
from typing import Any

import tokenizers  # noqa: F401  # the three only for children, which find them imported
import torch  # noqa: F401
import typer  # noqa: F401


def start_child(descriptors: list[int], control: socket.socket) -> bool:
    """Fork a grandchild, which the client adopts, and send its number; return True in the grandchild.

    Where no process can be started, the message is empty.
    """
    reading, writing = os.pipe()
    middle = os.fork()
    if middle == 0:
        child = os.fork()
        if child:
            os.write(writing, b"%d" % child)
            os._exit(0)
        for descriptor in (reading, writing):
            os.close(descriptor)
        control.close()
        return True
    os.close(writing)  # or reading would wait for ever where the second fork failed
    os.waitpid(middle, 0)  # only now is the grandchild adopted
    control.send(os.read(reading, 20))
    for descriptor in (reading, *descriptors):
        os.close(descriptor)
    return False


def enter(request: dict[str, Any], descriptors: list[int]) -> None:
    """Give this process the streams, signals, environment and import path of a new one."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    if request["session"]:
        os.setsid()
    if request["terminal"]:
        fcntl.ioctl(descriptors[0], termios.TIOCSCTTY, 0)
    for target, descriptor in enumerate(descriptors):
        os.dup2(descriptor, target)
        os.close(descriptor)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    encoding, _, errors = os.environ.get("PYTHONIOENCODING", "").partition(":")
    for name, mode in (("stdin", "rb"), ("stdout", "wb"), ("stderr", "wb")):
        old = getattr(sys, name)
        buffered = open(old.fileno(), mode, closefd=False)  # noqa: SIM115  # until the process ends
        lines = name == "stderr" or (name == "stdout" and os.isatty(1))
        stream = io.TextIOWrapper(buffered, encoding or old.encoding, errors or old.errors, line_buffering=lines)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def run(command: list[str]) -> None:
    """Run `python -m MODULE …`, `python -c CODE …`, a script or an installed one; the process ends as they do."""
    words = command[1:] if command[0] == sys.executable else command
    more = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    if words[0] == "-m":
        sys.path[:1], sys.argv = [os.getcwd(), *more], words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    elif words[0] == "-c":
        sys.path[:1], sys.argv = ["", *more], ["-c", *words[2:]]
        exec(compile(words[1], "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.path[:1], sys.argv = [os.path.dirname(words[0]), *more], words
        runpy.run_path(words[0], run_name="__main__")


def serve(control: socket.socket) -> list[str] | None:
    """Fork a child for each request until the client closes the socket; return the command in the child."""
    while True:
        data, descriptors, _, _ = socket.recv_fds(control, 1 << 20, 3)
        if not data:
            return None
        request = json.loads(data)
        if start_child(descriptors, control):
            enter(request, descriptors)
            return list(request["command"])


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is for pytest
    gc.collect()
    gc.freeze()  # or each child would copy what it searches for garbage
    command = serve(socket.socket(fileno=int(sys.argv[1])))
    if command is not None:
        run(command)
