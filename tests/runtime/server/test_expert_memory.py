"""Test a server of a MoE model with few resident experts, whose weights become unreadable during a reply."""

import errno
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from mycli.runtime.checkpoint.open_folder import open_model_folder
from mycli.runtime.engine.config import EngineConfig
from mycli.runtime.engine.engine import Engine
from mycli.runtime.engine.loading.loader import LoadedModel
from mycli.runtime.engine.sequence import SequenceOutput
from mycli.runtime.memory.cache_shape import CacheShape
from mycli.runtime.server.http.settings import ServerSettings
from mycli.runtime.utils.dtypes import FLOATS
from tests.support.packed_mixture import write_mixture
from tests.support.served import Answer, Served, serving

GOOD_STEPS = 5  # in a reply, after which reads fail
TOKENS = 24


class BreakingEngine(Engine):
    breaks = False
    steps = 0

    def step(self) -> Sequence[SequenceOutput]:
        self.steps += 1
        return super().step()

    @property
    def broken(self) -> bool:
        return self.breaks and self.steps > GOOD_STEPS


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[tuple[BreakingEngine, LoadedModel, Path]]:
    folder = open_model_folder(write_mixture(tmp_path / "mixture"))
    placement = EngineConfig(device="cpu", dtype=FLOATS["bf16"]).place(folder.config)
    loaded = LoadedModel.load(folder, placement, expert_slots=1)
    yield (
        BreakingEngine(loaded.runner, CacheShape.paged(64, 256, 16), loaded.vocabulary_size, running=4),
        loaded,
        tmp_path,
    )


def ask(served: Served, stream: bool = True) -> Answer:
    body = {"prompt": "Once upon a time", "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, "stream": stream}
    return served.ask("POST", "/v1/completions", body)


def told(answer: Answer) -> str:
    return "".join(event["choices"][0]["text"] for event in answer.events if "choices" in event)


def failures(served: Served) -> list[str]:
    return [line for line in served.log if line.startswith("engine step failed")]


def test_a_disk_that_fails_ends_the_reply_and_not_the_server(
    engine: tuple[BreakingEngine, LoadedModel, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, loaded, folder = engine
    plain = os.preadv

    def failing(descriptor: int, *arguments: Any) -> int:
        if made.broken and os.readlink(f"/proc/self/fd/{descriptor}").endswith(".safetensors"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return plain(descriptor, *arguments)

    monkeypatch.setattr(os, "preadv", failing)
    with serving(loaded, made, ServerSettings(("mixture",))) as served:
        whole = ask(served)
        assert whole.status == 200 and len(told(whole)) > 0 and "error" not in whole.events[-1]
        for _ in range(2):
            made.steps, made.breaks = 0, True
            cut = ask(served)
            assert cut.status == 200  # the reply had started
            assert 0 < len(told(cut)) < len(told(whole)) and told(whole).startswith(told(cut))
            assert cut.events[-1]["error"]["code"] == "internal_error" and str(folder) not in cut.body.decode()
        assert ask(served, stream=False).status == 500
        assert len(failures(served)) == 3 and "model.safetensors: Input/output error" in failures(served)[-1]
        assert served.ask("GET", "/health").status == 200
        made.breaks = False
        served.idle()
        assert told(ask(served)) == told(whole)


def test_a_file_that_is_cut_fails_every_reply_and_not_the_server(
    engine: tuple[BreakingEngine, LoadedModel, Path],
) -> None:
    made, loaded, folder = engine
    with serving(loaded, made, ServerSettings(("mixture",))) as served:
        assert ask(served, stream=False).status == 200
        (weights,) = (folder / "mixture").glob("*.safetensors")
        os.truncate(weights, weights.stat().st_size // 2)
        for _ in range(3):
            answer = ask(served, stream=False)
            assert answer.status == 500 and answer.error["code"] == "internal_error"
        assert len(failures(served)) == 3 and "the file was changed" in failures(served)[-1]
        assert served.ask("GET", "/health").status == 200 and served.ask("GET", "/metrics").status == 200
        served.idle()
