"""Test at which memory and at which loss `mycli choose` decides for a smaller copy."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest

from mycli.cli.commands.choose import STATED_KL, _source
from mycli.runtime.hub.store import RECORD
from mycli.runtime.utils.units import human_bytes
from tests.support.command_line import Mycli
from tests.support.paths import PICO


@pytest.fixture
def answer(mycli: Mycli, tmp_path: Path) -> Any:
    def ask(memory: str, *options: str) -> dict[str, Any]:
        env = {"MYCLI_HOME": str(tmp_path / "home")}
        return dict(json.loads(mycli("choose", "pico", "--gpu", memory, *options, "--json", env=env).stdout))

    return ask


def test_a_model_that_fits_to_the_byte_is_chosen(answer: Any) -> None:
    found = answer("24GiB")
    total = found["candidates"][0]["memory_bytes"]
    assert found["best"] == "pico" and found["commands"] == ["mycli chat pico --ctx 2048"], "its whole context"
    exact = math.ceil(total * 1.03)  # as much to spare as an estimate may be too low
    for memory, best in ((exact, "pico"), (exact - 1, "pico-gptq-int8-g128")):
        found = answer(f"{memory}B")
        assert found["best"] == best
        fits = [row["fits"] for row in found["candidates"]]
        assert fits == [best == "pico", *[True] * (len(fits) - 1)]


def test_the_memory_of_a_gpu_is_that_of_estimate(answer: Any, mycli: Mycli) -> None:
    """Passes over prompts are longer on a GPU."""
    estimated = json.loads(mycli("estimate", "pico", "--gpu", "24GiB", "--json").stdout)["bytes"]["total"]
    assert answer("24GiB")["candidates"][0]["memory_bytes"] == estimated


def test_a_loss_at_the_limit_is_accepted(answer: Any) -> None:
    memory = f"{math.ceil(answer('24GiB')['candidates'][0]['memory_bytes'] * 1.03) - 1}B"  # too little for pico
    assert answer(memory, "--max-kl", str(STATED_KL[8]))["best"] == "pico-gptq-int8-g128"
    refused = answer(memory, "--max-kl", str(STATED_KL[8] * 0.99))
    assert refused["error"]["exit_code"] == 2 and "--max-kl" in refused["error"]["message"]
    nothing = answer("1MiB", "--max-kl", "1")
    assert nothing["error"]["exit_code"] == 5, "nothing fits: the limit is not the cause"


def test_of_equal_copies_the_first_is_chosen(answer: Any, tmp_path: Path) -> None:
    """A copy that loses nothing and is as large as the model."""
    copy = tmp_path / "home" / "models" / "pico-copy"
    shutil.copytree(PICO, copy)
    record = {"source": {"name": "pico"}, "card": {"divergence": {"kl": {"value": 0.0}}}}
    (copy / RECORD).write_text(json.dumps(record))
    found = answer("24GiB")
    first, second = found["candidates"][:2]
    assert second["name"] == "pico-copy" and second["memory_bytes"] == first["memory_bytes"]
    assert second["kl"] == first["kl"] == 0 and found["best"] == "pico"
    proposed = {row["name"]: row for row in found["candidates"][2:]}
    assert first["measured"] and second["measured"] and not any(row["measured"] for row in proposed.values())
    assert first["command"] is None
    assert proposed["pico-gptq-int4-g128"]["command"].startswith("mycli quantize pico --bits 4 --group 128")


def test_a_copy_with_an_adapter_is_of_another_model(answer: Any, tmp_path: Path) -> None:
    copy = tmp_path / "home" / "models" / "pico-poems-copy"
    shutil.copytree(PICO, copy)
    record = {"source": {"name": "pico", "adapter": "poems"}, "card": {"divergence": {"kl": {"value": 0.0}}}}
    (copy / RECORD).write_text(json.dumps(record))
    assert copy.name not in {row["name"] for row in answer("24GiB")["candidates"]}


def test_what_fits_nowhere_is_explained_by_the_smallest_copy(answer: Any, mycli: Mycli, tmp_path: Path) -> None:
    rows = answer("24GiB")["candidates"]
    least = min(rows, key=lambda row: row["memory_bytes"])
    assert human_bytes(least["memory_bytes"]) in answer("1MiB")["error"]["message"]
    done = mycli("choose", "pico", "--gpu", "24GiB", env={"MYCLI_HOME": str(tmp_path / "home")})
    assert all(row["name"] in done.stdout for row in rows) and "mycli chat pico --ctx 2048" in done.stdout


@pytest.mark.parametrize(
    ("kl", "measured", "words"),
    [(None, False, "not measured"), (0.01, True, "measured"), (0.01, False, "as for pico")],
)
def test_the_source_of_a_loss(kl: float | None, measured: bool, words: str) -> None:
    assert _source({"kl": kl, "measured": measured}) == words
