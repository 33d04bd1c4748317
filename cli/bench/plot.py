"""A picture of servers under load, from what `bench --serve` measured: SVG, one panel a measure, one line a server.

Knows the rows of `cli.bench.serving` and nothing of servers.
"""

import math
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path

from mycli.cli.bench.results import Row
from mycli.quant.plot import COLOURS, text_at
from mycli.runtime.utils.files import disk_errors

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 400, 300, 62, 14, 46, 34  # of a panel
_TIMES = (("ttft", "time to the first token, ms"), ("tpot", "time per token after it, ms"))


def draw_loads(rows: Sequence[Row]) -> str:
    """Tokens per second, and p50 (a line) and p95 (dashes) of both times, over the loads in the order measured."""
    tests = list(dict.fromkeys(row["test"] for row in rows))
    servers = list(dict.fromkeys(row["model"] for row in rows))
    colours = {name: COLOURS[index % len(COLOURS)] for index, name in enumerate(servers)}
    height = _HEIGHT + 18 * len(servers) + 8
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {3 * _WIDTH} {height}" font-family="sans-serif">',
        f'<rect width="{3 * _WIDTH}" height="{height}" fill="white"/>',
    ]
    rates = [(row, row["tokens_per_second"]) for row in rows]
    lines += _panel(0, "tokens per second, all clients", tests, colours, [(rates, "")], _linear)
    for number, (field, title) in enumerate(_TIMES, start=1):
        curves = []
        for share, dashes in ((50, ""), (95, "4 3")):
            found = [(row, 1e3 * row[name]) for row in rows if row[name := f"{field}_p{share}_seconds"]]
            curves.append((found, dashes))
        lines += _panel(number, title, tests, colours, curves, _logarithmic)
    for index, (name, colour) in enumerate(colours.items()):
        at = _HEIGHT + 18 * index + 8
        lines += [f'<circle cx="{_LEFT}" cy="{at - 4}" r="4" fill="{colour}"/>', text_at(_LEFT + 10, at, name, 12)]
    return "\n".join([*lines, "</svg>", ""])


Curve = tuple[Sequence[tuple[Row, float]], str]  # what each row has, and how the line is dashed
Scale = tuple[Callable[[float], float], Sequence[float]]  # where a value lies from 0 to 1, and values to name


def _linear(values: Sequence[float]) -> Scale:
    step = 10 ** math.floor(math.log10(max(*values, 1e-9)))
    top = step * math.ceil(max(values) / step)
    return lambda value: value / top, [top * part / 4 for part in range(5)]


def _logarithmic(values: Sequence[float]) -> Scale:
    low = math.floor(math.log10(max(min(values), 1e-3)))
    high = max(low + 1, math.ceil(math.log10(max(*values, 1e-3))))
    return lambda value: (math.log10(max(value, 1e-3)) - low) / (high - low), [
        10.0**one for one in range(low, high + 1)
    ]


def _panel(
    number: int,
    title: str,
    tests: Sequence[str],
    colours: dict[str, str],
    curves: Sequence[Curve],
    make: Callable[[Sequence[float]], Scale],
) -> list[str]:
    left, right = number * _WIDTH + _LEFT, (number + 1) * _WIDTH - _RIGHT
    lines = [text_at(left, 24, title, 14)]
    values = [value for curve, _ in curves for _, value in curve]
    if not values:
        return [*lines, text_at(left, 60, "not measured", 12)]
    scale, named = make([*values, values[0]])

    def y(value: float) -> float:
        return _HEIGHT - _BOTTOM - scale(value) * (_HEIGHT - _TOP - _BOTTOM)

    across = {test: left + (index + 0.5) * (right - left) / len(tests) for index, test in enumerate(tests)}
    for value in named:
        lines.append(f'<path d="M{left} {y(value):.1f}H{right}" stroke="#ddd"/>')
        lines.append(text_at(left - 6, y(value) + 4, f"{value:g}", 10, "end"))
    for test, x in across.items():
        lines.append(text_at(x, _HEIGHT - _BOTTOM + 16, test.split()[0], 10, "middle"))
    for curve, dashes in curves:
        for name, colour in colours.items():
            own = [(row["test"], value) for row, value in curve if row["model"] == name]
            points = [(across[test], y(value), f"{name}, {test}: {value:.4g}") for test, value in own]
            path = " ".join(f"{x:.1f},{at:.1f}" for x, at, _ in points)
            style = f'fill="none" stroke="{colour}" stroke-dasharray="{dashes or "none"}"'
            lines.append(f'<polyline points="{path}" {style}/>')
            for x, at, told in points:
                disc = f'<circle cx="{x:.1f}" cy="{at:.1f}" r="3" fill="{colour}"/>'
                lines.append(f"<g><title>{escape(told, quote=False)}</title>{disc}</g>")
    return lines


def write_plot(path: Path, rows: Sequence[Row]) -> None:
    """Draw into a file. Raises what `disk_errors` raises."""
    with disk_errors(path):
        path.write_text(draw_loads(rows), encoding="utf-8")
