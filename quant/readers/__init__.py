"""Reads a model with other programs, to compare their weights and logits with ours; one file per program.

Each file has the members of `ReaderModule`. The program runs in a process of its own and returns digests of the rows of
every weight, and logits.
"""

import importlib
import json
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, cast

from mycli.quant.declarations import file_names
from mycli.runtime.errors import ModelError, NotFoundError
from mycli.runtime.utils.json_fields import read_object

Names = Literal["hf", "gguf"]
HALF_TOLERANCE = 0.25  # nats, of programs that compute in the 16-bit type of the model and round logits to it
_SECONDS = 3600  # limit of a program for one model, in case it hangs


@dataclass(frozen=True)
class ReadWeight:
    """A weight as another program reads it. rows: a digest of the fp32 values of each row."""

    # Digests instead of values, because the weights of a model do not fit a JSON answer; per row, to locate a
    # difference.

    dtype: str
    shape: tuple[int, ...]
    rows: tuple[str, ...]


@dataclass(frozen=True)
class Reading:
    """The result of a reader; without weights if the program repacks them when it loads them.

    `logits`: after the last token, by token, for the whole vocabulary or the likeliest tokens only.
    """

    program: str  # with its version
    weights: dict[str, ReadWeight]
    logits: dict[int, float] | None = None
    log_probabilities: bool = False  # `logits` are log-probabilities of the likeliest tokens
    tolerance: float = 0.0  # of logits, in nats
    # The same from products that round activations to the few bits of packed weights, where the program has them.
    rounded: dict[int, float] | None = None
    rounded_tolerance: float = 0.0


@dataclass(frozen=True)
class Task:
    """A model to read. program: a Python with the package, or a folder of binaries; None: this Python, or PATH."""

    model: Path
    tokens: tuple[int, ...]
    program: Path | None


class ReaderModule(Protocol):
    WEIGHT_NAMES: Names  # of the weights that it returns

    def read(self, task: Task) -> Reading:
        """Read a model. Raises NotFoundError if the program is missing, ModelError if it refuses the model."""
        ...


def names() -> list[str]:
    return sorted(name.replace("_cpp", ".cpp").replace("_", "-") for name in file_names(__path__))


def load(name: str) -> ReaderModule:
    module = name.replace("-", "_").replace(".", "_")
    return cast(ReaderModule, importlib.import_module(f"{__name__}.{module}"))


def quantization_method(folder: Path) -> str:
    """Return the `quant_method` of a folder's config.json, "" without one. Raises ModelError for a file."""
    if not folder.is_dir():
        raise ModelError(f"{folder}: not a folder", "gguf-py and llama.cpp read GGUF files")
    settings = read_object(folder / "config.json").values.get("quantization_config")
    method = settings.get("quant_method") if isinstance(settings, dict) else None
    return method if isinstance(method, str) else ""


def run_child(task: Task, python: str, script: str, packages: Sequence[str], title: str) -> dict[str, Any]:
    """Run a script of this folder in another Python and return the JSON that it writes.

    Raises NotFoundError if one of `packages` is missing there.
    """
    # Isolated mode (-I): modules in the current folder or PYTHONPATH must not replace those of the program.
    probe = f"import importlib.util as u; print(*[name for name in {list(packages)} if u.find_spec(name) is None])"
    try:
        probed = subprocess.run([python, "-I", "-c", probe], capture_output=True, text=True, check=False)
    except OSError as error:
        raise NotFoundError(f"{python}: {error.strerror}", "name the Python that has the program") from None
    missing = probed.stdout.split()
    if missing or probed.returncode != 0:
        lacking = f": it lacks {', '.join(missing)}" if missing else ""
        remedy = f"{python} -m pip install {' '.join(missing or packages)}"
        raise NotFoundError(f"{title} is not installed for {python}{lacking}", remedy)
    with tempfile.TemporaryDirectory(prefix="mycli-read-") as folder:
        answer = Path(folder) / "answer.json"
        child = str(Path(__file__).with_name(script))
        command = [python, "-I", child, str(task.model.absolute()), json.dumps(task.tokens), str(answer)]
        run_program(command, title, task.model)
        answered: dict[str, Any] = json.loads(answer.read_text(encoding="utf-8"))
        return answered


def run_program(command: Sequence[str], title: str, model: Path) -> str:
    """Run a program to its end and return its output. Raises ModelError with its last line if it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise ModelError(f"{model}: {title} did not read it within {_SECONDS} s", "try a smaller model") from None
    if done.returncode != 0:
        lines = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()]
        reason = lines[-1][:300] if lines else f"exit code {done.returncode}"
        raise ModelError(f"{model}: {title} does not read it: {reason}", "the program may not support this model")
    return done.stdout


def parse_reading(answer: dict[str, Any], tolerance: float) -> Reading:
    weights = {
        name: ReadWeight(entry["dtype"], tuple(entry["shape"]), tuple(entry["rows"]))
        for name, entry in answer["weights"].items()
    }
    if "likeliest" in answer:
        likeliest = {int(token): float(value) for token, value in answer["likeliest"].items()}
        return Reading(answer["program"], weights, likeliest, True, tolerance)
    logits = answer.get("logits")
    by_token = None if logits is None else dict(enumerate(map(float, logits)))
    return Reading(answer["program"], weights, by_token, tolerance=tolerance)
