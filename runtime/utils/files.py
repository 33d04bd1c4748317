"""Files: bounded reads of files that a user names, atomic writes, locks between processes, disk errors. POSIX only."""

import errno
import fcntl
import os
import shutil
import stat
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from mycli.runtime.errors import NotFoundError, ResourceError, UsageError
from mycli.runtime.utils.units import distinct_sizes, human_bytes

MAX_TEXT_BYTES = 256 << 20  # of a text read into memory: about 60 million tokens
# Errors that another path cures; all others are about the disk.
_PATH_ERRORS = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST}
_PATH_ERRORS |= {errno.ENAMETOOLONG, errno.ELOOP, errno.EINVAL}
_NO_LOCKS = {errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL}
_FREE_SPACE = "free some space, or choose a folder on another disk"
_SMALLER_FILES = (
    "choose a disk that allows larger files (FAT32: less than 4 GiB), or raise the shell's limit of file sizes"
)


def expand_user(path: str | Path) -> Path:
    """Return `path` with its leading ~ or ~user replaced; of an unknown user it stays, as in a shell."""
    return Path(os.path.expanduser(path))


@contextmanager
def open_input(path: Path, *, pipes: bool = False) -> Iterator[BinaryIO]:
    """Open a regular file, or with `pipes` a pipe, for reading. Raises NotFoundError or UsageError."""
    try:
        # O_NONBLOCK: opening a pipe without a writer would wait forever.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | (0 if pipes else os.O_NONBLOCK))
    except (FileNotFoundError, NotADirectoryError):
        raise NotFoundError(f"{path}: no such file", "check the path") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        reason = error.strerror if isinstance(error, OSError) else error
        raise UsageError(f"{path}: {reason}", "name a file that can be read") from None
    mode = os.fstat(descriptor).st_mode
    if not (stat.S_ISREG(mode) or (pipes and stat.S_ISFIFO(mode))):  # /dev/zero has no end
        os.close(descriptor)
        kind = "a folder" if stat.S_ISDIR(mode) else "not a regular file"
        raise UsageError(f"{path}: {kind}", "name a file that can be read")
    with os.fdopen(descriptor, "rb") as file:
        yield file


def read_input(path: Path, limit: int, *, pipes: bool = False) -> bytes:
    try:
        with open_input(path, pipes=pipes) as file:
            data = file.read(limit + 1)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}", "name a file that can be read") from None
    if len(data) > limit:
        raise UsageError(f"{path}: more than {human_bytes(limit)}", "give a part of it")
    return data


@contextmanager
def disk_errors(target: Path) -> Iterator[None]:
    """Convert an OSError to a UsageError (unsuitable path) or a ResourceError (the disk) that names `target`."""
    try:
        yield
    except OSError as error:
        message = f"cannot write {target}: {error.strerror or error}"
        if error.errno in _PATH_ERRORS:
            raise UsageError(message, "choose another folder") from None
        raise ResourceError(message, _SMALLER_FILES if error.errno == errno.EFBIG else _FREE_SPACE) from None


def require_writable(path: Path) -> None:
    """Raise UsageError unless a file can be created or replaced at `path`; called before long work."""
    parent = path.absolute().parent
    if path.is_dir() or (path.exists() and not path.is_file()):
        raise UsageError(f"{path}: not a regular file", "name another file")
    if not path.exists() and not parent.exists():
        raise UsageError(f"{path}: there is no folder {parent}", "make it, or name another file")
    if not os.access(path if path.exists() else parent, os.W_OK) or not os.access(parent, os.W_OK | os.X_OK):
        raise UsageError(f"{path}: cannot be written", "name another file")


def free_bytes(folder: Path) -> int:
    """Return the free bytes of the disk of `folder`, which need not exist yet."""
    return shutil.disk_usage(next(path for path in (folder, *folder.parents) if path.exists())).free


def require_space(folder: Path, nbytes: int, *, code: str = "") -> None:
    """Raise ResourceError, with the remedy `code`, unless the disk of `folder` has `nbytes` free."""
    free = free_bytes(folder)
    if nbytes > free:
        needed, left = distinct_sizes(nbytes, free)
        message = f"{folder}: {needed} needed, {left} free on that disk"
        raise ResourceError(message, "" if code else _FREE_SPACE, code=code)


def flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomic(
    path: Path, data: bytes, *, private: bool = False, durable: bool = False, flushed: bool = True
) -> None:
    """Replace the file at `path` in one step: a reader sees the old contents or the new. Raises OSError.

    private: mode 0600. durable: the file survives a power cut. flushed=False: readers check the contents themselves.
    """
    # A killed process may leave this file.
    temporary = path.with_name(f".{path.name[:100]}.{uuid.uuid4().hex[:12]}.tmp")
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        with open(os.open(temporary, flags, 0o600 if private else 0o666), "wb") as file:
            file.write(data)
            if flushed:
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if durable:
        flush(path.parent)


class LockedError(Exception):
    """Another process holds the lock; `holder` is the process id in the lock file."""

    def __init__(self, holder: str) -> None:
        super().__init__(f"locked by process {holder}")
        self.holder = holder


def try_lock(descriptor: int) -> bool:
    """Lock an open file (flock) until it is closed; return False if another process holds the lock."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def locked(path: Path, waiting: Callable[[str], None] | None = None, *, remove: bool = False) -> Iterator[None]:
    """Hold a lock on the file `path`, which contains the process id of its holder; remove: delete it at the end.

    waiting: called with the holder's id before waiting for it; without it, LockedError is raised instead.
    """
    # flock: the system releases the lock of a dead process.
    descriptor = -1
    try:
        while descriptor < 0:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
            _acquire(descriptor, waiting)
            # The last holder may have removed the file between our open and our lock, which then protects nothing.
            if remove and not (path.exists() and os.path.samestat(os.fstat(descriptor), os.stat(path))):
                os.close(descriptor)
                descriptor = -1
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, str(os.getpid()).encode(), 0)
        try:
            yield
        finally:
            if remove:
                with suppress(OSError):
                    path.unlink()
    finally:
        if descriptor >= 0:
            os.close(descriptor)


def _acquire(descriptor: int, waiting: Callable[[str], None] | None) -> None:
    try:
        if try_lock(descriptor):
            return
    except OSError as error:
        # A download continues on a file system without locks: it is correct without them.
        if waiting is None or error.errno not in _NO_LOCKS:
            raise
        return
    holder = os.pread(descriptor, 20, 0).decode("ascii", "replace").strip() or "unknown"
    if waiting is None:
        raise LockedError(holder)
    waiting(holder)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
