"""Compiles the sources of the native library with the system's GNU C++."""

import errno
import hashlib
import os
import re
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path
from threading import Event

import torch

from mycli.runtime.device.system import cpu
from mycli.runtime.errors import Declined
from mycli.runtime.kernels.cpu.library.seal import seal
from mycli.runtime.utils.files import flush, free_bytes
from mycli.runtime.utils.units import human_bytes

# Longest compilation first, with additional options: quantize_cpu.cpp must round every operation as torch does, so
# multiplications and additions are not contracted.
SOURCES: Mapping[str, tuple[str, ...]] = {
    "few_byte_rows_cpu.cpp": (),
    "packed_cpu.cpp": (),
    "few_rows_cpu.cpp": (),
    "byte_panels_cpu.cpp": (),
    "attention_cpu.cpp": (),
    "rounded_cpu.cpp": (),
    "quantize_cpu.cpp": ("-ffp-contract=off",),
}
# Where the loops of a product begin changes its time by up to 5 %: without alignment any other function may move them.
_ALIGNED = ("-falign-functions=64", "-falign-loops=32")
FLAGS = ("-std=c++17", "-I.", "-O3", "-fPIC", "-fopenmp", "-fvisibility=hidden", "-Wno-psabi", *_ALIGNED)
_OPENMP = re.compile(r"/.*/lib(?:gomp|iomp5|omp)[^/]*\.so[^/]*")
TIMEOUT = 1200  # seconds, for a busy machine; an idle one needs most of a minute


class BuildError(Exception):
    """The native library cannot be compiled or loaded; `declined` says why."""

    def __init__(self, declined: Declined) -> None:
        super().__init__(f"{declined.code} {dict(declined.data)}")
        self.declined = declined


def find_compiler(environment: Mapping[str, str] = os.environ) -> tuple[str, str]:
    """Return path and version text of GNU C++: $CXX, g++ or c++. Raises BuildError."""
    # Clang uses another OpenMP library than GNU's, which torch ships: it would start a second pool of threads.
    for name in (environment.get("CXX"), "g++", "c++"):
        path = shutil.which(name) if name else None
        if path is None:
            continue
        version = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=TIMEOUT).stdout
        if "Free Software Foundation" in version:
            return os.path.abspath(path), version  # absolute: it is started in another folder
    raise BuildError(Declined("no-compiler"))


def torch_openmp(memory_map: Path = Path("/proc/self/maps")) -> str:
    """Return the path of the OpenMP library that torch has loaded. Raises BuildError."""
    with memory_map.open() as maps:
        # The path is the sixth field, to the end of the line: it may hold spaces.
        paths = {line.rstrip("\n").split(maxsplit=5)[5] for line in maps if line.count("/")}
    loaded = [path for path in paths if _OPENMP.fullmatch(path)]
    torch_folder = str(Path(torch.__file__).parent)
    for path in sorted(loaded, key=lambda path: (not path.startswith(torch_folder), path)):
        return path
    raise BuildError(Declined("no-openmp"))


def read_sources() -> dict[str, bytes]:
    """Return the C++ files of the library by their path in the folder `native`."""
    root = Path(__file__).parents[1] / "native"
    paths = sorted(path for path in root.rglob("*") if path.suffix in (".cpp", ".h"))
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in paths}


def digest(sources: Mapping[str, bytes], *depends: str) -> str:
    """Return a hash of the sources and of everything else that a library depends on."""
    return hashlib.sha256(b"\0".join(sources.values()) + "\0".join(depends).encode()).hexdigest()[:24]


def compile_sources(
    compiler: str,
    sources: Mapping[str, bytes],
    flags: Sequence[str],
    link: Sequence[str],
    target: Path,
    sealed: bool = False,
) -> None:
    """Compile and link a shared library and move it to `target` atomically. Raises BuildError.

    `link`: options after the object files; `sealed`: append a checksum. As many files are compiled in parallel as there
    are cores.
    """
    target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".build-") as work:
        for name, text in sources.items():
            (Path(work) / name).parent.mkdir(exist_ok=True)
            (Path(work) / name).write_bytes(text)
        commands = [[compiler, *flags, *options, "-c", name, "-o", f"{name}.o"] for name, options in SOURCES.items()]
        _run_all(work, commands)
        _run_all(work, [[compiler, "-shared", *(f"{name}.o" for name in SOURCES), *link, "-o", "library.so"]])
        library = Path(work) / "library.so"
        if sealed:
            seal(library)
        flush(library)  # a power cut must not leave an empty file under the final name
        os.replace(library, target)
    flush(target.parent)


def _run_all(work: str, commands: Sequence[Sequence[str]]) -> None:
    # An exception, such as that of a signal, ends the compilers: they need most of a minute, and a service is killed
    # a few seconds after its SIGTERM.
    running: list[subprocess.Popen[str]] = []
    stopped = Event()
    with ThreadPoolExecutor(cpu().cores) as pool:
        try:
            jobs = {pool.submit(_run, work, command, running, stopped) for command in commands}
            while jobs:  # a signal that comes just before a wait is handled after it
                done, jobs = wait(jobs, timeout=0.5, return_when=FIRST_EXCEPTION)
                for job in done:
                    job.result()
        except BaseException:
            stopped.set()  # before the others are ended: a job may be starting its compiler
            pool.shutdown(wait=False, cancel_futures=True)
            for process in list(running):
                _kill(process)
            raise


def _run(work: str, command: Sequence[str], running: list[subprocess.Popen[str]], stopped: Event) -> None:
    # A process group of its own: g++ starts the compiler proper, which would outlive it.
    pipe = subprocess.PIPE
    # g++ compiles without PATH, and then finds no linker; its messages are searched for English words.
    environment = {"PATH": os.defpath, **os.environ, "LC_ALL": "C"}
    process = subprocess.Popen(
        command, cwd=work, env=environment, stdout=pipe, stderr=pipe, text=True, start_new_session=True
    )
    running.append(process)
    if stopped.is_set():
        _kill(process)
    try:
        _, errors = process.communicate(timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        _kill(process)
        process.communicate()
        raise BuildError(Declined("compiler-timeout", {"compiler": command[0], "seconds": TIMEOUT})) from None
    if process.returncode:
        if os.strerror(errno.ENOSPC) in errors:
            raise BuildError(no_space(Path(work).parent))
        words = [line for line in errors.splitlines() if "error" in line] or errors.splitlines()
        error = f"{words[0]:.200}" if words else f"exit code {process.returncode}"
        raise BuildError(Declined("compiler-failed", {"compiler": command[0], "error": error}))


def no_space(folder: Path) -> Declined:
    """Return the reason for a full disk: that of `folder`, or of temporary files, where g++ writes assembler code."""
    folders = {"XDG_CACHE_HOME": folder, "TMPDIR": Path(os.environ.get("TMPDIR") or "/tmp")}
    free = {variable: free_bytes(path) for variable, path in folders.items()}
    full = min(free, key=lambda variable: free[variable])
    return Declined(
        "no-space-for-library", {"folder": str(folders[full]), "free": human_bytes(free[full]), "variable": full}
    )


def _kill(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
