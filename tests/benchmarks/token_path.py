"""Counts the Python functions that one token of pico runs through: `python -m tests.benchmarks.token_path`.

Prints, as JSON with `--json`, for one sampled and one greedy token on the CPU: the functions of the product that
`Engine.step` enters, their files, the changes of file; the host time of a sampled token; and the modules of the product
that `mycli run pico hello` imports. Measures the `mycli` that it imports, so it can be run on an older tree:
`PYTHONPATH=OLD/.links python tests/benchmarks/token_path.py`.

Counting uses `sys.setprofile` around one `Engine.step` of `mycli run pico`. A function is a (file, qualified name) of
cli/, quant/ or runtime/ that Python enters, comprehensions and resumed generators included, each counted once. A change
of file is an entry whose file differs from that of the entry before it, the first entry included. Torch and native code
are not counted. The counted step is the most common one after the tenth token: decoding, all caches warm. A greedy step
may return several tokens of one native call. The times are medians over the steps of a reply, then over replies, with
one thread: CPU is the CPU time of the process in one step; host excludes the time inside native functions called
through ctypes. Other programs disturb both less than wall time.
"""

import argparse
import collections
import contextlib
import ctypes
import importlib
import io
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

TOKENS = 10  # before the counted steps: the prompt, the first token and one-time work
SAMPLED, GREEDY = ("--temperature", "0.8", "--seed", "1"), ("--temperature", "0")
REPLIES = {"sampled": 1, "greedy": 4}  # a greedy step may return many tokens
PROMPT = ("--raw", "Once upon a time")
IMPORTS = """
import sys
from mycli.cli.main import main
try:
    main(["run", "pico", "hello"])
except SystemExit as end:
    assert not end.code
print()
print(sum(name.startswith("mycli.") for name in sys.modules))
"""


def folders() -> dict[str, str]:
    """Return the parts of the product by the folder that they were imported from."""
    parts = {}
    for part in ("cli", "quant", "runtime"):
        file = importlib.import_module(f"mycli.{part}").__file__
        assert file is not None
        parts[str(Path(file).parent) + os.sep] = part
    return parts


class NativeCalls:
    """Sums the CPU time inside native functions that are called through ctypes."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def install(self) -> None:
        """Make every library that is loaded afterwards count its calls."""
        calls, original = self, ctypes._CFuncPtr  # type: ignore[attr-defined]  # the base class of CDLL's functions

        class TimedFunction(original):  # type: ignore[misc, valid-type]  # a class that typeshed does not list
            _flags_ = ctypes._FUNCFLAG_CDECL  # type: ignore[attr-defined]  # the same

            def __call__(self, *arguments: Any) -> Any:
                began = time.process_time()
                result = super().__call__(*arguments)
                calls.seconds += time.process_time() - began
                return result

        ctypes._CFuncPtr = TimedFunction  # type: ignore[attr-defined]


NATIVE = NativeCalls()


class Entries:
    """Collects the entered functions of the product; used as a profile function."""

    def __init__(self) -> None:
        self.codes: list[CodeType] = []
        self._folders = folders()

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(tuple(self._folders)):
            self.codes.append(frame.f_code)

    def name(self, code: CodeType) -> str:
        folder = next(folder for folder in self._folders if code.co_filename.startswith(folder))
        return f"{self._folders[folder]}/{code.co_filename.removeprefix(folder)}"

    def result(self) -> dict[str, Any]:
        files = [self.name(code) for code in self.codes]
        functions = dict.fromkeys(f"{file} {code.co_qualname}" for file, code in zip(files, self.codes, strict=True))
        return {
            "files": len(set(files)),
            "functions": len(functions),
            "changes": sum(before != after for before, after in zip(["", *files], files, strict=False)),
            "entries": len(files),
            "path": list(functions),
        }


def reply(arguments: tuple[str, ...], profile: bool) -> tuple[list[Entries], list[tuple[float, float, float]]]:
    """Run one reply; return the entries of each later step, and the host, CPU and wall seconds of every step."""
    from mycli.cli.main import main
    from mycli.runtime.engine.engine import Engine

    paths: list[Entries] = []
    seconds: list[tuple[float, float, float]] = []
    tokens = 0
    step = Engine.step

    def watched(engine: Engine) -> Any:
        nonlocal tokens
        entries = Entries()
        NATIVE.seconds = 0.0
        began, cpu_began = time.perf_counter(), time.process_time()
        if profile:
            sys.setprofile(entries)
        try:
            outputs = step(engine)
        finally:
            if profile:
                sys.setprofile(None)
        cpu = time.process_time() - cpu_began
        seconds.append((cpu - NATIVE.seconds, cpu, time.perf_counter() - began))
        if tokens >= TOKENS and outputs:
            paths.append(entries)
        tokens += sum(len(output.tokens) for output in outputs)
        return outputs

    Engine.step = watched  # type: ignore[method-assign, assignment]  # the measured method, put back below
    standard_input = sys.stdin
    try:
        sys.stdin = io.TextIOWrapper(io.BytesIO())  # piped input would become a part of the prompt
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as errors:
            try:
                main(["run", "pico", *PROMPT, "-n", "200", *arguments])
            except SystemExit as end:
                if end.code:
                    raise RuntimeError(errors.getvalue()) from end
    finally:
        sys.stdin = standard_input
        Engine.step = step  # type: ignore[method-assign]
    return paths, seconds


def measure(repeats: int) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for name, arguments in (("sampled", SAMPLED), ("greedy", GREEDY)):
        reply(arguments, profile=False)  # imports, and one-time compilation
        paths: list[Entries] = []
        for _ in range(REPLIES[name]):
            paths += reply(arguments, profile=True)[0]
        ways = collections.Counter(tuple(path.codes) for path in paths)
        common = ways.most_common(1)[0][0]
        results[name] = next(path.result() for path in paths if tuple(path.codes) == common)
    replies = []
    for _ in range(repeats):
        _, seconds = reply(SAMPLED, profile=False)
        replies.append([statistics.median(times) * 1e6 for times in zip(*seconds[TOKENS:], strict=True)])
    medians = [statistics.median(times) for times in zip(*replies, strict=True)]
    results["sampled_token_us"] = dict(zip(("host", "cpu", "wall"), medians, strict=True))
    results["host_us_of_replies"] = [times[0] for times in replies]
    command = [sys.executable, "-c", IMPORTS]
    output = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, check=True).stdout
    results["modules"] = int(output.splitlines()[-1])
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--path", action="store_true", help="also print the functions in the order they are entered")
    parser.add_argument("--repeats", type=int, default=5, help="replies whose token time is measured")
    options = parser.parse_args()
    results = measure(options.repeats)
    if options.json:
        print(json.dumps(results))
        return
    print("token    files  functions  changes of file  entries")
    for name in ("sampled", "greedy"):
        r = results[name]
        print(f"{name:8} {r['files']:5} {r['functions']:10} {r['changes']:16} {r['entries']:8}")
    times = results["sampled_token_us"]
    replies = ", ".join(f"{value:.0f}" for value in results["host_us_of_replies"])
    print(
        f"sampled token: host {times['host']:.0f} us (replies: {replies}), CPU {times['cpu']:.0f} us,"
        f" wall {times['wall']:.0f} us"
    )
    print(f"modules imported by `run pico hello`: {results['modules']}")
    if options.path:
        for name in ("sampled", "greedy"):
            print(f"\n{name}:", *results[name]["path"], sep="\n  ")


if __name__ == "__main__":
    # One thread: the model is too small to gain from more, and other processes disturb a single thread less.
    os.environ["OMP_NUM_THREADS"] = "1"
    NATIVE.install()
    main()
