"""Provide a server of pico shared by the tests of this folder, and one with scripted replies."""

import dataclasses
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from mycli.runtime.checkpoint.open_folder import open_model_folder
from mycli.runtime.engine.config import EngineConfig
from mycli.runtime.engine.engine import Engine
from mycli.runtime.engine.loading.loader import LoadedModel
from mycli.runtime.memory.cache_shape import CacheShape
from mycli.runtime.server.http.settings import ServerSettings
from mycli.runtime.server.ollama.card import model_card
from mycli.runtime.tokenizer.tokenizer import Tokenizer
from mycli.runtime.utils.dtypes import FLOATS
from tests.support.paths import PICO
from tests.support.served import ScriptedEngine, Served, serving

TEMPLATE = (
    "{% if tools %}<|im_start|>system\n<tool_call> {{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>"
    "{{ c.function.name }}:{{ c.function.arguments | tojson }}</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if enable_thinking is defined and not enable_thinking %}"
    "<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
Scripted = Callable[..., AbstractContextManager[Served]]


@pytest.fixture(scope="session")
def loaded() -> LoadedModel:
    folder = open_model_folder(PICO)
    return LoadedModel.load(folder, EngineConfig(device="cpu", dtype=FLOATS["fp32"]).place(folder.config))


@pytest.fixture(scope="session")
def served(loaded: LoadedModel) -> Iterator[Served]:
    """Serve pico as `mycli serve pico` does, also under a second name."""
    engine = Engine(loaded.runner, CacheShape.paged(512, 2048, 16), loaded.vocabulary_size, running=8)
    with serving(
        loaded, engine, ServerSettings(("pico", "alias/of-it"), card=model_card(open_model_folder(PICO)))
    ) as found:
        yield found


def with_template(loaded: LoadedModel, folder: Path, template: str) -> LoadedModel:
    """Return pico with another chat template; `folder` is for its tokenizer."""
    shutil.copy(PICO / "tokenizer.json", folder)
    settings = json.loads((PICO / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": template}))
    return dataclasses.replace(loaded, tokenizer=Tokenizer.load(folder, 4096))


@pytest.fixture(scope="session")
def reasoning(loaded: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    """Serve pico with a template that supports tools and reasoning."""
    return with_template(loaded, tmp_path_factory.mktemp("reasoning"), TEMPLATE)


@pytest.fixture
def scripted(loaded: LoadedModel) -> Scripted:
    """Return a server that answers with a given text: scripted(text, engine=..., settings=...)."""

    def start(
        text: str = "", *, model: LoadedModel | None = None, settings: ServerSettings | None = None, **engine: object
    ) -> AbstractContextManager[Served]:
        chosen = model or loaded
        ids = chosen.tokenizer.encode(text, add_special=False, allow_special=True)
        return serving(chosen, ScriptedEngine(lambda request: ids, **engine), settings)  # type: ignore[arg-type]  # passed on

    return start
