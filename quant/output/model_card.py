"""Writes `mycli.json`: what a quantized model was made from and how, and what was measured on it.

It is a separate file because readers refuse unknown keys in config.json. It names no time and no machine: the same
source, recipe and versions give the same bytes.
"""

import hashlib
import json
import platform
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Event
from typing import Any

import torch

from mycli.quant.calibration.sampler import Calibration
from mycli.runtime.checkpoint.adapter import Adapter
from mycli.runtime.device.placement import Placement
from mycli.runtime.hub.resolve import Source
from mycli.runtime.utils import version
from mycli.runtime.utils.json_fields import finite

CARD_FILE = "mycli.json"
CARD_VERSION = 1
_HASHED_AT_ONCE = 1 << 20  # bytes


@dataclass(frozen=True)
class Layer:
    """The record of a quantized linear; errors are squared, relative, and before tuning."""

    name: str
    packing: str
    error: float  # of the weights
    output_error: float | None = None  # this and the following need calibration data
    rounding_output_error: float | None = None  # of rounding the source's weights to nearest, without data
    refit: float | None = None  # share of the correction of `rounding.error_compensation`
    tuned: float | None = None  # error of the block's output after tuning over that before
    damping: float | None = None
    dead_columns: int = 0
    fallback: str | None = None  # the reason for plain rounding


@dataclass(frozen=True)
class Tuning:
    """Mean KL in nats of the held-out calibration windows before and after; equal if nothing was gained."""

    before: float
    after: float


@dataclass(frozen=True)
class Size:
    """Bytes of all tensors; bits per weight over all parameters, and over the quantized ones."""

    bytes: int
    parameters: int
    bits_per_weight: float
    quantized_parameters: int
    quantized_bits_per_weight: float


def digests(files: Iterable[Path], root: Path | None = None, stop: Event | None = None) -> dict[str, dict[str, Any]]:
    """Return size and sha256 of each file, sorted, by its name, or its path if it lies in a folder of `root`.

    Raises CancelledError soon after `stop` is set.
    """
    result = {}
    for path in sorted(files):
        digest = hashlib.sha256()
        with path.open("rb", buffering=0) as file:
            while part := file.read(_HASHED_AT_ONCE):
                digest.update(part)
                if stop is not None and stop.is_set():
                    raise CancelledError
        name = path.relative_to(root).as_posix() if root is not None and path.is_relative_to(root) else path.name
        result[name] = {"sha256": digest.hexdigest(), "bytes": path.stat().st_size}
    return result


@contextmanager
def digests_in_background(files: Iterable[Path], root: Path) -> Iterator[Future[dict[str, dict[str, Any]]]]:
    """Run `digests` on a thread; leaving the context cancels it."""
    stop = Event()
    with ThreadPoolExecutor(1) as background:
        try:
            yield background.submit(digests, files, root, stop)
        finally:
            stop.set()


def _versions() -> dict[str, str]:
    return {"mycli": version(), "torch": torch.__version__, "python": platform.python_version()}


def identify(
    recipe: Mapping[str, Any], calibration: Calibration | None, placement: Placement, at_once: int
) -> dict[str, Any]:
    """Return what two runs must share for one to continue the other, besides the hashes of the source."""
    if calibration is None:
        return {"recipe": recipe, "versions": _versions()}
    return {
        "recipe": recipe,
        "calibration": _describe(calibration),
        "versions": _versions(),
        "device": f"{placement.device.type}, {placement.dtype}",
        "tokens per pass": at_once,  # the memory limit decides it, and it changes the rounding of sums
    }


def _describe(calibration: Calibration) -> dict[str, Any]:
    samples, seq = calibration.windows.shape
    return {"samples": samples, "seq": seq, "sha256": calibration.sha256, "mix": calibration.mix}


def encode(
    *,
    recipe: Mapping[str, Any],
    calibration: Calibration | None,
    source: Source,
    stored: str | None,
    adapter: Adapter | None,
    size: Size,
    layers: Iterable[Layer],
    tuning: Tuning | None,
    card: Mapping[str, Any] | None,
    source_files: Mapping[str, Any],
    files: Mapping[str, Any],
) -> bytes:
    """The bytes of the file; `source_files` and `files` are `digests`, `stored` the formats of a packed source."""
    record = {
        "schema_version": CARD_VERSION,
        "recipe": recipe,
        "calibration": None if calibration is None else _describe(calibration),
        "source": {
            "name": source.label,
            "repo": source.repo,
            "revision": source.revision,
            "scheme": stored,
            **({} if adapter is None else {"adapter": adapter.name}),
            "files": source_files,
        },
        "versions": _versions(),
        "size": asdict(size),
        "tuning": None if tuning is None else asdict(tuning),
        "card": card,
        "layers": [asdict(layer) for layer in layers],
        "files": files,
    }
    return (json.dumps(finite(record), indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode()
