"""Test `--prefix-cache-dir` on the command line: what is stored, warnings and refusals."""

from pathlib import Path

from mycli.runtime.errors import ExitCode
from tests.support.command_line import Mycli

ASK = ("run", "pico", "--raw", " ".join(f"number {index}" for index in range(60)), "-n", "4", "-t", "0")


def test_a_second_run_goes_on_from_what_the_first_kept(mycli: Mycli, tmp_path: Path) -> None:
    folder = tmp_path / "kept"
    first, second = (mycli(*ASK, "--prefix-cache-dir", str(folder), "--json") for _ in range(2))
    files = list(folder.iterdir())
    assert first.returncode == second.returncode == 0 and len(files) >= 2, second.stderr
    for path in files:
        path.write_bytes(b"x" * path.stat().st_size)
    third = mycli(*ASK, "--prefix-cache-dir", str(folder))
    assert third.returncode == 0 and "damaged; the file is removed" in third.stderr, third.stderr


def test_a_folder_of_everybody_is_not_used_and_the_reply_comes_nevertheless(mycli: Mycli, tmp_path: Path) -> None:
    """G41: a world-writable folder is not used, and the reply is still produced."""
    folder = tmp_path / "kept"
    folder.mkdir()
    folder.chmod(0o777)
    result = mycli(*ASK, "--prefix-cache-dir", str(folder))
    assert result.returncode == 0 and result.stdout.strip()
    assert "the prefix cache is not kept on disk" in result.stderr and "chmod go-w" in result.stderr
    assert not list(folder.iterdir())


def test_a_size_without_a_folder_and_a_folder_that_is_a_file_are_refused(mycli: Mycli, tmp_path: Path) -> None:
    alone = mycli(*ASK, "--prefix-cache-size", "1GiB")
    assert alone.returncode == ExitCode.USAGE and "add --prefix-cache-dir DIR" in alone.stderr
    (tmp_path / "file").write_bytes(b"")
    wrong = mycli(*ASK, "--prefix-cache-dir", str(tmp_path / "file"))
    assert wrong.returncode == ExitCode.USAGE and "cannot write" in wrong.stderr
