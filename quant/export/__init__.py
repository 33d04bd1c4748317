"""Exports models to other programs' layouts, one module per target; the file name is the registry.

A target has the members of `ExportTarget`. It refuses weights that its layout would round, unless `requantize` allows
it; then it reports each tensor's error.
"""

import importlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, cast

from mycli.quant.declarations import file_names
from mycli.quant.ggml.mixes import MIXES
from mycli.quant.progress import ReportProgress
from mycli.runtime.checkpoint.model_folder import ModelFolder
from mycli.runtime.errors import ModelError, UsageError
from mycli.runtime.hub.resolve import Source


@dataclass(frozen=True)
class Rounded:
    """A rounded tensor: the type it was written in, and its relative squared error."""

    name: str
    kind: str
    error: float


@dataclass(frozen=True)
class Exported:
    path: Path
    nbytes: int
    kinds: Mapping[str, int]  # number of tensors by type
    rounded: Sequence[Rounded] = ()
    left_out: Sequence[str] = ()  # parts of the model that the layout cannot hold
    separate_experts: bool = False  # packed linears, of which transformers 5.23 reads only those of dense layers


@dataclass(frozen=True)
class ExportRequest:
    source: Source
    folder: ModelFolder
    target: Path
    variant: str = ""  # one of the target's `VARIANTS`; "" for the least loss
    requantize: bool = False
    overwrite: bool = False


class ExportTarget(Protocol):
    """The members of a target's module."""

    VARIANTS: Sequence[str]

    def export(self, request: ExportRequest, progress: ReportProgress) -> Exported:
        """Write the model. Raises ModelError naming a tensor or field without a place in the layout."""
        ...


def targets() -> list[str]:
    return file_names(__path__)


def find_export_target(name: str) -> tuple[ExportTarget, str]:
    """Parse `NAME[:VARIANT]` and import the target. Raises UsageError listing the choices."""
    kind, colon, variant = name.lower().partition(":")
    module = cast(ExportTarget, importlib.import_module(f"{__name__}.{kind}")) if kind in targets() else None
    if module is not None and (not colon or variant in module.VARIANTS):
        return module, variant
    mix = variant if kind == "gguf" else kind
    if mix in MIXES:
        raise UsageError(f"{name}: a mix of types is made by quantizing", code="gguf-mix", data={"type": mix})
    if module is not None:
        known = ", ".join(f"{kind}:{variant}" for variant in module.VARIANTS) or kind
        raise UsageError(f"{name}: not a variant of {kind}", f"choose from: {known}")
    raise UsageError(f"{name}: not a layout that export can write", f"choose from: {', '.join(targets())}")


def without_mtp_head(folder: ModelFolder) -> tuple[str, ...]:
    return () if folder.mtp_head is None else ("the MTP head (mtp.*)",)


def require_in_range(name: str, kind: str, error: float) -> None:
    """Raise ModelError for the error of a rounded tensor that is not finite."""
    if not math.isfinite(error):
        raise ModelError(f"{name}: values beyond the range of {kind}", "choose a type with the range of bf16")


def would_round(name: str, what: str, code: str = "requantize") -> ModelError:
    return ModelError(f"{name}: {what}", code=code)
