"""Fuzz checkpoints: each damaged model must run or be refused with a message; anything else is a fault.

PYTHONPATH=.links python -m tests.attacks.fuzz [LAYOUT ...] [--seconds 60] [--seed 0] [--record FILE]
    [--keep FOLDER] [--compare]

A case is a valid model of a layout with a few changes: config fields, tensors (missing, shorter, of another type),
tensor values, or arbitrary bytes. It is opened as a command opens it, loaded, and run for a few tokens. The seed alone
determines the case, so `--seed N --seconds 0` reproduces a fault. Seconds are CPU time of the process. A case may take
20 s and 1 GiB more than the program already uses; the files of faults are saved in `--keep`. With `--record`, each
layout continues after the last seed that FILE (JSON counts, rewritten every ten seconds) names for it, so runs can be
extended at any time and an interrupted run loses at most ten seconds.
"""

import argparse
import io
import json
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save

from mycli.runtime.checkpoint.gguf.header import parse_gguf_header
from mycli.runtime.checkpoint.gguf.writer import make_gguf_header
from mycli.runtime.checkpoint.open_folder import open_model_folder
from mycli.runtime.engine.loading.loader import load_model
from mycli.runtime.errors import UserError
from mycli.runtime.layers.transformer import Transformer
from mycli.runtime.utils.files import write_atomic
from tests.attacks.fuzz_models import LAYOUTS
from tests.attacks.fuzz_references import NoReferenceError, SilentDifferenceError, compare
from tests.support.engines import whole
from tests.support.models import CPU

Files = dict[str, bytes]  # file name -> bytes of a model folder
WEIGHTS, FILE = "model.safetensors", "model.gguf"
SECONDS, ROOM = 20, 1 << 30  # per case
SAVE_SECONDS = 10
_EDGES = (0, 1, 2, 3, 7, 31, 32, 255, 1 << 15, (1 << 31) - 1, 1 << 31, 1 << 32, 1 << 62, 1 << 63, (1 << 64) - 1)
_JUNK: tuple[Any, ...] = (
    None,
    True,
    False,
    -1,
    1 << 40,
    1e300,
    float("nan"),
    "",
    "x",
    "a\x1b[2J",
    [],
    {},
    [1],
    {"a": 1},
)


class TooSlowError(Exception):
    """The case exceeded its time limit."""


def _other(value: Any, draw: random.Random) -> Any:
    """Change a JSON value in one place or replace it by another value."""
    if isinstance(value, dict) and value and draw.random() < 0.85:
        key, changed = draw.choice(list(value)), dict(value)
        if draw.random() < 0.15:
            del changed[key]
        elif draw.random() < 0.1:
            changed[f"{key}_"] = changed.pop(key)
        else:
            changed[key] = _other(value[key], draw)
        return changed
    if isinstance(value, list) and value and draw.random() < 0.7:
        at, listed = draw.randrange(len(value)), list(value)
        listed[at : at + 1] = draw.choice(([], [_other(listed[at], draw)], [listed[at]] * 2))
        return listed
    if isinstance(value, int) and draw.random() < 0.6:
        return draw.choice((-value, value + 1, value - 1, 2 * value, value // 2, *_EDGES))
    return draw.choice((*_JUNK, *_EDGES))


def _bytes(data: bytes, draw: random.Random) -> bytes:
    """Change, cut out, duplicate or truncate bytes; the beginning, where headers are, more often than the rest."""
    changed = bytearray(data)
    for _ in range(draw.choice((1, 1, 1, 2, 4))):
        reach = draw.choice((64, 1024, len(changed)))
        at = draw.randrange(max(1, min(reach, len(changed))))
        kind = draw.random()
        if kind < 0.35:
            changed[at : at + 1] = bytes([draw.choice((0, 1, 0x7F, 0x80, 0xFF, draw.randrange(256)))])
        elif kind < 0.7:
            size = draw.choice((2, 4, 8))
            changed[at : at + size] = (draw.choice(_EDGES) % (1 << 8 * size)).to_bytes(size, "little")
        elif kind < 0.8:
            del changed[at : at + draw.randint(1, 64)]
        elif kind < 0.9:
            changed[at:at] = changed[at : at + draw.randint(1, 64)]
        else:
            del changed[at:]
    return bytes(changed)


def _tensors(data: bytes, draw: random.Random) -> bytes:
    """Remove, rename, resize or retype a tensor of a safetensors file, or flip bits of it."""
    tensors = load(data)
    name = draw.choice(sorted(tensors))
    tensor, kind = tensors[name], draw.random()
    if kind < 0.15:
        del tensors[name]
    elif kind < 0.25:
        tensors[draw.choice((f"{name}_", name.rpartition(".")[0], draw.choice(sorted(tensors))))] = tensors.pop(name)
    elif kind < 0.4:
        tensors[name] = tensor.flatten()[: draw.randrange(tensor.numel() + 1)].clone()
    elif kind < 0.5:
        tensors[name] = draw.choice((tensor.unsqueeze(0), tensor.flatten(), tensor.t() if tensor.ndim == 2 else tensor))
    elif kind < 0.65:
        tensors[name] = tensor.to(draw.choice((torch.float32, torch.uint8, torch.int64, torch.float16, torch.bool)))
    elif tensor.numel():
        bits = tensor.contiguous().clone()
        flat = bits.flatten().view(torch.uint8)
        for _ in range(draw.choice((1, 2, 8, len(flat)))):
            flat[draw.randrange(len(flat))] = draw.choice((0, 0x7F, 0x80, 0xFF, draw.randrange(256)))
        tensors[name] = flat.view(tensor.dtype).view(tensor.shape)
    return save({key: value.contiguous() for key, value in tensors.items()})


def _damaged_folder(files: Files, draw: random.Random) -> Files:
    """Apply one or two changes to a folder."""
    changed = dict(files)
    for _ in range(draw.choice((1, 1, 2))):
        kind = draw.random()
        if kind < 0.35:
            name = draw.choice([name for name in files if name.endswith(".json")])
            changed[name] = json.dumps(_other(json.loads(files[name]), draw)).encode()
        elif kind < 0.7:
            changed[WEIGHTS] = _tensors(files[WEIGHTS], draw)
        elif kind < 0.9:
            changed[WEIGHTS] = _bytes(files[WEIGHTS], draw)
        else:
            name = draw.choice(sorted(files))
            changed[name] = _bytes(files[name], draw)
    return changed


def _damaged_file(data: bytes, draw: random.Random) -> bytes:
    """Change the metadata or the tensor table of a GGUF file that stays valid otherwise, or change bytes."""
    if draw.random() < 0.5:
        return _bytes(data, draw)
    stream = io.BytesIO(data)

    def read(offset: int, count: int) -> bytes:
        stream.seek(offset)
        return stream.read(count)

    header = parse_gguf_header(read, len(data), "a.gguf")
    metadata = {
        key: value if isinstance(value, int | float | str) else list(value)
        for key, value in header.metadata.values.items()
    }
    table = [(name, entry.dtype, entry.shape) for name, entry in header.tensors.items()]
    parts = {name: read(entry.offset, entry.nbytes) for name, entry in header.tensors.items()}
    for _ in range(draw.choice((1, 1, 2))):
        at = draw.randrange(len(table))
        name, dtype, shape = table[at]
        kind = draw.random()
        if kind < 0.6:
            metadata = _other(metadata, draw)
            if not isinstance(metadata, dict):
                return _bytes(data, draw)
        elif kind < 0.7:
            del table[at]
        elif kind < 0.8:
            table[at] = (draw.choice((f"{name}_", draw.choice(table)[0], name.replace("0", "1"))), dtype, shape)
        elif kind < 0.9:
            table[at] = (
                name,
                dtype,
                tuple(draw.choice((size, size + 1, 2 * size, max(1, size // 2))) for size in shape),
            )
        elif name in parts:  # not renamed by the change before
            parts[name] = _bytes(parts[name], draw)
    try:
        head, entries = make_gguf_header(metadata, table, "a.gguf")
    except Exception:  # the format cannot express such a value
        return _bytes(data, draw)
    changed = bytearray(head)
    for name, entry in entries.items():
        changed += bytes(max(0, entry.offset - len(changed)))
        changed += (parts.get(name, b"") + bytes(entry.nbytes))[: entry.nbytes] if entry.nbytes < 1 << 20 else b""
    return bytes(changed)


def damaged(files: Files, seed: str) -> Files:
    """Return `files` with the changes that `seed` determines."""
    draw = random.Random(seed)
    return {FILE: _damaged_file(files[FILE], draw)} if FILE in files else _damaged_folder(files, draw)


def use(folder: Path) -> None:
    """Open a model, read all of its metadata, load it, and run a few tokens, as a command does."""
    opened = open_model_folder(folder / FILE if (folder / FILE).exists() else folder)
    if opened.has_tokenizer:
        tokenizer = opened.tokenizer()
        tokenizer.decode(tokenizer.encode("Grüße 1,024 <|im_end|>\n\n", add_special=True))
        opened.chat_template()
    _ = opened.generation
    model = load_model(opened, CPU, warn=lambda line: None).model
    if isinstance(model, Transformer):
        whole(model, torch.zeros(1, 3, dtype=torch.long))


def attempt(files: Mapping[str, bytes], compare: Callable[[Path], None] | None = None) -> str:
    """Run a case; return the class of its UserError, or "read"; other errors are raised.

    `compare` raises SilentDifferenceError for a model that another reader reads differently.
    """
    with tempfile.TemporaryDirectory() as name:
        for file, data in files.items():
            (Path(name) / file).write_bytes(data)
        try:
            use(Path(name))
        except UserError as error:
            assert error.message and "\n" not in error.message, error.message
            return type(error).__name__
        if compare is not None:
            try:
                compare(Path(name) / FILE if FILE in files else Path(name))
            except NoReferenceError as error:
                return f"read, not by the reference: {error!s:.60}"
            return "read, equal"
    return "read"


def _too_slow(*_: object) -> None:
    raise TooSlowError(f"more than {SECONDS} s")


@dataclass
class Sums:
    """The counts of a layout so far; the next case is `seed`."""

    seed: int
    seconds: float = 0.0
    cases: int = 0
    faults: list[str] = field(default_factory=list)
    outcomes: dict[str, int] = field(default_factory=dict)

    def line(self, layout: str) -> str:
        cases = f"{self.cases} cases in {self.seconds / 60:.1f} minutes of the processor"
        return f"{layout}: {cases}, {len(self.faults)} faults; {self.outcomes}; continue with --seed {self.seed}"


class Record:
    """The counts by layout, stored in a file if there is one."""

    def __init__(self, path: Path | None, seed: int) -> None:
        self.path, self.seed, self.sums = path, seed, dict[str, Sums]()
        if path is not None and path.exists():
            for layout, saved in json.loads(path.read_text()).items():
                self.sums[layout] = Sums(**saved)

    def of(self, layout: str) -> Sums:
        return self.sums.setdefault(layout, Sums(self.seed))

    def write(self) -> None:
        if self.path is not None:
            written = json.dumps({layout: asdict(sums) for layout, sums in self.sums.items()}, indent=1)
            write_atomic(self.path, written.encode())


def run(layout: str, seconds: float, record: Record, keep: Path, compare: Callable[[Path], None] | None = None) -> int:
    """Run cases of a layout for `seconds` of CPU time, at least one; return the number of different faults."""
    good = LAYOUTS[layout]()
    for name, files in good.items():
        assert attempt(files) == "read", name

    def model(seed: int) -> str:
        return sorted(good)[seed % len(good)]

    def case(seed: int) -> Files:
        return damaged(good[model(seed)], f"{layout} {seed}")

    return repeat(
        layout,
        seconds,
        record,
        lambda seed: attempt(case(seed), compare),
        model,
        lambda seed: _keep(keep / f"{layout}-{seed}", case(seed)),
    )


def repeat(
    label: str,
    seconds: float,
    record: Record,
    attempt: Callable[[int], str],
    describe: Callable[[int], str] = lambda seed: "one case",
    keep: Callable[[int], None] = lambda seed: None,
) -> int:
    """Call `attempt(seed)`, which returns an outcome or raises; return the number of different faults."""
    sums = record.of(label)
    faults: set[str] = set()
    start = time.process_time()
    before, saved = sums.seconds, start
    while True:
        name = describe(sums.seed)
        signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS)
        try:
            outcome = attempt(sums.seed)
        except Exception as error:
            frame = traceback.extract_tb(error.__traceback__)[-1]
            outcome = f"{type(error).__name__} at {Path(frame.filename).name}:{frame.lineno}"
            if isinstance(error, SilentDifferenceError):
                outcome = f"{type(error).__name__} of {name}"
            if outcome not in faults:
                faults.add(outcome)
                sums.faults.append(f"{outcome}, seed {sums.seed}")
                print(f"{label}, seed {sums.seed}, {name}: {outcome}: {error!s:.300}", flush=True)
                traceback.print_exc(limit=-6)
                keep(sums.seed)
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        now = time.process_time()
        sums.outcomes[outcome] = sums.outcomes.get(outcome, 0) + 1
        sums.cases, sums.seed, sums.seconds = sums.cases + 1, sums.seed + 1, before + now - start
        done = now - start >= seconds
        if done or now - saved > SAVE_SECONDS:
            record.write()
            saved = now
        if done:
            break
    print(sums.line(label), flush=True)
    return len(faults)


def _keep(folder: Path, files: Files) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)


def command_line(description: str | None, sets: Sequence[str]) -> argparse.ArgumentParser:
    """Return a parser of the options that all programs of this kind take, and prepare the process for their runs."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sets", nargs="*", default=list(sets), metavar="SET", help=", ".join(sets))
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--record", type=Path, metavar="FILE")
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGVTALRM, _too_slow)
    return parser


def main() -> None:
    """Print one line per layout and a traceback per fault; exit with 1 after a fault."""
    parser = command_line(__doc__, list(LAYOUTS))
    parser.add_argument("--keep", type=Path, default=Path("fuzz-faults"))
    parser.add_argument("--compare", action="store_true", help="compare logits with those of another reader")
    options = parser.parse_args()
    used = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_DATA, (used + ROOM, resource.RLIM_INFINITY))
    record = Record(options.record, options.seed)
    compared = compare if options.compare else None
    faults = [run(layout, options.seconds, record, options.keep, compared) for layout in options.sets]
    sys.exit(any(faults))


if __name__ == "__main__":
    main()
