"""The command for all Tritons and capabilities: what it runs, and that only what has passed is not run again."""

from pathlib import Path

import pytest

from tests.ptx import matrix


def test_runs_every_part_with_every_triton_for_every_capability(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrix, "version", lambda path: "3.6.0" if path.startswith("old:") else "3.7.1")
    found = list(matrix.pieces(["old"], matrix.PARTS, matrix.CAPABILITIES))
    expected = {
        f"{one}-sm{chip}-{part}" for one in ("3.6.0", "3.7.1") for chip in (80, 90, 120) for part in matrix.PARTS
    }
    assert len(found) == len(expected) and {str(piece) for piece in found} == expected
    assert all((piece.path == "old:.links") == (piece.version == "3.6.0") for piece in found)
    command = next(piece for piece in found if str(piece) == "3.6.0-sm120-races").command(Path("here"))
    assert command[1:] == ["-m", "tests.ptx.race_runs", "here/compiled", "120"]


def test_capabilities_may_follow_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So `make` puts them: MATRIX="--part races 90"."""
    ran: list[str] = []
    monkeypatch.setattr(matrix, "version", lambda path: "3.6.0" if path.startswith("old:") else "3.7.1")
    monkeypatch.setattr(matrix, "run", lambda piece, folder: not ran.append(str(piece)))
    assert matrix._main([str(tmp_path), "--triton", "old", "--part", "races", "90"]) == 0
    assert ran == ["3.7.1-sm90-races", "3.6.0-sm90-races"]


def test_the_suite_has_no_test_outside_of_the_parts() -> None:
    """`kernels` are all tests without a whole pass; the words of the other parts select all with one."""
    source = Path(matrix.__file__).with_name("test_emulated.py").read_text("utf-8")
    whole = [line for line in source.splitlines() if line.startswith("def test_") and "fused" in line]
    words = [arguments[-1] for arguments in matrix.PARTS.values() if "-k" in arguments and "not" not in arguments[-1]]
    assert whole and all(sum(word in line for word in words) == 1 for line in whole)


def test_what_has_failed_is_run_again_and_what_has_passed_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = tmp_path / "runs"
    code = f"import sys; open({str(counted)!r}, 'a').write('x'); print('said'); sys.exit(len(sys.argv))"
    piece = matrix.Piece("races", "3.7.1", ".links", 90)
    command = [matrix.sys.executable, "-c", code.replace("len(sys.argv)", "EXIT")]
    for code_given, passes, runs in (("3", False, 1), ("0", True, 2), ("3", True, 2)):
        given = [*command[:2], command[2].replace("EXIT", code_given)]
        monkeypatch.setattr(matrix.Piece, "command", lambda self, folder, given=given: given)
        assert matrix.run(piece, tmp_path / "out") is passes
        assert len(counted.read_text("utf-8")) == runs
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["3.7.1-sm90-races.txt"]
    assert (tmp_path / "out" / "3.7.1-sm90-races.txt").read_text("utf-8") == "said\n"
