"""Test model names: addresses, names of other programs, presets, and supported models of the Hub."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from mycli.cli.flags.config_file import apply_preset
from mycli.runtime.hub.names import normalize_model_name
from tests.support.command_line import Mycli
from tests.support.hub_server import HubServer, hub_server
from tests.support.paths import PICO


@pytest.mark.parametrize(
    ("typed", "plain"),
    [
        ("https://huggingface.co/Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B"),
        ("https://huggingface.co/Qwen/Qwen3-0.6B/tree/main", "Qwen/Qwen3-0.6B@main"),
        ("huggingface.co/org/name/blob/v2/config.json?x=1", "org/name@v2"),
        ("hf.co/org/name", "org/name"),
        ("hf://org/name", "org/name"),
        ("https://huggingface.co/datasets/org/name", "https://huggingface.co/datasets/org/name"),
        ("https://example.org/org/name", "https://example.org/org/name"),
        ("org/name@main", "org/name@main"),
        ("./folder", "./folder"),
    ],
)
def test_an_address_of_the_hub_is_a_name(typed: str, plain: str) -> None:
    assert normalize_model_name(typed) == plain


def test_a_preset_is_a_model_with_settings(mycli: Mycli, environment: dict[str, str]) -> None:
    path = Path(environment["XDG_CONFIG_HOME"]) / "mycli" / "config.toml"
    path.parent.mkdir(parents=True)
    path.write_text('[preset.leo]\nmodel = "pico"\nmax_tokens = 3\ntemperature = 0\nsystem = "x"\n')
    preset = json.loads(mycli("run", "leo", "leo", "--json", "--device", "cpu").stdout)
    typed = json.loads(mycli("run", "pico", "leo", "-n", "3", "-t", "0", "--system", "x", "--json").stdout)
    assert preset["text"] == typed["text"] and preset["completion_tokens"] == 3
    assert (
        json.loads(mycli("run", "leo", "hi", "-n", "2", "--json", "--device", "cpu").stdout)["completion_tokens"] == 2
    )
    assert json.loads(mycli("show", "leo", "--json").stdout)["model"] == "pico"
    path.write_text('[preset.leo]\nmodel = "pico"\ncolour = 1\n')
    refused = mycli("run", "leo", "hi")
    assert refused.returncode == 2 and "colour is not an option" in refused.stderr


def test_a_prompt_spelled_like_a_preset_is_a_prompt() -> None:
    def model_of(line: list[str]) -> str | None:
        return line[1] if len(line) > 1 else None

    presets = {"leo": {"model": "pico", "ctx": "1k"}}
    assert apply_preset(["run", "pico", "leo"], presets, model_of) == (["run", "pico", "leo"], {})
    assert apply_preset(["run", "leo", "leo"], presets, model_of) == (["run", "pico", "leo"], {"ctx": "1k"})
    line = ["run", "--system", "leo", "leo"]
    assert apply_preset(line, presets, lambda words: words[-1]) == ([*line[:3], "pico"], {"ctx": "1k"})


@pytest.fixture
def server(environment: dict[str, str]) -> Iterator[HubServer]:
    for name in [name for name in environment if name.lower().endswith("_proxy")]:
        del environment[name]
    with hub_server() as running:
        files = {path.name: path.read_bytes() for path in PICO.iterdir()}
        running.add("org/odd", {**files, "config.json": b'{"model_type": "gptj"}'})
        running.add("org/pico", files)
        environment |= {"HF_ENDPOINT": running.address(), "HF_HUB_OFFLINE": "0"}
        yield running


def test_what_cannot_run_is_not_fetched(server: HubServer, mycli: Mycli) -> None:
    refused = mycli("pull", "org/odd")
    assert refused.returncode == 3 and "'gptj' is not supported" in refused.stderr and "--force" in refused.stderr
    assert not server.requests("storage:"), "no weights were asked for"
    assert mycli("pull", "org/odd", "--dry-run").returncode == 3, "as the real run would"
    assert mycli("pull", "org/odd", "--force").returncode == 0
    models = json.loads(mycli("list", "--json").stdout)["models"]
    (odd,) = [one for one in models if one["name"] == "org/odd"]
    assert not odd["usable"] and odd["problem"].startswith("unsupported: ")


def test_search_says_what_runs_here(server: HubServer, mycli: Mycli) -> None:
    done = mycli("search", "pico", "--json")
    assert done.returncode == 0
    assert json.loads(done.stdout)["models"] == [
        {
            "name": "org/pico",
            "downloads": 7,
            "parameters": 5_770_496,
            "model_type": "llama",
            "gated": False,
            "supported": True,
        }
    ]
    server.add("org/gated", {"config.json": b'{"model_type": "qwen3"}'})
    server.add("org/bare", {})
    rows = [line.split("|")[1:-1] for line in mycli("search", "org").stdout.splitlines()[2:]]
    assert [[cell.strip() for cell in row] for row in rows] == [
        ["org/odd", "5.8M", "7", "gptj: not supported"],
        ["org/pico", "5.8M", "7", "llama"],
        ["org/gated", "", "7", "qwen3, requires an account"],
        ["org/bare", "", "7", "family unknown"],
    ]
