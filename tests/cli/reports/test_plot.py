"""The error plot: valid SVG for any names, one mark per linear, higher for a larger error."""

from pathlib import Path
from xml.etree import ElementTree

import pytest

from mycli.cli.reports.plot import (
    Chart,
    LayerError,
    Point,
    draw_errors,
    draw_loads,
    require_svg,
    write_charts,
    write_errors,
)
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
    assert across == pytest.approx([178.75, 396.25, 613.75, 831.25], abs=0.06), "as far apart as the picture allows"
    # From 1e-9 to 0.1, the power above the largest error, in a picture of 420 units with margins of 50 and 60.
    assert list(heights.values()) == pytest.approx(
        [360 - 310 * (power + 9) / 8 for power in (-3, -2, -9, -4)], abs=0.06
    )
    colours = [mark[-1].attrib["fill"] for mark in marks]
    assert colours[0] == colours[2] != colours[1], "one colour a kind"


@pytest.mark.parametrize("sizes", [(10.0, 40.0), (0.0, 0.0)], ids=["sizes", "zeros"])
def test_charts_lie_below_each_other_with_all_marks_inside(tmp_path: Path, sizes: tuple[float, float]) -> None:
    points = [Point("a", sizes[0], 1e-3, "int4"), Point("b", sizes[1], 1e-2, "int8")]
    write_charts(tmp_path / "a.svg", [Chart("first", "size", "KL", points), Chart("second", "time", "KL", points)])
    root = ElementTree.parse(tmp_path / "a.svg").getroot()
    _, _, width, height = map(float, root.attrib["viewBox"].split())
    charts = root.findall(f"{SVG}g")
    assert [chart.attrib["transform"] for chart in charts] == ["translate(0 0)", f"translate(0 {height / 2:.0f})"]
    for chart in charts:
        marks = [*chart.iter(f"{SVG}text"), *chart.iter(f"{SVG}circle")]
        places = [[float(mark.get(name, mark.get(f"c{name}", ""))) for name in "xy"] for mark in marks]
        assert all(0 < x < width and 0 < y < height / 2 for x, y in places)
        first, second = (disc.attrib for group in chart.findall(f"{SVG}g") for disc in group.iter(f"{SVG}circle"))
        assert (float(first["cx"]) < float(second["cx"])) == (sizes[0] < sizes[1])
        assert float(first["cy"]) > float(second["cy"])


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


def test_times_of_a_load_are_in_milliseconds() -> None:
    times = {"ttft_p50_seconds": 0.25, "ttft_p95_seconds": 0.5, "tpot_p50_seconds": None, "tpot_p95_seconds": 0.0625}
    root = ElementTree.fromstring(draw_loads([{"model": "m", "test": "c1 p1 n1", "tokens_per_second": 8.0, **times}]))
    titles = [title.text for title in root.iter(f"{SVG}title")]
    assert titles == [f"m, c1 p1 n1: {value}" for value in ("8", "250", "500", "62.5")]
