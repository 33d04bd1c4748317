"""SVG charts: the error of each quantized layer (--plot of quantize and show), and servers under load (bench).

The SVG is written directly, so no plotting library has to be installed.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from mycli.cli.reports.bench_results import Row
from mycli.runtime.errors import UsageError
from mycli.runtime.utils.files import disk_errors, require_writable

if TYPE_CHECKING:  # torch takes seconds to import
    from mycli.quant.output.model_card import Layer

COLOURS = ("#1b6ca8", "#d1495b", "#2e933c", "#8f5db7", "#e08e2b", "#3aa6a6", "#6b705c", "#000000")
_MIN_ERROR = 1e-9  # smaller errors are drawn here: the axis is logarithmic
_MIN_KL = 1e-6  # nats, for the same reason
_MIN_TIME = 1e-3  # milliseconds, for the same reason
_TIMES = (("ttft", "time to the first token, ms"), ("tpot", "time per token after it, ms"))


@dataclass(frozen=True)
class LayerError:
    """The relative error of a linear, and that of plain rounding to the same scales if it was measured."""

    name: str
    error: float
    rounding: float | None


def layer_error(layer: "Layer") -> LayerError:
    """The error of a layer's outputs; without calibration data, that of its weights."""
    error = layer.error if layer.output_error is None else layer.output_error
    return LayerError(layer.name, error, layer.rounding_output_error)


def require_svg(path: Path) -> None:
    """Raise UsageError for a name that does not end in .svg and for a place that cannot be written to."""
    if path.suffix.lower() != ".svg":
        raise UsageError(f"{path}: plots are written as .svg only", f"name it {path.with_suffix('.svg')}")
    require_writable(path)


def write_errors(path: Path, title: str, errors: Sequence[LayerError]) -> None:
    """Write `draw_errors` to a file. Raises UsageError without any error to draw, and what `disk_errors` raises."""
    if not errors:
        raise UsageError(f"{path}: no layer has a known error", "quantize the model with mycli quantize")
    with disk_errors(path):
        path.write_text(draw_errors(title, errors), encoding="utf-8")


def write_loads(path: Path, rows: Sequence[Row]) -> None:
    """Write `draw_loads` to a file. Raises what `disk_errors` raises."""
    with disk_errors(path):
        path.write_text(draw_loads(rows), encoding="utf-8")


def draw_errors(title: str, errors: Sequence[LayerError]) -> str:
    """One column per linear in the order given: a disc for its error, a ring for that of plain rounding."""
    width, height, left, right, top, bottom = 960, 420, 70, 20, 50, 60
    values = [value for layer in errors for value in (layer.error, layer.rounding) if value is not None]
    share, powers = _logarithmic(values, _MIN_ERROR)

    def y(value: float) -> float:
        return height - bottom - share(value) * (height - top - bottom)

    kinds = list(dict.fromkeys(layer.name.rsplit(".", 1)[-1] for layer in errors))  # q_proj, lm_head
    colours = _colours(kinds)
    lines = [_text(left, 22, f"{title}: error of each layer (disc) and with plain rounding (ring)", 15)]
    for power in powers:
        lines += _grid_line(left, width - right, y(power), 8, f"{power:.0e}", 11)
    previous = ""
    for index, layer in enumerate(errors):
        x = left + (index + 0.5) * (width - left - right) / len(errors)
        colour = colours[layer.name.rsplit(".", 1)[-1]]
        rounding = "" if layer.rounding is None else f", {layer.rounding:.3%} if rounded to nearest"
        lines.append(f"<g><title>{escape(f'{layer.name}: {layer.error:.3%}{rounding}', quote=False)}</title>")
        if layer.rounding is not None:
            ring = y(layer.rounding)
            lines.append(f'<path d="M{x:.1f} {y(layer.error):.1f}V{ring:.1f}" stroke="#bbb"/>')
            lines.append(f'<circle cx="{x:.1f}" cy="{ring:.1f}" r="3" fill="white" stroke="{colour}"/>')
        lines.append(f'<circle cx="{x:.1f}" cy="{y(layer.error):.1f}" r="3.5" fill="{colour}"/></g>')
        block = next((part for part in layer.name.split(".") if part.isdecimal()), "")  # empty for the head
        if block != previous:
            lines.append(_text(x, height - bottom + 16, block, 10))
            previous = block
    for index, (kind, colour) in enumerate(colours.items()):
        x = left + index * (width - left - right) / len(kinds)
        lines.append(f'<circle cx="{x:.1f}" cy="{height - 18}" r="4" fill="{colour}"/>')
        lines.append(_text(x + 9, height - 14, kind, 11))
    return _document(width, height, lines)


@dataclass(frozen=True)
class Point:
    """A disc of a scatter plot: its label, both values, and the series that decides its colour."""

    label: str
    x: float
    y: float
    series: str


@dataclass(frozen=True)
class Chart:
    """A scatter plot with a linear axis `across` and a logarithmic axis `up`, one colour per series."""

    title: str
    across: str
    up: str
    points: Sequence[Point]


_CHART_WIDTH, _CHART_HEIGHT = 720, 420


def write_charts(path: Path, charts: Sequence[Chart]) -> None:
    """Write charts, one below the other, to a file. Raises what `disk_errors` raises."""
    lines = []
    for index, chart in enumerate(charts):
        lines += [f'<g transform="translate(0 {index * _CHART_HEIGHT})">', *_draw_chart(chart), "</g>"]
    with disk_errors(path):
        path.write_text(_document(_CHART_WIDTH, len(charts) * _CHART_HEIGHT, lines), encoding="utf-8")


def _draw_chart(chart: Chart) -> list[str]:
    width, height, left, right, top, bottom = _CHART_WIDTH, _CHART_HEIGHT, 70, 20, 50, 70
    colours = _colours(list(dict.fromkeys(point.series for point in chart.points)))
    x_share, x_labels = _linear([point.x for point in chart.points])
    y_share, y_labels = _logarithmic([point.y for point in chart.points], _MIN_KL)
    lines = [_text(left, 24, chart.title, 15), _text(left, 42, f"{chart.up}, by {chart.across}", 12)]
    for value in y_labels:
        y = height - bottom - y_share(value) * (height - top - bottom)
        lines += _grid_line(left, width - right, y, 8, f"{value:.0e}", 11)
    for value in x_labels:
        x = left + x_share(value) * (width - left - right)
        lines.append(_text(x, height - bottom + 18, f"{value:g}", 11, "middle"))
    for point in chart.points:
        x = left + x_share(point.x) * (width - left - right)
        y = height - bottom - y_share(point.y) * (height - top - bottom)
        label = escape(f"{point.label}: {point.y:.3g} at {point.x:.4g}", quote=False)
        disc = f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4.5" fill="{colours[point.series]}" fill-opacity="0.8"/>'
        lines.append(f"<g><title>{label}</title>{disc}</g>")
    for index, (name, colour) in enumerate(colours.items()):
        x = left + index * (width - left - right) / len(colours)
        lines.append(f'<circle cx="{x:.1f}" cy="{height - 20}" r="4" fill="{colour}"/>')
        lines.append(_text(x + 9, height - 16, name, 11))
    return lines


_PANEL_WIDTH, _PANEL_HEIGHT = 400, 300
_PANEL_LEFT, _PANEL_RIGHT, _PANEL_TOP, _PANEL_BOTTOM = 62, 14, 46, 34  # margins


def draw_loads(rows: Sequence[Row]) -> str:
    """One panel per measure, one line per server: tokens per second, then both times with p95 dashed."""
    tests = list(dict.fromkeys(row["test"] for row in rows))
    colours = _colours(list(dict.fromkeys(row["model"] for row in rows)))
    rates = [(row, row["tokens_per_second"]) for row in rows]
    lines = _panel(0, "tokens per second, all clients", tests, colours, [(rates, "")], _linear)
    for number, (field, title) in enumerate(_TIMES, start=1):
        curves = []
        for share, dashes in ((50, ""), (95, "4 3")):
            times = [(row, 1e3 * row[name]) for row in rows if row[name := f"{field}_p{share}_seconds"]]
            curves.append((times, dashes))
        lines += _panel(number, title, tests, colours, curves, _logarithmic)
    for index, (name, colour) in enumerate(colours.items()):
        y = _PANEL_HEIGHT + 18 * index + 8
        lines.append(f'<circle cx="{_PANEL_LEFT}" cy="{y - 4}" r="4" fill="{colour}"/>')
        lines.append(_text(_PANEL_LEFT + 10, y, name, 12))
    return _document(3 * _PANEL_WIDTH, _PANEL_HEIGHT + 18 * len(colours) + 8, lines)


Curve = tuple[Sequence[tuple[Row, float]], str]  # the value of each row, and the dashes of the line
Scale = tuple[Callable[[float], float], Sequence[float]]  # position of a value from 0 to 1, and values to label


def _panel(
    number: int,
    title: str,
    tests: Sequence[str],
    colours: dict[str, str],
    curves: Sequence[Curve],
    scale: Callable[[Sequence[float]], Scale],
) -> list[str]:
    left, right = number * _PANEL_WIDTH + _PANEL_LEFT, (number + 1) * _PANEL_WIDTH - _PANEL_RIGHT
    lines = [_text(left, 24, title, 14)]
    values = [value for curve, _ in curves for _, value in curve]
    if not values:
        return [*lines, _text(left, 60, "not measured", 12)]
    share, labels = scale(values)

    def y(value: float) -> float:
        return _PANEL_HEIGHT - _PANEL_BOTTOM - share(value) * (_PANEL_HEIGHT - _PANEL_TOP - _PANEL_BOTTOM)

    across = {test: left + (index + 0.5) * (right - left) / len(tests) for index, test in enumerate(tests)}
    for value in labels:
        lines += _grid_line(left, right, y(value), 6, f"{value:g}", 10)
    for test, x in across.items():
        lines.append(_text(x, _PANEL_HEIGHT - _PANEL_BOTTOM + 16, test.split()[0], 10, "middle"))
    for curve, dashes in curves:
        for name, colour in colours.items():
            points = [(row["test"], value) for row, value in curve if row["model"] == name]
            path = " ".join(f"{across[test]:.1f},{y(value):.1f}" for test, value in points)
            style = f'fill="none" stroke="{colour}" stroke-dasharray="{dashes or "none"}"'
            lines.append(f'<polyline points="{path}" {style}/>')
            for test, value in points:
                disc = f'<circle cx="{across[test]:.1f}" cy="{y(value):.1f}" r="3" fill="{colour}"/>'
                title = escape(f"{name}, {test}: {value:.4g}", quote=False)
                lines.append(f"<g><title>{title}</title>{disc}</g>")
    return lines


def _linear(values: Sequence[float]) -> Scale:
    step = 10 ** math.floor(math.log10(max(*values, 1e-9)))
    top = step * max(1, math.ceil(max(values) / step))
    return lambda value: value / top, [top * part / 4 for part in range(5)]


def _logarithmic(values: Sequence[float], least: float = _MIN_TIME) -> Scale:
    low = math.floor(math.log10(max(min(values), least)))
    high = max(low + 1, math.ceil(math.log10(max(*values, least))))
    powers = [10.0**power for power in range(low, high + 1)]
    return lambda value: (math.log10(max(value, least)) - low) / (high - low), powers


def _colours(names: Sequence[str]) -> dict[str, str]:
    return {name: COLOURS[index % len(COLOURS)] for index, name in enumerate(names)}


def _document(width: int, height: int, lines: Sequence[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif">'
    background = f'<rect width="{width}" height="{height}" fill="white"/>'
    return "\n".join([head, background, *lines, "</svg>", ""])


def _grid_line(left: float, right: float, y: float, gap: float, label: str, size: int) -> list[str]:
    line = f'<path d="M{left} {y:.1f}H{right}" stroke="#ddd"/>'
    return [line, _text(left - gap, y + 4, label, size, "end")]


def _text(x: float, y: float, text: str, size: int, anchor: str = "start") -> str:
    shown = escape(text, quote=False)  # names come from model files
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}">{shown}</text>'
