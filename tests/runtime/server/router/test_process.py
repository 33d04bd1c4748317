"""Test how the process of a model starts and ends, and what it is given and says."""

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from mycli.runtime.server.router.model import RoutedModel
from mycli.runtime.server.router.process import LoadError, ModelProcess, child_environment

# The line of a server that has loaded its model, which then waits for the end of its standard input.
SERVES = """echo '{"url": "http://localhost"}'"""
WAITS = "read _"


async def start(script: str, log: Callable[[str], None] = print) -> ModelProcess:
    model = RoutedModel(("pico",), ("/bin/sh", "-c", script), Path("/nowhere"))
    return await ModelProcess.start(model, os.environ, log)


def test_an_environment_has_all_variables_but_those_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MYCLI_API_KEY", "secret")
    expected = {name: value for name, value in os.environ.items() if name != "MYCLI_API_KEY"}
    assert child_environment(("MYCLI_API_KEY", "ABSENT")) == expected and "PATH" in expected


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("""echo '{"error": {"message": "no memory"}}'; exit 3""", "no memory"),
        ("""echo '{"error": {}}'; exit 3""", "its process ended with exit code 3"),
        ("""echo '{"error": "no memory"}'; exit 3""", "its process ended with exit code 3"),
        ("echo '[]'; exit 3", "its process ended with exit code 3"),
        ("echo Hello; exit 3", "its process ended with exit code 3"),
        ("exit 0", "its process ended with exit code 0"),
        ("kill -KILL $$", "its process was ended by SIGKILL"),
    ],
)
def test_a_process_that_does_not_serve_has_a_reason(script: str, reason: str) -> None:
    with pytest.raises(LoadError) as error:
        asyncio.run(start(script))
    assert str(error.value) == reason


def test_a_command_that_does_not_exist_is_the_reason(tmp_path: Path) -> None:
    model = RoutedModel(("pico",), (str(tmp_path / "absent"),), tmp_path / "socket")
    with pytest.raises(LoadError, match="^its process cannot be started: No such file or directory$"):
        asyncio.run(ModelProcess.start(model, {}, print))


def test_a_process_serves_in_a_session_without_the_terminal_until_it_is_stopped() -> None:
    """The terminal sends Ctrl-C to the session of mycli only, which ends the processes after their replies."""

    async def test() -> None:
        process = await start(f"{SERVES}; {WAITS}")
        assert os.getsid(process.pid) == process.pid
        assert process.exit_reason == "its process does not answer"
        await process.stop()
        assert await process.ended() == process.exit_reason == "its process was ended by SIGTERM"

    asyncio.run(test())


def test_lines_of_a_process_are_logged_but_not_endless_ones() -> None:
    endless = "head -c 3000000 /dev/zero | tr '\\0' x; echo"
    lines: list[str] = []

    async def test() -> None:
        seen = asyncio.Event()

        def log(line: str) -> None:
            lines.append(line)
            if line == "last":
                seen.set()

        process = await start(f"{SERVES}; echo first; {endless}; echo last; {WAITS}", log)
        await asyncio.wait_for(seen.wait(), 60)
        await process.stop()

    asyncio.run(test())
    assert lines[0] == "first" and lines[-1] == "last" and max(map(len, lines)) < 3_000_000


def test_no_process_outlives_a_load_that_is_cancelled() -> None:
    async def test() -> None:
        pid: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        loading = asyncio.create_task(start(f"echo $$ >&2; {WAITS}", lambda line: pid.set_result(int(line))))
        await asyncio.wait_for(asyncio.shield(pid), 60)
        loading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await loading
        with pytest.raises(ProcessLookupError):
            os.kill(await pid, 0)

    asyncio.run(test())
