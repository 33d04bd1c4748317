"""Types the commands of README and docs page by page, as a reader would.

Each runs in a shell, in an empty folder, with the program on PATH. Placeholders are filled in (`STAND_INS`), the hub
and other servers are stand-ins, long commands get smaller sizes. `NOT_RUN` lists the commands that are not run, with
reasons. Commands that are also examples of a help page are run by `test_examples`.
"""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

import gguf
import pytest

from mycli.cli.main import COMMANDS, find_command, join_sweep
from tests.support.adapters import QUERIES, tensors_for, write_adapter
from tests.support.command_line import COMMAND, default_signals
from tests.support.hub_server import HubServer, hub_server
from tests.support.other_stores import lm_studio, ollama
from tests.support.paths import PICO, ROOT
from tests.support.prediction import make_with_head

PAGES = (
    "README.md",
    *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md") if path.name != "commands.md"),
    "docs/results/cpu.md",
)
TYPED = re.compile(
    r"(?:mycli [a-z]|python -m|curl|make |vllm |hf |lm_eval|export |git |echo |\(umask|(?:[A-Z_]+=\S+ )+python)"
)
# Pattern -> replacement, applied in this order before a command is run.
STAND_INS = {
    r"pull (?:MODEL|org/model) --bits 4": "pull Qwen/Qwen2.5-0.5B-Instruct --bits 4 --method rtn --overwrite",
    r"MODEL --target-size 15\.4GiB": "pico-draft --target-size 1.25MiB --samples 8 --seq 128 --report none",
    r"serve MODEL MODEL --models-dir DIR": "serve pico pico-draft",
    r"serve --models-dir ~/models --memory 40GiB --pin qwen3-8b": "serve pico pico-draft --memory 4GiB --pin pico",
    r"serve Qwen/Qwen(?:3-Embedding-0\.6B|2\.5-Coder-1\.5B)": "serve pico",
    r"verify model\.gguf --as gguf-py --ref MODEL": "verify file.gguf --as gguf-py --ref pico",
    r"^mycli serve$": "mycli serve pico pico-draft",
    r"^python -m(?= tests\.support)": f"cd {shlex.quote(str(ROOT))} && {sys.executable} -m",
    r"^python -m": f"{sys.executable} -m",
    r"^make (?!demo)": f"make -C {shlex.quote(str(ROOT))} -n ",  # what it would run: the target itself takes minutes
    r"^git diff --staged": "echo changed",
    r"\[:[^]]*\]": "",
    r"eval FOLDER --ref pico --activations-sweep --tokens 8k": "eval made --ref pico --activations-sweep --tokens 1k",
    r" \[--head int8\]": "",  # pico's head is its embedding
    r"gptq\|awq\|mlx\|safetensors": "safetensors",
    r"--bits B\b": "--bits 4",
    r" \.\.\.$": "",
    r"--draft mtp": "--draft mtp --device cpu",
    r"MODEL(?= --draft mtp)": "./with-head",
    r"--adapter FOLDER": "--adapter ./adapter",
    r"some-org/some-adapter && mycli chat MODEL": "some-org/some-adapter && mycli chat pico",
    r"(?<=mycli )((?:bench |template )?\w+) (?:MODEL|FOLDER)\b": r"\1 pico",
    r"(?<=mycli\.cli quantize )MODEL": "pico",
    r"\bFOLDER\b": "made",
    r"\bOURS\b": "ours",
    r"\bDRAFT\b": "pico-draft",
    r"NAME\.\.\.": "some-org/some-adapter --yes",
    r"--ctx (?:8k|128k)": "--ctx 2k",
    # Smaller sizes.
    r"--clients 1,4,8,16 -p 512 -n 128": "--clients 2 -p 32 -n 8 --requests 4 -r 1",
    r"--clients 8 --shared 256": "--clients 2 --shared 16 -p 32 -n 8 --requests 4 -r 1",
    r"--clients 8 --requests 8 -p 128 -n 32": "--clients 2 --requests 2 -p 32 -n 8",
    r"-n 128 --clients 1,4,8 --requests 8": "-n 16 --clients 1,4 --requests 4",
    r"--rate 0.5,1,2,4": "--rate 8 -p 32 -n 8 --requests 4 -r 1",
    r"--sweep bits=\S+ method=\S+": "--report quick --sweep bits=4 method=rtn",
    r"--tune-codes --samples 256": "--tune-codes --samples 8 --seq 64",
    r"--samples 64 --seq 512": "--samples 8 --seq 128 --overwrite",
    r"pico(.*) --report full": r"pico-draft\1 --group 64 --method rtn --report quick",
    r"pico (?=--method nf4)": "pico-draft ",
    r"quantize pico(?=.* --hessian model)": "quantize pico-draft --group 64",
    r"quantize pico (?=--adapter|--samples)": "quantize pico --method rtn ",
    r"(quantize Qwen\S+)": r"\1 --method rtn",
    r"(?<=Instruct-)gptq": "rtn",
    r"(bench pico) --draft": r"\1 -n 16 -r 1 --draft",
    r"(bench pico) -p 512 -n \d+(?: -r \d)?": r"\1 -p 64 -n 8 -r 1",
    r"-o model-q4_k_m\.gguf": "-o pico-q4_k_m.gguf",
}
SETTINGS = """
[quantize]
calib = "{folder}/calibration.txt"
samples = 8
seq = 128
report = "none"
[pull]
report = "none"
[eval]
tokens = 1024
"""
MEASURED = "takes minutes or hours, or needs other programs; other tests start it"
NOT_RUN = {
    r"^export PATH": "is for the shell that `make demo` was typed in",
    r"^make demo": "makes an environment; what it then does is on the same page",
    r"^(?:vllm|.*sglang\.launch_server)": "another maker's server",
    r"^lm_eval": "another maker's program, and data of the hub",
    r"^hf upload": "would publish",
    r"tests\.(?:benchmarks|gpu|ptx)\.": MEASURED,
    r"^mycli compare pico pico-gptq\S+ --prompts": "needs a file of prompts; test_compare types it",
    r"^mycli rm NAME": "needs an unfinished run; test_work_folder and test_first_hour leave one",
    r"--resume last": "needs a reply that was killed; test_resume of both rooms types it",
    r"--as llama": "needs llama.cpp",
    r"eval MODEL --ref ORIGINAL --activations-sweep": "needs a quantized copy and its original; test_quantize types it",
}
SERVER = re.compile(r"^mycli serve ")
LOCAL = re.compile(r"http://127\.0\.0\.1:80\d0")


def commands(page: str) -> list[str]:
    """The lines of a page's blocks that begin with a program, in order, continuation lines joined."""
    text = (ROOT / page).read_text(encoding="utf-8").replace("\\\n", " ")
    lines = re.findall(r"^(?:    |\$ )(?=\S)(.*)$", text, re.M)
    return [" ".join(line.split()) if "\n" in line else line.strip() for line in lines if TYPED.match(line)]


def spans(page: str) -> list[str]:
    """The inline commands of a page that have arguments."""
    commands = re.findall(r"`(mycli [a-z]+ [^`]+)`", (ROOT / page).read_text(encoding="utf-8"))
    return [
        line for line in (" ".join(line.split()) for line in commands) if line.removeprefix("mycli ") not in COMMANDS
    ]


def programs(page: str) -> list[str]:
    """The Python blocks of a page that send requests to a server."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.S)
    return [block for block in blocks if LOCAL.search(block)]


def filled(line: str) -> str:
    line = line.partition("  #")[0].strip()
    for form, meant in STAND_INS.items():
        line = re.sub(form, meant, line)
    return line


def why_not(line: str) -> str | None:
    return next((reason for form, reason in NOT_RUN.items() if re.search(form, line)), None)


EXAMPLES = {line for module, _ in COMMANDS.values() for line in import_module(f"mycli.cli.commands.{module}").EXAMPLES}
ALL = {page: list(dict.fromkeys((*commands(page), *spans(page)))) for page in PAGES}
FIRST = {filled(line): page for page in reversed(PAGES) for line in ALL[page]}  # where a command is run
RUN = {
    page: [line for line in ALL[page] if FIRST[filled(line)] == page and line not in EXAMPLES and not why_not(line)]
    for page in PAGES
}


def test_there_are_commands_and_few_are_not_run() -> None:
    left = {line for lines in ALL.values() for line in lines if why_not(line)}
    assert sum(map(len, RUN.values())) > 40 and len(left) < 21
    for form in NOT_RUN:
        assert any(re.search(form, line) for line in left), f"{form}: no command is of that form any more"


@pytest.mark.parametrize("page", PAGES)
def test_a_documented_command_parses(page: str) -> None:
    for line in ALL[page]:
        for part in re.split(r"\s(?:\||&&)\s", filled(line)):
            words = shlex.split(part.replace("(", "").replace(")", ""))
            if words[0] != "mycli":
                continue
            name = next(candidate for count in (2, 1) if (candidate := " ".join(words[1 : 1 + count])) in COMMANDS)
            parser = find_command(name)
            parser.make_context(name, join_sweep(words[1:])[len(name.split()) :])


# Files that pages assume


def _preset(folder: Path) -> None:
    shown = re.findall(r"```toml\n(.*?)```", (ROOT / "docs/faq.md").read_text(encoding="utf-8"), re.S)
    path = folder / "config" / "mycli" / "config.toml"
    path.parent.mkdir(parents=True)
    path.write_text(SETTINGS.format(folder=folder) + "".join(shown))
    text = ROOT / "quant" / "calibration_text" / "prose.txt"
    (folder / "calibration.txt").write_text(text.read_text(encoding="utf-8")[:20_000], encoding="utf-8")


def _bodies(folder: Path) -> None:
    for name in ("A.json", "B.json"):
        body = {"model": "pico", "messages": [{"role": "user", "content": f"Hello from {name}"}]}
        (folder / name).write_text(json.dumps(body))


def _in_parts(whole: Path) -> None:
    """Split `whole` into model-00001-of-00003.gguf and the two following parts, with the gguf library."""
    reader = gguf.GGUFReader(whole)
    most = -(-len(reader.tensors) // 3)
    writer = gguf.GGUFWriter(whole.parent / "model.gguf", "llama", split_max_tensors=most)
    for field in reader.fields.values():
        if not field.name.startswith(("GGUF.", "general.architecture")):
            writer.add_key_value(field.name, field.contents(), field.types[0], *field.types[1:2])
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _stock(hub: HubServer, folder: Path) -> None:
    """Add the Hub models that pages name: pico under their names, and the files of `folder`."""
    files = {path.name: path.read_bytes() for path in PICO.iterdir() if path.is_file()}
    for name in ("Qwen/Qwen2.5-0.5B-Instruct", "Qwen/Qwen3-8B", "meta-llama/llama 3.2"):
        hub.add(name, files)
    if (exported := folder / "file.gguf").exists():
        hub.add("org/repo", {"model-Q4_K_M.gguf": exported.read_bytes()})
        name = "qwen2.5-0.5b-instruct-q4_k_m.gguf"
        hub.add("Qwen/Qwen2.5-0.5B-Instruct-GGUF", {name: exported.read_bytes()})
        home = folder.parent  # of the tests' environment
        ollama(home, exported.read_bytes(), "registry.ollama.ai", "library", "qwen3", "8b")
        lm_studio(home, exported.read_bytes(), "org/repo-GGUF/repo-Q4_K_M.gguf")
    if (adapter := folder / "adapter").exists():
        hub.add("some-org/some-adapter", {path.name: path.read_bytes() for path in adapter.iterdir()})


class Reader:
    """The reader of a page: a shell in an empty folder with the files that the page assumes."""

    def __init__(self, folder: Path, environment: dict[str, str], hub: HubServer) -> None:
        self.folder = folder / "empty"
        self.folder.mkdir()
        bin_folder = folder / "bin"
        bin_folder.mkdir()
        for name, text in {
            "mycli": f'exec {shlex.join(COMMAND)} "$@"',
            "vllm": 'echo "http://127.0.0.1: $@"; exec sleep 60',
        }.items():
            (bin_folder / name).write_text(f"#!/bin/sh\n{text}\n")
            (bin_folder / name).chmod(0o755)
        path = f"{bin_folder}{os.pathsep}{environment.get('PATH', '')}"
        self.environment = environment | {"PATH": path, "MYCLI_DEVICE": "cpu"}
        self.environment |= {"HF_ENDPOINT": hub.address(), "HF_HUB_OFFLINE": "0"}
        _preset(folder)

    def types(self, line: str) -> None:
        done = subprocess.run(
            ["sh", "-c", line],
            cwd=self.folder,
            env=self.environment,
            input="Hello!\n" if "mycli chat" in line else "",
            capture_output=True,
            text=True,
            timeout=300,
        )
        if "doctor" in line and done.returncode == 6 and "is slower" in done.stderr and "differs" not in done.stderr:
            return  # no test depends on the speed of the machine
        assert done.returncode == 0, f"{line}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"

    @contextmanager
    def serves(self, line: str) -> Iterator[str]:
        command = ["sh", "-c", f"exec {line} --port 0"]
        pipes = {"stdout": subprocess.PIPE, "text": True}
        with subprocess.Popen(
            command, cwd=self.folder, env=self.environment, preexec_fn=default_signals, **pipes
        ) as server:
            first_line = server.stdout.readline()
            try:
                assert (address := re.search(r"http://[\d.]+:\d*", first_line)), f"{line}\n{first_line}"
                yield address[0]
            finally:
                server.send_signal(signal.SIGTERM)
                ended = server.wait(60)
            assert ended in (143, -signal.SIGTERM), line

    def prepare(self, lines: str) -> None:
        needed: dict[str, Callable[[], object]] = {
            r"\.gguf": lambda: self.types(
                "mycli export pico --to gguf -q -o file.gguf && cp file.gguf model-Q4_K_M.gguf"
            ),
            r"-00001-of": lambda: _in_parts(self.folder / "file.gguf"),
            r"keys\.txt": lambda: (self.folder / "keys.txt").write_text("alice 4f1b0c9a77d2e5f0 weight=2\n"),
            r"A\.json": lambda: _bodies(self.folder),
            r"adapter": lambda: write_adapter(self.folder / "adapter", tensors_for(PICO, QUERIES)),
            r"with-head": lambda: make_with_head(self.folder / "with-head", "qwen3_5-delta"),
        }
        for form, make in needed.items():
            if re.search(form, lines):
                make()


@pytest.mark.typed
@pytest.mark.parametrize("page", [page for page in PAGES if RUN[page] or programs(page)])
def test_the_commands_of_a_page_run(page: str, environment: dict[str, str], tmp_path: Path) -> None:
    """Commands run in the order of the page. Requests go to one server that runs until the end of the page."""
    for name in [name for name in environment if name.lower().endswith("_proxy")]:
        del environment[name]
    lines = list(dict.fromkeys(filled(line) for line in RUN[page]))
    with hub_server() as hub:
        reader = Reader(tmp_path, environment, hub)
        reader.prepare("\n".join(lines))
        _stock(hub, reader.folder)
        for line in lines:
            if SERVER.search(line):
                with reader.serves(line):
                    pass
            elif not LOCAL.search(line):
                reader.types(line)
        requests = [line for line in lines if LOCAL.search(line)]
        requests += [f"{shlex.quote(sys.executable)} -c {shlex.quote(block)}" for block in programs(page)]
        if requests:
            with reader.serves("mycli serve pico") as address:
                for line in requests:
                    reader.types(LOCAL.sub(address, line))


@pytest.mark.typed
def test_readme_shows_what_its_commands_print(environment: dict[str, str], tmp_path: Path) -> None:
    """Figures vary by machine; names of lines and titles do not."""
    shown = re.findall(r"^\$ (mycli (?!run).*)\n((?:.+\n)+)", (ROOT / "README.md").read_text(encoding="utf-8"), re.M)
    assert [line.split()[1] for line, _ in shown] == ["quantize", "show", "estimate"]
    config = Path(environment["XDG_CONFIG_HOME"]) / "mycli" / "config.toml"
    config.parent.mkdir(parents=True)
    config.write_text("[quantize]\nsamples = 8\nseq = 128\n")
    for line, output in shown:
        words = [sys.executable, "-m", "mycli.cli", *shlex.split(line)[1:]]
        done = subprocess.run(words, env=environment, cwd=tmp_path, capture_output=True, text=True, check=True)
        printed = done.stdout.splitlines()
        assert [_label(row) for row in output.splitlines()[: len(printed)]] == [_label(row) for row in printed]


def _label(row: str) -> str:
    return re.split(r"(?<=\S)  +", row)[0]


@pytest.mark.parametrize("page", PAGES)
def test_the_modules_and_targets_that_a_page_names_exist(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    for module in set(re.findall(r"python -m (tests(?:\.\w+)+)", text)):
        assert (ROOT / f"{module.replace('.', '/')}.py").is_file(), module
    makefile = (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"`make ([a-z-]+)`|^    make ([a-z-]+)$", text, re.M)):
        assert re.search(rf"^{target[0] or target[1]}:", makefile, re.M), target
