"""The error plot: valid SVG for any names, one mark per linear, higher for a larger error."""

from pathlib import Path
from xml.etree import ElementTree

import pytest

from mycli.cli.reports.plot import LayerError, draw_errors, require_svg, write_errors
from mycli.runtime.errors import UsageError

SVG = "{http://www.w3.org/2000/svg}"
POINTS = [
    LayerError("model.layers.0.self_attn.q_proj", 1e-3, 2e-3),
    LayerError("model.layers.0.mlp.down_proj", 1e-2, 5e-2),
    LayerError("model.layers.1.self_attn.q_proj", 0.0, None),
    LayerError("lm_head", 1e-4, None),
]


def test_every_linear_is_marked_and_more_error_is_higher() -> None:
    root = ElementTree.fromstring(draw_errors("a model", POINTS))
    groups = root.findall(f"{SVG}g")
    assert [group.findtext(f"{SVG}title", "").split(":")[0] for group in groups] == [point.name for point in POINTS]
    assert groups[0].findtext(f"{SVG}title") == f"{POINTS[0].name}: 0.100%, 0.200% if rounded to nearest"
    marks = [group.findall(f"{SVG}circle") for group in groups]
    assert [len(each) for each in marks] == [2, 2, 1, 1], "a ring only where rounding's error is known"
    heights = {point.name: float(mark[-1].attrib["cy"]) for point, mark in zip(POINTS, marks, strict=True)}
    ordered = sorted(POINTS, key=lambda point: point.error)
    assert sorted(heights, key=lambda name: -heights[name]) == [point.name for point in ordered]
    across = [float(mark[-1].attrib["cx"]) for mark in marks]
    assert across == sorted(across) and len(set(across)) == len(across)
    colours = [mark[-1].attrib["fill"] for mark in marks]
    assert colours[0] == colours[2] != colours[1], "one colour a kind"


def test_names_cannot_break_the_picture() -> None:
    root = ElementTree.fromstring(draw_errors("<&\"'>", [LayerError("</svg><script>", 0.5, 0.5)]))
    assert "<&\"'>" in root.findall(f"{SVG}text")[0].text  # type: ignore[operator]  # a string, or the test fails
    assert root.find(f".//{SVG}script") is None


def test_only_svg_and_only_something(tmp_path: Path) -> None:
    require_svg(tmp_path / "a.SVG")
    for name in ("a.png", "a", "a.svg.pdf"):
        with pytest.raises(UsageError, match=r"written as \.svg only"):
            require_svg(tmp_path / name)
    with pytest.raises(UsageError, match="no layer has a known error"):
        write_errors(tmp_path / "a.svg", "a model", [])
    write_errors(tmp_path / "a.svg", "a model", POINTS)
    assert ElementTree.parse(tmp_path / "a.svg").getroot().tag == f"{SVG}svg"
