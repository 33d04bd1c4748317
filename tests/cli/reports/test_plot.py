"""The error plot: valid SVG for any names, one mark per linear, higher for a larger error."""

from pathlib import Path
from xml.etree import ElementTree

import pytest

from mycli.cli.reports.plot import (
    COLOURS,
    Chart,
    LayerError,
    Point,
    _colours,
    _linear,
    _logarithmic,
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


def test_a_linear_axis_begins_at_zero_and_ends_at_a_round_number() -> None:
    for values, top in (([3.0, 42.0], 50.0), ([10.0, 40.0], 40.0), ([0.9], 0.9), ([1.0], 1.0), ([0.12], 0.2)):
        share, labels = _linear(values)
        assert labels == pytest.approx([0, top / 4, top / 2, 3 * top / 4, top])
        assert [share(0), share(top / 2), share(top)] == pytest.approx([0, 0.5, 1])


def test_a_logarithmic_axis_holds_whole_powers() -> None:
    for values, powers in (
        ([0.5, 20.0], [0.1, 1.0, 10.0, 100.0]),
        ([1.0], [1.0, 10.0]),
        ([10.0, 10.0], [10.0, 100.0]),
        ([0.0, 1.0], [0.01, 0.1, 1.0]),
    ):
        share, labels = _logarithmic(values, 0.01)
        assert labels == pytest.approx(powers)
        shares = [share(power) for power in powers]
        assert shares == pytest.approx([index / (len(powers) - 1) for index in range(len(powers))])
        assert share(0.0) == share(0.01) >= 0 or min(values) > 0.01


def test_colours_begin_again() -> None:
    names = [f"n{index}" for index in range(9)]
    assert list(_colours(names).values()) == [*COLOURS, COLOURS[0]]


def _places(element: ElementTree.Element, kind: str) -> list[tuple[float, float]]:
    names = ("cx", "cy") if kind == "circle" else ("x", "y")
    return [(float(found.attrib[names[0]]), float(found.attrib[names[1]])) for found in element.iter(f"{SVG}{kind}")]


def test_a_chart_uses_the_picture_between_its_margins(tmp_path: Path) -> None:
    """A picture of 720 by 420 units with margins of 70, 20, 50 and 70; from 0 to 40 across, from 1e-3 to 1e-2 up."""
    points = [Point("a", 10.0, 1e-3, "int4"), Point("b", 40.0, 1e-2, "int8")]
    write_charts(tmp_path / "a.svg", [Chart("first", "size", "KL", points)])
    (chart,) = ElementTree.parse(tmp_path / "a.svg").getroot().findall(f"{SVG}g")
    assert _places(chart, "circle") == [(227.5, 350), (700, 50), (70, 400), (385, 400)]
    texts = _places(chart, "text")
    assert texts[:4] == [(70, 24), (70, 42), (62, 354), (62, 54)]
    assert texts[4:] == [(70, 368), (227.5, 368), (385, 368), (542.5, 368), (700, 368), (79, 404), (394, 404)]


def test_panels_of_loads_lie_side_by_side() -> None:
    """Panels of 400 by 300 units with margins of 62, 14, 46 and 34; a legend below them."""
    times = {f"{field}_p{share}_seconds": 0.01 for field in ("ttft", "tpot") for share in (50, 95)}
    rows = [
        {"model": model, "test": test, "tokens_per_second": rate, **times}
        for model, test, rate in (("m", "c1 p1", 8.0), ("m", "c2 p1", 4.0), ("other", "c1 p1", 2.0))
    ]
    root = ElementTree.fromstring(draw_loads(rows))
    assert root.attrib["viewBox"] == "0 0 1200 344"
    lines = [line.attrib["points"] for line in root.iter(f"{SVG}polyline")]
    assert lines[:2] == ["143.0,46.0 305.0,156.0", "143.0,211.0"]
    assert lines[2:4] == ["543.0,266.0 705.0,266.0", "543.0,266.0"] and lines[6] == "943.0,266.0 1105.0,266.0"
    assert _places(root, "circle")[-2:] == [(62, 304), (62, 322)] and _places(root, "text")[-2:] == [
        (72, 308),
        (72, 326),
    ]
