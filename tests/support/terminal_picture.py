"""Draws the picture of README: a real conversation in a terminal, as SVG.

PYTHONPATH=.links python -m tests.support.terminal_picture docs/terminal.svg
"""

import os
import sys
from html import escape
from pathlib import Path

import pexpect
import pyte

COLUMNS, ROWS = 84, 18
TYPED = ("My name is Leo.", "What is my name?", "What is 7 times 8?", "/bye")
LINE, CHARACTER, MARGIN = 20, 8.4, 16  # points


def screen() -> list[str]:
    shown = pyte.Screen(COLUMNS, ROWS)
    stream = pyte.Stream(shown)
    child: pexpect.spawn[str] = pexpect.spawn(
        sys.executable,
        ["-m", "mycli.cli", "chat", "pico", "-t", "0"],
        env={**os.environ, "TERM": "xterm", "NO_COLOR": "1"},  # type: ignore[arg-type]  # a dict is a mapping
        dimensions=(ROWS, COLUMNS),
        encoding="utf-8",
        timeout=120,
    )
    for line in TYPED:
        child.expect_exact(">>> ")
        stream.feed(f"{child.before}>>> ")
        child.sendline(line)
    child.expect(pexpect.EOF)
    stream.feed(child.before or "")
    lines = ["$ mycli chat pico", *(line.rstrip() for line in shown.display)]
    while not lines[-1]:
        lines.pop()
    return lines


def draw(lines: list[str]) -> str:
    """Return an SVG of a dark rectangle with the lines; the program's own messages are dimmed."""
    width, height = COLUMNS * CHARACTER + 2 * MARGIN, len(lines) * LINE + 2 * MARGIN
    shown = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}" font-family="monospace" '
        'font-size="14">',
        f'<rect width="{width:.0f}" height="{height}" rx="8" fill="#1b1f24"/>',
    ]
    for number, line in enumerate(lines):
        colour = "#8b949e" if " · " in line or line.startswith("hint") else "#e6edf3"
        at = MARGIN + LINE * (number + 0.75)
        shown.append(f'<text x="{MARGIN}" y="{at:.0f}" fill="{colour}" xml:space="preserve">{escape(line)}</text>')
    return "\n".join([*shown, "</svg>", ""])


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(draw(screen()), encoding="utf-8")
