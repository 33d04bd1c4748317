"""A picture of where a quantized model lost: the error of each linear's outputs, beside that of plain rounding. SVG.

Written by hand, so that it needs nothing installed. Knows names and numbers, not models; does not import torch.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from mycli.runtime.errors import UsageError
from mycli.runtime.utils.files import disk_errors, require_writable

if TYPE_CHECKING:
    from mycli.quant.model_card import Layer

_WIDTH, _HEIGHT = 960, 420
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 20, 50, 60
COLOURS = ("#1b6ca8", "#d1495b", "#2e933c", "#8f5db7", "#e08e2b", "#3aa6a6", "#6b705c", "#000000")
_SMALLEST = 1e-9  # errors below are drawn there: a logarithm needs one


@dataclass(frozen=True)
class Point:
    """A linear by its full name, its relative error, and that of plain rounding where it is known."""

    name: str
    error: float
    rounding: float | None


def point(layer: "Layer") -> Point:
    """Of a quantized linear: the error of its outputs, or of its weights where no data was seen."""
    error = layer.error if layer.output_error is None else layer.output_error
    return Point(layer.name, error, layer.rounding_output_error)


def require_svg(path: Path) -> None:
    """Raises UsageError for any other kind of picture, and for a place where no file can be written."""
    if path.suffix.lower() != ".svg":
        raise UsageError(f"{path}: only .svg is drawn", f"name it {path.with_suffix('.svg')}")
    require_writable(path)


def write(path: Path, title: str, points: Sequence[Point]) -> None:
    """Draw into a file. Raises UsageError where nothing can be drawn, and what `disk_errors` raises."""
    if not points:
        raise UsageError(f"{path}: no layer has an error that is known", "quantize the model with this program")
    with disk_errors(path):
        path.write_text(draw(title, points), encoding="utf-8")


def draw(title: str, points: Sequence[Point]) -> str:
    """One column a linear, in the order given, on a logarithmic axis: a disc for its error, a ring for rounding's."""
    values = [value for point in points for value in (point.error, point.rounding) if value is not None]
    low = math.floor(math.log10(max(_SMALLEST, min(values))))
    high = max(low + 1, math.ceil(math.log10(max(_SMALLEST, *values))))

    def x(index: int) -> float:
        return _LEFT + (index + 0.5) * (_WIDTH - _LEFT - _RIGHT) / len(points)

    def y(value: float) -> float:
        share = (math.log10(max(_SMALLEST, value)) - low) / (high - low)
        return _HEIGHT - _BOTTOM - share * (_HEIGHT - _TOP - _BOTTOM)

    kinds = list(dict.fromkeys(_kind(point.name) for point in points))
    colours = {kind: COLOURS[index % len(COLOURS)] for index, kind in enumerate(kinds)}
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        text_at(_LEFT, 22, f"{title}: error of each layer (disc) and with plain rounding (ring)", 15),
    ]
    for power in range(low, high + 1):
        at = y(10.0**power)
        lines.append(f'<path d="M{_LEFT} {at:.1f}H{_WIDTH - _RIGHT}" stroke="#ddd"/>')
        lines.append(text_at(_LEFT - 8, at + 4, f"{10.0**power:.0e}", 11, "end"))
    previous = ""
    for index, point in enumerate(points):
        across, colour = x(index), colours[_kind(point.name)]
        lines.append(f"<g><title>{escape(_tell(point), quote=False)}</title>")
        if point.rounding is not None:
            ring = y(point.rounding)
            lines.append(f'<path d="M{across:.1f} {y(point.error):.1f}V{ring:.1f}" stroke="#bbb"/>')
            lines.append(f'<circle cx="{across:.1f}" cy="{ring:.1f}" r="3" fill="white" stroke="{colour}"/>')
        lines.append(f'<circle cx="{across:.1f}" cy="{y(point.error):.1f}" r="3.5" fill="{colour}"/></g>')
        block = _block(point.name)
        if block != previous:
            lines.append(text_at(across, _HEIGHT - _BOTTOM + 16, block, 10))
            previous = block
    for index, (kind, colour) in enumerate(colours.items()):
        at = _LEFT + index * (_WIDTH - _LEFT - _RIGHT) / len(kinds)
        lines.append(f'<circle cx="{at:.1f}" cy="{_HEIGHT - 18}" r="4" fill="{colour}"/>')
        lines.append(text_at(at + 9, _HEIGHT - 14, kind, 11))
    return "\n".join([*lines, "</svg>", ""])


def _kind(name: str) -> str:
    """q_proj, down_proj, lm_head."""
    return name.rsplit(".", 1)[-1]


def _block(name: str) -> str:
    """The number of the layer, empty for the head."""
    return next((part for part in name.split(".") if part.isdecimal()), "")


def _tell(point: Point) -> str:
    rounding = "" if point.rounding is None else f", {point.rounding:.3%} if rounded to nearest"
    return f"{point.name}: {point.error:.3%}{rounding}"


def text_at(x: float, y: float, text: str, size: int, anchor: str = "start") -> str:
    """A line of text; what it says cannot be taken for markup."""
    shown = escape(text, quote=False)
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}">{shown}</text>'
