"""Models in other programs' layouts: one file each, found by the name that is asked for. The file is the registry.

A target is a module with the members of `ExportTarget`. What it can hold exactly it writes without asking; what it
would have to round it refuses, unless rounding is asked for: then it says what was lost. Knows no target by name.
"""

import importlib
import pkgutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, cast

from mycli.quant.progress import ReportProgress
from mycli.runtime.checkpoint.model_folder import ModelFolder
from mycli.runtime.errors import ModelError, UsageError
from mycli.runtime.hub.resolve import Source


@dataclass(frozen=True)
class Rounded:
    """A tensor that lost something: what it became, and its relative squared error."""

    name: str
    kind: str
    error: float


@dataclass(frozen=True)
class Exported:
    """What was written: where, how large, in how many tensors of which kind, and what was rounded.

    `left_out`: what the layout has no place for.
    """

    path: Path
    nbytes: int
    kinds: Mapping[str, int]
    rounded: Sequence[Rounded] = ()
    left_out: Sequence[str] = ()


@dataclass(frozen=True)
class ExportRequest:
    """What is asked for. `variant` is the target's, "" for the one that keeps the most."""

    source: Source
    folder: ModelFolder
    target: Path
    variant: str = ""
    requantize: bool = False
    overwrite: bool = False


class ExportTarget(Protocol):
    """What a module of this package offers."""

    VARIANTS: Sequence[str]

    def export(self, request: ExportRequest, progress: ReportProgress) -> Exported:
        """Write the model. Raises ModelError naming what the layout cannot hold, and what writing raises."""
        ...


def targets() -> list[str]:
    """The names of the targets."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_"))


def find_export_target(name: str) -> tuple[ExportTarget, str]:
    """Module and variant of `NAME[:VARIANT]`. Raises UsageError listing what there is."""
    kind, colon, variant = name.partition(":")
    if kind in targets():
        module = cast(ExportTarget, importlib.import_module(f"{__name__}.{kind}"))
        if not colon or variant in module.VARIANTS:
            return module, variant
        known = ", ".join(f"{kind}:{each}" for each in module.VARIANTS) or kind
        raise UsageError(f"{name}: not a kind of {kind}", f"choose from: {known}")
    raise UsageError(f"{name}: not a layout that can be written", f"choose from: {', '.join(targets())}")


def without_predictor(folder: ModelFolder) -> tuple[str, ...]:
    """As `Exported.left_out`, where a layout has no place for the head that predicts further tokens."""
    return () if folder.predictor is None else ("the head that predicts further tokens (mtp.*)",)


def would_round(name: str, what: str, code: str = "requantize") -> ModelError:
    """The error for a tensor that the layout cannot hold exactly."""
    return ModelError(f"{name}: {what}", code=code)
