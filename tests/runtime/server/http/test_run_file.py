"""Test the files in which running servers register, and that those of killed servers are recognized."""

import json
import os
from dataclasses import replace
from pathlib import Path

from mycli.runtime.server.http.run_file import RunningServer, announced, is_running, running_servers

SERVER = RunningServer(1, "http://127.0.0.1:9", "m", ("m",), 512, 1, "0")


def test_a_file_is_there_while_the_server_runs(tmp_path: Path) -> None:
    folder = tmp_path / "state" / "servers"
    server = replace(SERVER, names=("m", "alias"), several=True)
    with announced(folder, server) as problem:
        assert problem == "" and running_servers(folder) == [server]
        assert is_running(folder, server) and not is_running(folder, replace(server, started=2))
        assert (folder / "1.json").stat().st_mode & 0o777 == 0o600 and folder.stat().st_mode & 0o777 == 0o700
    assert not is_running(folder, server) and not list(folder.iterdir())


def test_the_oldest_server_is_first_whatever_its_process_number(tmp_path: Path) -> None:
    servers = [replace(SERVER, pid=pid, started=started) for pid, started in ((7, 3), (991, 4), (1005, 4))]
    with announced(tmp_path, servers[0]), announced(tmp_path, servers[1]), announced(tmp_path, servers[2]):
        for order in ([7, 991, 1005], [7, 1005, 991]):
            for moment, pid in enumerate(order):
                os.utime(tmp_path / f"{pid}.json", (moment, moment))
            os.utime(tmp_path / "7.json", (9, 9))  # counts only among those that started in the same second
            assert [server.pid for server in running_servers(tmp_path)] == order


def test_the_file_of_a_server_without_standard_input_is_removed(tmp_path: Path) -> None:
    """Descriptor 0 is free if a program starts it with a closed standard input."""
    stdin = os.dup(0)
    os.close(0)
    try:
        with announced(tmp_path, SERVER):
            assert os.path.samestat(os.fstat(0), (tmp_path / "1.json").stat())
        assert not list(tmp_path.iterdir())
    finally:
        os.dup2(stdin, 0)
        os.close(stdin)


def test_a_file_that_was_left_behind_is_removed(tmp_path: Path) -> None:
    """The file of a killed server is removed: its process id may belong to another process."""
    (tmp_path / f"{os.getpid()}.json").write_text(json.dumps({"pid": os.getpid(), "url": "http://127.0.0.1:1"}))
    (tmp_path / "7.json").write_text("{")
    with announced(tmp_path, SERVER):
        assert running_servers(tmp_path) == [SERVER]
        assert [path.name for path in tmp_path.iterdir()] == ["1.json"]


def test_a_folder_that_cannot_be_written_is_no_reason_not_to_serve(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with announced(tmp_path / "file", SERVER) as problem:
        assert running_servers(tmp_path / "file") == [] and problem == "File exists"


def test_a_server_takes_the_place_of_a_killed_one_with_its_process_number(tmp_path: Path) -> None:
    for name in (".1.tmp", "1.json"):
        (tmp_path / name).write_text("{")
    with announced(tmp_path, SERVER) as problem:
        assert problem == "" and running_servers(tmp_path) == [SERVER]


def test_a_link_to_the_file_of_a_server_is_no_other_server(tmp_path: Path) -> None:
    (tmp_path / "2.json").symlink_to("1.json")
    with announced(tmp_path, SERVER):
        assert running_servers(tmp_path) == [SERVER]
