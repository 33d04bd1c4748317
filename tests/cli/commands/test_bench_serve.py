"""Test `mycli bench serve` against a server with known answers: table, records, limits and refusals."""

import io
import json
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest

from mycli.cli.commands.bench_serve import _COLUMNS, _loads, _parse_slo, _rate, _row, meets_slo
from mycli.cli.main import main
from mycli.cli.output import Output
from mycli.cli.reports.bench_results import Row
from mycli.cli.reports.plot import draw_loads
from mycli.runtime.diagnostics.completion_client import Reply
from mycli.runtime.diagnostics.serving_load import Load, LoadResult
from mycli.runtime.errors import ExitCode, ModelError, UsageError
from tests.support.command_line import COMMAND, SECONDS
from tests.support.completion_server import scripted
from tests.support.forked import ForkedProcess


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


LOAD = ("-p", "12", "-n", "3", "-r", "2", "--clients", "2,1", "--requests", "4")


@pytest.fixture(autouse=True)
def quiet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv("MYCLI_API_KEY", raising=False)


def call(*arguments: str) -> int:
    with pytest.raises(SystemExit) as stop:
        main(["bench", "serve", *arguments])
    return int(stop.value.code or 0)


def test_a_table_has_the_smallest_load_first(capsys: pytest.CaptureFixture[str]) -> None:
    with scripted() as server:
        assert call(server.url, *LOAD) == ExitCode.OK
    rows = [[cell.strip() for cell in line.split("|")] for line in capsys.readouterr().out.splitlines()]
    assert [row[2] for row in rows] == ["test", "-" * len(rows[1][2]), "c1 p12 n3", "c2 p12 n3"]
    assert rows[2][1] == f"it at {server.url}"
    assert [row[6] for row in rows[2:]] == ["250 ms"] * 2 and [row[7] for row in rows[2:]] == ["8"] * 2
    assert not any(row[9] for row in rows[2:])


def test_records_hold_every_number_and_can_be_compared(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    kept = tmp_path / "kept.json"
    with scripted() as server:
        assert call(server.url, *LOAD, "--shared", "4", "--json", "--save", str(kept)) == ExitCode.OK
        first, second = json.loads(capsys.readouterr().out)["results"]
        assert call(server.url, *LOAD, "--shared", "4", "--json", "--compare", str(kept)) == ExitCode.OK
    assert [first["test"], second["test"]] == ["c1 p12/4 n3", "c2 p12/4 n3"]
    assert first["requests"] == 8 and first["reply_tokens"] == 24 and first["cached_tokens"] == 16
    assert len(first["samples"]) == 2 and first["failed"] == 0
    for field in ("ttft", "tpot"):
        times = [first[f"{field}_p{share}_seconds"] for share in (50, 95, 99)]
        assert times == sorted(times) and times[0] > 0
    again = json.loads(capsys.readouterr().out)["results"]
    assert all(len(row["change_95"]) == 2 for row in again)


@pytest.mark.parametrize(("width", "shown"), [(45, 3), (70, 4)])
def test_a_narrow_terminal_shows_the_rate_and_the_first_token_before_later_ones(
    width: int, shown: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    server: Any = SimpleNamespace(model="m")
    row = _row(
        server, "m at a server", "http", [LoadResult(Load(8, 3, 1, clients=1), (Reply(0.0, 1.0, 3.0, 8, 4, 3),), 1.0)]
    )
    terminal = Terminal()
    Output(stdout=terminal, stderr=terminal).table([row], _COLUMNS)
    headings = [cell.split()[0] for cell in terminal.getvalue().splitlines()[0].strip("|").split("|")]
    assert sorted(headings) == sorted(["test", "t/s", "TTFT", "server"][:shown])


def test_a_picture_has_a_line_for_every_server_and_measure(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "load.svg"
    with scripted() as one, scripted() as other:
        assert call(one.url, other.url, *LOAD, "--plot", str(path)) == ExitCode.OK
    assert f"plot written to {path}" in capsys.readouterr().err
    picture = ElementTree.fromstring(path.read_text())
    lines = [found for found in picture.iter() if found.tag.endswith("polyline")]
    assert len(lines) == 2 * 5 and {len(found.attrib["points"].split()) for found in lines} == {2}
    titles = [found.text or "" for found in picture.iter() if found.tag.endswith("title")]
    assert sum(title.startswith(f"it at {one.url}, c2 p12 n3: ") for title in titles) == 5


def test_more_is_higher_and_names_cannot_break_the_picture() -> None:
    times = {f"{field}_p{share}_seconds": None for field in ("ttft", "tpot") for share in (50, 95)}
    rows: list[Row] = [
        {"model": "<script>&", "test": f"c{count} p1 n1", "tokens_per_second": 10.0 * count, **times}
        for count in (1, 4)
    ]
    picture = ElementTree.fromstring(draw_loads(rows))
    (line,) = (found for found in picture.iter() if found.tag.endswith("polyline"))
    (low_x, low_y), (high_x, high_y) = (map(float, point.split(",")) for point in line.attrib["points"].split())
    assert low_x < high_x and low_y > high_y
    words = [found.text for found in picture.iter() if found.tag.endswith("text")]
    assert "<script>&" in words and words.count("not measured") == 2


def test_a_limit_that_no_load_meets_ends_with_6(capsys: pytest.CaptureFixture[str]) -> None:
    with scripted() as server:
        assert call(server.url, *LOAD, "--slo", "ttft=600s,tpot=600s") == ExitCode.OK
        assert "c2 p12 n3 is the largest load that meets ttft=600s,tpot=600s" in capsys.readouterr().err
        assert call(server.url, *LOAD, "--slo", "tpot=0.001ms") == ExitCode.GATE
        assert "no load meets --slo tpot=0.001ms" in capsys.readouterr().err


def test_a_limit_is_met_by_the_p95_and_missed_after_any_failure() -> None:
    row = {"failed": 0, "ttft_p95_seconds": 0.5, "tpot_p95_seconds": None}
    assert meets_slo(row, {"ttft_p95_seconds": 0.5, "tpot_p95_seconds": 0.1})
    assert not meets_slo(row, {"ttft_p95_seconds": 0.49})
    assert not meets_slo(row | {"failed": 1}, {"ttft_p95_seconds": 0.5})


def test_a_server_that_refuses_everything_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with scripted(status=429) as server:
        assert call(server.url, *LOAD) == ExitCode.MODEL
    assert "429: too long" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("pico", "--plot", "x.png"), "plots are written as .svg only"),
        (("pico", "--slo", "ttft=1"), "not a limit"),
        (("pico", "--clients", "0"), "1 to 1024"),
        (("pico", "--rate", "nan"), "requests per second"),
        (("pico", "-p", "0"), "-p must be larger than --shared"),
        (("pico", "-p", "16", "--shared", "16"), "-p must be larger than --shared"),
    ],
    ids=lambda value: "" if isinstance(value, str) else " ".join(value[1:]) or "nobody",
)
def test_refusals(arguments: tuple[str, ...], problem: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(*arguments) in (ExitCode.USAGE, ExitCode.MODEL)
    assert problem in capsys.readouterr().err


def test_a_server_that_is_not_there_is_not_found(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("http://127.0.0.1:1") == ExitCode.NOT_FOUND
    assert capsys.readouterr().err.splitlines() == [
        "error: http://127.0.0.1:1: Connection refused",
        "hint: check that a server is running there",
    ]


def test_loads_are_every_combination_and_four_requests_a_client() -> None:
    assert [load.name for load in _loads([9, 5], [3], "2,1", None, None, 4)] == [
        "c1 p9/4 n3",
        "c2 p9/4 n3",
        "c1 p5/4 n3",
        "c2 p5/4 n3",
    ]
    assert [load.requests for load in _loads([9], [3], "2,1", None, None, 0)] == [4, 8]
    assert [load.requests for load in _loads([9], [3], "2,1024", None, 7, 0)] == [7, 7]
    assert _loads([9], [3], "1", "2.5,0.5", None, 0) == [Load(9, 3, 32, rate=0.5), Load(9, 3, 32, rate=2.5)]
    for clients in ("0,1", "1025"):
        with pytest.raises(UsageError, match="must be 1 to 1024"):
            _loads([9], [3], clients, None, None, 0)
    for prompts, replies, shared in (([9, 4], [3], 4), ([9], [3, 0], 0), ([0, 9], [3], 0)):
        with pytest.raises(UsageError, match="nothing to send or to reply"):
            _loads(prompts, replies, "1", None, None, shared)


@pytest.mark.parametrize(("text", "rate"), [("0.001", 0.001), ("10000", 10_000), ("0.00099", None), ("10001", None)])
def test_a_rate_has_limits(text: str, rate: float | None) -> None:
    if rate is not None:
        assert _rate(text) == rate
        return
    with pytest.raises(UsageError, match=r"use 0\.001 to 10000|not a number of requests per second"):
        _rate(text)


def test_limits_are_in_seconds() -> None:
    assert _parse_slo("ttft=500ms, tpot=0.05s") == {"ttft_p95_seconds": 0.5, "tpot_p95_seconds": 0.05}
    assert _parse_slo(None) == {}


def test_a_row_sums_its_runs() -> None:
    load = Load(8, 3, 2, clients=1)
    runs = [
        LoadResult(load, (Reply(0.0, 1.0, 3.0, 8, 4, 3), Reply(0.0, 3.0, 3.0, 8, 0, 1)), 2.0, {"num_preemptions": 1.0}),
        LoadResult(load, (Reply(0.0, 2.0, 6.0, 8, 8, 3), Reply(0.0, problem="late")), 1.0, {"num_preemptions": 2.0}),
    ]
    server: Any = SimpleNamespace(model="m")
    row = _row(server, "m at url", "http", runs)
    assert (row["samples"], row["tokens_per_second"], row["sigma"]) == ([2.0, 3.0], 2.5, pytest.approx(0.5**0.5))
    assert (row["requests"], row["failed"], row["first_problem"]) == (4, 1, "late")
    assert (row["prompt_tokens"], row["cached_tokens"], row["reply_tokens"], row["preemptions"]) == (24, 12, 7, 3)
    assert [row[f"ttft_p{share}_seconds"] for share in (50, 95, 99)] == [2.0, 3.0, 3.0]
    assert [row[f"tpot_p{share}_seconds"] for share in (50, 95, 99)] == [1.0, 2.0, 2.0]
    assert _row(server, "m", "http", runs[:1])["sigma"] == 0.0
    with pytest.raises(ModelError, match="no request was answered: busy"):
        _row(server, "m", "http", [LoadResult(load, (Reply(0.0, problem="busy"),), 1.0)])


@pytest.mark.parametrize(("tokens", "each"), [(3, "1000/1000/1000 ms"), (1, "")], ids=["three", "one"])
def test_times_are_percentiles_in_milliseconds(tokens: int, each: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reply of one token has no time between tokens."""
    monkeypatch.setenv("COLUMNS", "300")
    server: Any = SimpleNamespace(model="m")
    replies = tuple(Reply(0.0, seconds, seconds + 2, 8, 0, tokens) for seconds in (1.0, 2.0, 3.0))
    row = _row(server, "m", "http", [LoadResult(Load(8, tokens, 3, clients=1), replies, 1.0)])
    terminal = Terminal()
    Output(stdout=terminal, stderr=terminal).table([row], _COLUMNS)
    headings, _, cells = ([cell.strip() for cell in line.split("|")] for line in terminal.getvalue().splitlines())
    shown = dict(zip(headings, cells, strict=True))
    assert (shown["TTFT p50/p95/p99"], shown.get("TPOT p50/p95/p99", "")) == ("2000/3000/3000 ms", each)


def test_its_server_records_no_replies(environment: dict[str, str], tmp_path: Path) -> None:
    words = ["bench", "serve", "pico", "--clients", "1", "--requests", "1", "-p", "8", "-n", "2", "-r", "1"]
    state = {"XDG_STATE_HOME": str(tmp_path / "state")}
    line = [*COMMAND, *words, "--device", "cpu"]
    with ForkedProcess(line, env=environment | state, stdout=subprocess.DEVNULL, cwd="/") as process:
        assert process.wait(SECONDS) == 0
    assert not list((tmp_path / "state").rglob("replies/*"))


def _children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"  # a zombie has ended
    except FileNotFoundError:
        return False


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="reads processes from /proc")
def test_a_killed_measurement_leaves_no_server(environment: dict[str, str]) -> None:
    words = ["bench", "serve", "pico", "--clients", "1", "-p", "16", "-n", "4", "--device", "cpu"]
    silent = subprocess.DEVNULL
    with subprocess.Popen([*COMMAND, *words], env=environment, stdout=silent, stderr=silent, cwd="/") as bench:
        end = time.monotonic() + SECONDS / 4
        while not (servers := _children(bench.pid)) and time.monotonic() < end:
            time.sleep(0.02)
        bench.kill()
    assert servers
    while _runs(servers[0]) and time.monotonic() < end:
        time.sleep(0.05)
    assert not _runs(servers[0])
