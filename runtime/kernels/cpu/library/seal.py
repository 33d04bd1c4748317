"""Checks a cached native library before it is loaded: its owner, its permissions and a checksum at its end.

A library is code: one that another user can write runs with this user's rights, and a damaged one ends the process with
SIGSEGV or SIGBUS. The checksum follows the ELF image, where the loader ignores it, so that library and checksum are one
file.
"""

import hashlib
import os
import stat
from pathlib import Path

_MAGIC = b"mycli-sealed-1\0\0"
_TAIL = len(_MAGIC) + hashlib.sha256().digest_size


def seal(path: Path) -> None:
    path.chmod(0o755)  # with a umask of 002 the linker leaves it writable for the group
    with path.open("ab") as file:
        file.write(_MAGIC + hashlib.sha256(path.read_bytes()).digest())


def folder_problem(folder: Path) -> str:
    """Return why libraries of `folder` must not be loaded, "" if they may."""
    return _access_problem(os.stat(folder))


def library_problem(path: Path) -> str:
    """Return why the library at `path` must not be loaded, "" if it may. Raises OSError."""
    status = os.lstat(path)
    if not stat.S_ISREG(status.st_mode):
        return "is not a regular file"
    if problem := _access_problem(status):
        return problem
    data = path.read_bytes()
    image, tail = data[:-_TAIL], data[-_TAIL:]
    if tail != _MAGIC + hashlib.sha256(image).digest():
        return "is damaged"
    return ""


def _access_problem(status: os.stat_result) -> str:
    if status.st_uid != os.geteuid():
        return f"belongs to user {status.st_uid}"
    return "can be written by other users" if status.st_mode & 0o022 else ""
