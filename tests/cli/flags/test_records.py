"""Test records of options: the engine, the prefix cache, the chat template and sampling, as typed."""

from pathlib import Path

import pytest

from mycli.cli.flags.records import LoadFlags, PrefixCacheFlags, SamplingFlags, TemplateFlags
from mycli.runtime.engine.config import EngineConfig
from mycli.runtime.errors import NotFoundError, UsageError
from mycli.runtime.models.generation_config import GenerationDefaults


def test_only_a_draft_that_was_given_is_one() -> None:
    assert LoadFlags().resolve().draft is None
    config = LoadFlags(draft="ngram", context=64, dtype="bf16").resolve(2, running=3)
    assert (config.draft, config.context, config.dtype) == ("ngram", 64, "bfloat16")
    assert (config.sequences, config.running) == (2, 3)
    with pytest.raises(UsageError, match="--dtype int8 is not supported"):
        LoadFlags(dtype="int8").resolve()


def test_a_prefix_cache_on_disk_has_a_folder_and_a_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = EngineConfig()
    assert PrefixCacheFlags().resolve(engine) == engine
    with pytest.raises(UsageError, match="--prefix-cache-size needs --prefix-cache-dir"):
        PrefixCacheFlags(size=1 << 20).resolve(engine)
    monkeypatch.chdir(tmp_path)
    usual, smaller = (PrefixCacheFlags(Path("cache"), size).resolve(engine) for size in (None, 1 << 20))
    assert usual.prefix_folder == smaller.prefix_folder == tmp_path / "cache"
    assert (usual.prefix_bytes, smaller.prefix_bytes) == (engine.prefix_bytes, 1 << 20)


@pytest.mark.parametrize("name", ["mine", "mine.jinja", "./mine", "folder/mine"])
def test_a_chat_template_is_a_file_or_a_name(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    named = TemplateFlags(chat_template="mine").resolve()
    assert (named.source, named.name) == (None, "mine")
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    if name != "mine":
        with pytest.raises(NotFoundError, match="no such file"):
            TemplateFlags(chat_template=name).resolve()
    path.write_text("{{ messages }}")
    read = TemplateFlags(chat_template=name).resolve()
    assert (read.source, read.name) == ("{{ messages }}", None)
    path.write_bytes(b"\xff")
    with pytest.raises(UsageError, match=f"--chat-template {name}: not UTF-8 text"):
        TemplateFlags(chat_template=name).resolve()


def test_arguments_of_a_chat_template_are_json_or_text() -> None:
    flags = TemplateFlags(template_arg=["enable_thinking=false", "name=Ann=e", "empty="])
    assert flags.used and not TemplateFlags().used
    assert flags.resolve().arguments == {"enable_thinking": False, "name": "Ann=e", "empty": ""}
    with pytest.raises(UsageError, match="--template-arg x: not NAME=VALUE"):
        TemplateFlags(template_arg=["x"]).resolve()
    with pytest.raises(UsageError, match="--reasoning-effort much is not supported"):
        TemplateFlags(reasoning_effort="much").resolve()


@pytest.mark.parametrize(("temperature", "warned"), [(None, False), (0.0, False), (2.0, False), (2.1, True)])
def test_a_temperature_that_may_mean_threads_is_warned_about(temperature: float | None, warned: bool) -> None:
    notes: list[str] = []
    SamplingFlags(temperature=temperature).check(notes.append)
    assert [note.startswith("temperature 2.1 makes replies random") for note in notes] == [True] * warned


def test_a_setting_out_of_range_is_named_by_its_option() -> None:
    for flags, problem in (
        (SamplingFlags(top_p=2.0), r"^--top-p 2\.0 is out of range"),
        (SamplingFlags(logit_bias=["5=inf"]), r"^--logit-bias 5=inf is out of range"),
    ):
        with pytest.raises(UsageError, match=problem):
            flags.check(print)


def test_settings_come_from_the_options_then_from_the_model() -> None:
    defaults = GenerationDefaults(temperature=0.5)
    assert SamplingFlags().resolve(defaults).temperature == 0.5
    chosen = SamplingFlags(temperature=0.0, seed=3, logit_bias=["17=-100"]).resolve(defaults)
    assert (chosen.temperature, chosen.seed, chosen.logit_bias) == (0.0, 3, ((17, -100.0),))
