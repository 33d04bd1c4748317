"""Files that appear whole, a lock between processes, the space left on a disk, and what an error of a disk means.

Knows paths and bytes, nothing of what is in a file. POSIX only; no torch.
"""

import errno
import fcntl
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from mycli.runtime.errors import ResourceError, UsageError
from mycli.runtime.utils.units import distinct_sizes

# What another path would cure; anything else is the disk's own trouble.
_PATH_ERRORS = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST}
_PATH_ERRORS |= {errno.ENAMETOOLONG, errno.ELOOP, errno.EINVAL}
_NO_LOCKS = {errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL}
_ELSEWHERE = "free some space, or choose a folder on another disk"


@contextmanager
def disk_errors(target: Path) -> Iterator[None]:
    """Within it an OSError becomes a UsageError (not a place to write to) or a ResourceError that names `target`."""
    try:
        yield
    except OSError as error:
        message = f"cannot write {target}: {error.strerror or error}"
        if error.errno in _PATH_ERRORS:
            raise UsageError(message, "choose another folder") from None
        raise ResourceError(message, _ELSEWHERE) from None


def require_writable(path: Path) -> None:
    """Raise UsageError unless a file can be written at `path`, in place of another or of nothing: before long work."""
    place = path if path.exists() else path.absolute().parent
    if path.is_dir() or (path.exists() and not path.is_file()):
        raise UsageError(f"{path}: not a regular file", "name another file")
    if not place.exists():
        raise UsageError(f"{path}: there is no folder {place}", "make it, or name another file")
    if not os.access(place, os.W_OK) or not os.access(path.absolute().parent, os.W_OK | os.X_OK):
        raise UsageError(f"{path}: cannot be written", "name another file")


def require_space(folder: Path, nbytes: int, *, code: str = "") -> None:
    """Raise ResourceError with both numbers unless `nbytes` are free on the disk where `folder` is, or will be.

    `code` names a remedy that the caller knows better than "another disk".
    """
    free = shutil.disk_usage(next(path for path in (folder, *folder.parents) if path.exists())).free
    if nbytes > free:
        needed, left = distinct_sizes(nbytes, free)
        message = f"{folder}: {needed} needed, {left} free on that disk"
        raise ResourceError(message, "" if code else _ELSEWHERE, code=code)


def flush(path: Path) -> None:
    """Bring a file, or the names in a folder, to the disk for good."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomic(
    path: Path, data: bytes, *, private: bool = False, durable: bool = False, flushed: bool = True
) -> None:
    """Replace the file at `path` by one that holds `data`, flushed: whoever looks sees the old contents or the new.

    The mode follows the umask, or is 0600 if `private`. `durable`: the name is flushed as well, so that the file is
    there after a power cut. Not `flushed`: it may then hold anything, for whoever checks what he reads. A killed
    process may leave a `.NAME.*.tmp` beside it. Raises OSError.
    """
    fresh = path.with_name(f".{path.name[:100]}.{uuid.uuid4().hex[:12]}.tmp")
    try:
        descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600 if private else 0o666)
        with open(descriptor, "wb") as file:
            file.write(data)
            if flushed:
                file.flush()
                os.fsync(file.fileno())
        os.replace(fresh, path)
    except BaseException:
        fresh.unlink(missing_ok=True)
        raise
    if durable:
        flush(path.parent)


class LockedError(Exception):
    """Another process holds the lock; `holder` is its id, as it wrote it down."""

    def __init__(self, holder: str) -> None:
        super().__init__(f"locked by process {holder}")
        self.holder = holder


def try_lock(descriptor: int) -> bool:
    """Lock an open file for this process; False where another one holds it. Closing the file frees it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def locked(path: Path, waiting: Callable[[str], None] | None = None, *, remove: bool = False) -> Iterator[None]:
    """Hold the lock file `path`, which tells a person the id of its holder; the system frees a dead process's lock.

    Where another process holds it, raises LockedError, or with `waiting` tells it the holder and waits. Whoever would
    wait goes on where the file system has no locks; else that is an OSError. `remove`: the file goes with the lock.
    """
    descriptor = -1
    try:
        while descriptor < 0:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
            _acquire(descriptor, waiting)
            # Its last holder may have removed the file between our open and our lock: then we hold nothing.
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
        if waiting is None or error.errno not in _NO_LOCKS:
            raise
        return
    holder = os.pread(descriptor, 20, 0).decode("ascii", "replace").strip() or "unknown"
    if waiting is None:
        raise LockedError(holder)
    waiting(holder)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
