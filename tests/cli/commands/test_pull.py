"""Test `mycli pull`, `list`, `show`, `verify` and `rm` against a local server, in child processes where needed."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from mycli.runtime.utils.units import human_bytes
from tests.support.command_line import Mycli
from tests.support.hub_server import Fault, HubServer, hub_server
from tests.support.other_stores import lm_studio
from tests.support.paths import PICO
from tests.support.stored_models import quantized

FILES = {path.name: path.read_bytes() for path in PICO.iterdir()}
REPO = "org/pico-copy"


@pytest.fixture
def server(environment: dict[str, str]) -> Iterator[HubServer]:
    for name in [name for name in environment if name.lower().endswith("_proxy")]:
        del environment[name]
    with hub_server() as running:
        running.add(REPO, FILES)
        environment |= {"HF_ENDPOINT": running.address(), "HF_HUB_OFFLINE": "0"}
        yield running


def test_a_gguf_file_is_a_model_to_fetch(server: HubServer, mycli: Mycli, tmp_path: Path) -> None:
    """A GGUF file needs no config.json; its header decides whether the model is supported before the full download."""
    assert mycli("export", "pico", "--to", "gguf", "-o", str(tmp_path / "made.gguf")).returncode == 0
    whole = (tmp_path / "made.gguf").read_bytes()
    key = b"general.architecture"
    start = whole.index(key) + len(key)
    other = whole[:start] + whole[start:].replace(b"llama", b"lemma", 1)
    server.add("org/files", {"made.gguf": whole, "other.gguf": other, "README.md": b"#"})
    refused = mycli("pull", "org/files:other.gguf")
    assert refused.returncode == 3 and "'lemma'" in refused.stderr and "--force" in refused.stderr
    assert not (tmp_path / "hf").exists()
    pulled = mycli("pull", "org/files:made.gguf")
    assert pulled.returncode == 0 and pulled.stdout.endswith("made.gguf\n"), pulled.stderr
    asked = ("run", "org/files:made.gguf", "What is the capital of Japan?", "-t", "0", "--device", "cpu")
    assert "Tokyo" in mycli(*asked).stdout


def test_what_is_here_under_a_name_is_not_asked_of_the_hub(
    server: HubServer, mycli: Mycli, environment: dict[str, str], tmp_path: Path
) -> None:
    assert mycli("export", "pico", "--to", "gguf", "-o", str(tmp_path / "made.gguf")).returncode == 0
    stored = lm_studio(Path(environment["HOME"]), (tmp_path / "made.gguf").read_bytes(), "org/pico-copy/made.gguf")
    local = mycli("pull", "nothing-here")
    assert local.returncode == 4 and "nothing-here" in local.stderr
    found = mycli("pull", REPO)
    assert found.returncode == 0 and found.stdout == f"{stored}\n" and not server.log
    forced = mycli("pull", REPO, "--force")
    assert forced.returncode == 0 and server.log and "snapshots" in forced.stdout


@pytest.mark.parametrize("options", [("-o", "copy"), ("--overwrite",), ("--restart",)], ids=" ".join)
def test_options_of_a_quantized_download_need_a_recipe(
    server: HubServer, mycli: Mycli, tmp_path: Path, options: tuple[str, ...]
) -> None:
    refused = mycli("pull", REPO, *options)
    assert refused.returncode == 2 and "quantized while downloading" in refused.stderr
    assert not server.log and not (tmp_path / "hf").exists()


def test_a_life_of_a_model(server: HubServer, mycli: Mycli, tmp_path: Path) -> None:
    total = sum(map(len, FILES.values()))
    planned = json.loads(mycli("pull", REPO, "--dry-run", "--json").stdout)
    assert planned["new_bytes"] == planned["bytes"] == total and planned["folder"] is None
    assert mycli("pull", REPO, "--dry-run").stdout.endswith(f"new: {human_bytes(total)}, cached: 0 bytes\n")
    assert not (tmp_path / "hf").exists()
    remote = json.loads(mycli("show", REPO, "--json").stdout)
    assert remote["parameters"] == 5_770_496 and remote["folder"] is None and remote["repo"] == REPO

    pulled = mycli("pull", REPO)
    folder = Path(pulled.stdout.strip())
    assert pulled.returncode == 0 and folder.parent.name == "snapshots" and "downloaded and verified" in pulled.stderr
    again = mycli("pull", REPO, "--dry-run")
    assert "new: 0 bytes, cached: 1" in again.stdout and "| cached |" in again.stdout
    assert json.loads(mycli("pull", REPO, "--offline", "--json").stdout)["folder"] == str(folder)
    assert all(file["cached"] for file in json.loads(mycli("pull", REPO, "--json").stdout)["files"])

    (entry,) = [m for m in json.loads(mycli("list", "--json").stdout)["models"] if m["kind"] == "hub"]
    assert entry["name"] == REPO and entry["usable"] and entry["bytes"] == total and REPO in mycli("list").stdout
    assert json.loads(mycli("show", REPO, "--json").stdout)["folder"] == str(folder)
    assert mycli("run", REPO, "What is the capital of Japan?", "--temperature", "0", "--device", "cpu").returncode == 0

    assert mycli("verify", REPO).returncode == 0
    blob = (folder / "model.safetensors").resolve()
    blob.write_bytes(blob.read_bytes()[:-1] + b"\x55")
    broken = mycli("verify", REPO)
    assert broken.returncode == 6 and "model.safetensors" in broken.stderr and "--drop" in broken.stderr
    answer = mycli("verify", REPO, "--drop", "--json")
    told = json.loads(answer.stdout)
    assert answer.returncode == 6 and told["dropped"] == ["model.safetensors"] and not told["ok"]
    assert "model.safetensors" in told["error"]["message"]
    partial = mycli("run", REPO, "Hi", "--offline")
    assert partial.returncode == 4 and "missing model.safetensors" in partial.stderr
    assert mycli("pull", REPO, "-q").returncode == mycli("verify", REPO, "-q").returncode == 0

    refused = mycli("rm", REPO)
    assert refused.returncode == 2 and "--yes" in refused.stderr and folder.exists(), "nobody was asked"
    gone = mycli("rm", REPO, "--yes")
    assert gone.returncode == 0 and not folder.exists() and mycli("rm", REPO, "-y").returncode == 4
    assert gone.stdout.startswith(f"removed {REPO}: ")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_d16_a_stop_keeps_what_arrived(
    number: int, code: int, server: HubServer, environment: dict[str, str], tmp_path: Path, mycli: Mycli
) -> None:
    server.fail("storage:", Fault(seconds_per_block=0.05), times=2)
    command = [sys.executable, "-m", "mycli.cli", "pull", REPO]
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    for _ in range(500):
        if any(path.stat().st_size > 4096 for path in (tmp_path / "hf").rglob("*.incomplete")):
            break
        time.sleep(0.02)
    process.send_signal(number)
    _, said = process.communicate(timeout=240)
    assert process.returncode == code and "Traceback" not in said and "to resume" in said
    (left,) = (tmp_path / "hf").rglob("*.incomplete")
    size = left.stat().st_size
    server.forgive()
    assert mycli("pull", REPO).returncode == 0
    assert f"bytes={size}-" in [request.headers.get("Range") for request in server.requests("storage:")]


def test_d11_errors_are_one_line_and_4(server: HubServer, mycli: Mycli) -> None:
    gated = Fault(status=403, headers={"X-Error-Code": "GatedRepo", "X-Error-Message": "\x1b]0;owned\x07"})
    server.fail("/resolve/", gated, times=9)
    done = mycli("pull", REPO, env={"HF_TOKEN": "hf_verysecret"})
    assert done.returncode == 4 and "gated" in done.stderr and "hf_verysecret" not in done.stdout + done.stderr
    assert "\x1b" not in done.stderr and "Traceback" not in done.stderr
    server.forgive()
    missing = mycli("pull", "org/none", "--json")
    assert missing.returncode == 4 and json.loads(missing.stdout)["error"]["exit_code"] == 4
    bad = mycli("pull", REPO, env={"HF_TOKEN": "hf_very\x01secret"})
    assert bad.returncode == 2 and "secret" not in bad.stderr
    assert mycli("pull", REPO, env={"HF_ENDPOINT": "nonsense"}).returncode == 2


def test_a_token_file_in_utf16_is_2(server: HubServer, mycli_process: Mycli, tmp_path: Path) -> None:
    """PowerShell's `>` writes such files."""
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "token").write_text("hf_fromfile\n", encoding="utf-16")
    done = mycli_process("pull", REPO)
    assert done.returncode == 2 and "the token file, holds characters" in done.stderr


def test_the_token_of_the_file_is_sent(server: HubServer, mycli_process: Mycli, tmp_path: Path) -> None:
    """Run in a child process: huggingface_hub reads the token file's location on import."""
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "token").write_text("hf_fromfile\n")
    assert mycli_process("pull", REPO).returncode == 0
    assert {r.headers.get("Authorization") for r in server.requests("hub:")} == {"Bearer hf_fromfile"}


def test_d12_offline_nothing_is_asked(server: HubServer, mycli: Mycli) -> None:
    for env in ({"HF_HUB_OFFLINE": "1"}, {"MYCLI_OFFLINE": "1"}, {"HF_HUB_OFFLINE": "", "TRANSFORMERS_OFFLINE": "1"}):
        done = mycli("pull", REPO, env=env)
        assert done.returncode == 4 and "is not on this machine" in done.stderr
        assert mycli("show", REPO, env=env).returncode == 4
    assert not server.log


def test_custom_code_is_ignored_with_a_warning(server: HubServer, mycli: Mycli) -> None:
    """B15."""
    config = {**json.loads(FILES["config.json"]), "auto_map": {"AutoModel": "modeling.Evil"}}
    server.add(REPO, {**FILES, "config.json": json.dumps(config).encode(), "modeling.py": b"raise SystemExit(77)"})
    done = mycli("pull", REPO)
    assert done.returncode == 0 and "auto_map" in done.stderr
    assert not [request for request in server.log if request.path.endswith(".py")]


def test_the_terminal_decides_whether_rm_asks(server: HubServer, environment: dict[str, str], mycli: Mycli) -> None:
    import pexpect

    assert mycli("pull", REPO, "-q").returncode == 0
    quantized("tiny-int4", Path(environment["XDG_DATA_HOME"]) / "mycli")
    both = (r"org/pico-copy, tiny-int4 \(.+\) from 2 folders\?", [REPO, "tiny-int4"])
    for (question, models), answer, gone in (
        (both, "n", False),
        ((r"org/pico-copy \(.+\) from .+models--org--pico-copy\?", [REPO]), "y", True),
    ):
        command = ["-m", "mycli.cli", "rm", *models]
        terminal = pexpect.spawn(sys.executable, command, env=environment, timeout=240)  # type: ignore[arg-type]  # a dict is a mapping
        terminal.expect(rf"Delete {question} \[y/N\]")
        terminal.sendline(answer)
        terminal.expect(pexpect.EOF)
        terminal.close()
        assert terminal.exitstatus == 0
        assert (mycli("show", REPO, "--offline").returncode == 4) is gone


def test_what_show_prints(mycli: Mycli) -> None:
    page = mycli("show", "pico").stdout
    for words in ("llama", "5,770,496", "16.00 bits per weight", "end tokens", "2048 tokens", "origin"):
        assert words in page
    assert "{%" in mycli("show", "pico", "--template").stdout
    tensors = json.loads(mycli("show", "pico", "--tensors", "--json").stdout)["tensors"]
    assert sum(entry["bytes"] for entry in tensors) == 11540992
    assert mycli("show", "pico", "--recipe").returncode == 2
    for two in (("--template", "--tensors"), ("--template", "--recipe"), ("--tensors", "--recipe")):
        assert "exclude each other" in mycli("show", "pico", *two).stderr


def test_provenance_and_card_of_a_quantized_model(mycli: Mycli, tmp_path: Path) -> None:
    import shutil

    folder = tmp_path / "data" / "mycli" / "models" / "pico-rtn-int4-g32"
    shutil.copytree(PICO, folder)
    divergence = {
        "kl": {"value": 0.0123},
        "kl_p99": 0.2,
        "same_top1": {"value": 0.95},
        "reference_perplexity": {"value": 5.0},
    }
    record = {
        "schema_version": 1,
        "recipe": {"method": "rtn", "bits": 4, "group": 32},
        "source": {"name": "org/pico", "repo": "org/pico", "revision": "f" * 40, "files": {}},
        "versions": {"mycli": "0.1"},
        "card": {"perplexity": {"value": 5.25}, "divergence": divergence},
        "files": {},
    }
    (folder / "mycli.json").write_text(json.dumps(record))
    page = mycli("show", "pico-rtn-int4-g32").stdout
    for words in (f"quantized from org/pico @ {'f' * 40}", "5.0000 before, 5.2500 after", "mean 0.0123", "95.00%"):
        assert words in page
    assert "recipe bits      4" in mycli("show", "pico-rtn-int4-g32", "--recipe").stdout
    assert json.loads(mycli("show", "pico-rtn-int4-g32", "--json").stdout)["recipe"]["method"] == "rtn"
    collapsed = {"perplexity": {"value": None}, "divergence": {**divergence, "reference_perplexity": {"value": 1e15}}}
    (folder / "mycli.json").write_text(json.dumps({**record, "card": collapsed}))
    assert "1000000000000000.0000 before, inf after" in mycli("show", "pico-rtn-int4-g32").stdout
    (folder / "mycli.json").write_text(json.dumps({**record, "card": {"perplexity": 3}}))
    assert mycli("show", "pico-rtn-int4-g32").returncode == 3


def test_the_template_of_a_model_of_the_hub_is_checked_there(server: HubServer, mycli: Mycli) -> None:
    done = mycli("template", "check", REPO)
    assert done.returncode == 0 and "note: renders no tools" in done.stdout
    settings = json.loads(FILES["tokenizer_config.json"])
    del settings["chat_template"]
    server.add("org/plain", {**FILES, "tokenizer_config.json": json.dumps(settings).encode()})
    plain = mycli("template", "check", "org/plain")
    assert plain.returncode == 2 and "org/plain has no chat template" in plain.stderr
    requests = len(server.log)
    for command in (("org/other", "--offline"), ("nothing-here",)):
        assert mycli("template", "check", *command).returncode == 4
    assert len(server.log) == requests
