"""Fuzz what `mycli pull` and `mycli list` take: names, repositories read by ranges, stores of other programs.

python -m tests.attacks.fuzz_pulls [names] [ranges] [stores] [--seconds 60] [--seed 0] [--record FILE]

Each case runs commands in this process, with a hub on loopback. It must end with 0 and the right files, or with a code
of a user's error and one line. The seed alone determines the case, as in `fuzz`. A changed byte of a range is not among
the faults of the server: the hub has hashes of whole files only.
"""

import json
import os
import random
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from unittest import mock
from urllib.parse import unquote

from mycli.runtime.errors import ExitCode
from mycli.runtime.hub import client
from mycli.runtime.hub.names import REPO
from mycli.runtime.utils.sanitize import sanitize
from tests.attacks import fuzz
from tests.support.command_line import Completed, run_here
from tests.support.families import make
from tests.support.hub_server import Fault, HubServer, hub_server
from tests.support.models import random_model
from tests.support.multimodal_families import make_folder
from tests.support.other_stores import lm_studio, ollama
from tests.support.paths import PICO
from tests.support.pulling import QUICK

MODEL, QUANTS = "org/tiny", "org/tiny-GGUF"
PASTED = (
    *("org/tiny", "org/tiny@main", "org/tiny@v2", "org/tiny-GGUF:Q4_K_M", "org/tiny-GGUF:tiny-Q8_0.gguf", "pico"),
    *("hf.co/org/tiny-GGUF:Q8_0", "https://huggingface.co/org/tiny", "https://huggingface.co/org/tiny/tree/v2"),
    *("https://huggingface.co/org/tiny-GGUF/blob/main/tiny-Q4_K_M.gguf", "hf://org/tiny", "org/local", "tiny:1b"),
    *("https://ollama.com/library/tiny:1b", "ollama run tiny:1b", "ollama pull hf.co/org/tiny-GGUF:IQ4_XS", "tiny"),
    *("org/local:local-Q4_K_M.gguf", "org/local:q4_k_m", "org/tiny-GGUF@main:UD-Q4_K_XL", "./tiny", "~/tiny", "a/b/c"),
)
_WORDS = "/ // .. ../ : @ ? # %2e%2e%2f %00 \\ ~ - -- [*] .gguf .git main v2 Q4_K_M iq4_xs latest datasets/ é"
_PIECES = (*_WORDS.split(), "\0", "\n", "\x1b[2J", " ", "\u202e", "\ud800", "a" * 300)
REFUSED = {ExitCode.USAGE, ExitCode.MODEL, ExitCode.NOT_FOUND, ExitCode.RESOURCES, ExitCode.GATE}
RTN = ("--bits", "4", "--method", "rtn", "--group", "32", "--report", "none")


class WrongOutcomeError(Exception):
    """A command ended in another way than it may, or with other files."""


@dataclass(frozen=True)
class Place:
    """The folder of a case, with a home, a cache and a working folder, and the hub that its commands ask."""

    folder: Path
    server: HubServer

    def run(self, *words: str) -> Completed:
        """Run a command; raise WrongOutcomeError unless it ends with 0 or with a user's error of one line."""
        home = str(self.folder)
        environment = {"HOME": home, "HF_HUB_CACHE": f"{home}/hub", "MYCLI_HOME": f"{home}/mycli", "PATH": os.defpath}
        environment["XDG_CACHE_HOME"] = os.environ.get("XDG_CACHE_HOME", str(Path.home() / ".cache"))  # of kernels
        with mock.patch.object(client, "RetryPolicy", lambda: QUICK):
            done = run_here(words, {**environment, "HF_ENDPOINT": self.server.address()})
        said = done.stdout + done.stderr
        if done.returncode not in (0, *REFUSED) or sanitize(said) != said or not _one_line(done, words):
            raise WrongOutcomeError(f"{words} ended with {done.returncode}: {done.stdout!r} {done.stderr[-900:]!r}")
        return done

    def clear(self) -> None:
        for path in self.folder.iterdir():
            shutil.rmtree(path)


def _one_line(done: Completed, words: tuple[str, ...]) -> bool:
    if done.returncode == 0:
        return True
    if "--json" in words:
        error = json.loads(done.stdout)["error"]
        return bool(error["message"]) and error["exit_code"] == done.returncode
    return len(re.findall("^error: ", done.stderr, re.MULTILINE)) == 1


def require(right: bool, what: object) -> None:
    if not right:
        raise WrongOutcomeError(str(what))


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def _changed_name(draw: random.Random) -> str:
    name = draw.choice(PASTED)
    for _ in range(draw.choice((0, 1, 1, 1, 2, 3))):
        at, kind = draw.randrange(len(name) + 1), draw.random()
        if kind < 0.4:
            name = name[:at] + draw.choice(_PIECES) + name[at:]
        elif kind < 0.6:
            name = name[:at] + name[at + draw.randint(1, 3) :]
        elif kind < 0.75:
            name = name[:at] + draw.choice(PASTED)[at:]
        elif kind < 0.85:
            name = name.swapcase() if draw.random() < 0.5 else name[:at] + name[at:].swapcase()
        else:
            name = name[:at] + chr(draw.choice((draw.randrange(128), draw.randrange(0x3000)))) + name[at:]
    return name


_STORED = {"ollama": b"of Ollama", "lm-studio": b"of LM Studio"}


@cache
def _gguf() -> bytes:
    return next(iter(fuzz.LAYOUTS["gguf"]().values()))[fuzz.FILE]


def _named(place: Place) -> None:
    """Fill a hub with a model and several quants of it, and the stores of other programs with one model each."""
    tiny = _models()["llama"]
    quants = ("Q4_K_M", "Q8_0", "IQ4_XS", "UD-Q4_K_XL")
    place.server.add(MODEL, {**tiny, "version.json": b"{}"}, "v2")
    place.server.add(MODEL, tiny)
    place.server.add(QUANTS, {f"tiny-{quant}.gguf": _gguf() + quant.encode() for quant in quants})
    ollama(place.folder, _STORED["ollama"])
    lm_studio(place.folder, _STORED["lm-studio"], "org/local/local-Q4_K_M.gguf")


def names(place: Place, draw: random.Random) -> str:
    """Pull a name that was changed: the files must be those of a repository that it names."""
    place.server.repos.clear()
    _named(place)
    name, asked = _changed_name(draw), len(place.server.log)
    if draw.random() < 0.2:
        place.run("pull", "--dry-run", "--", name)
    done = place.run("pull", "--json", "--", name)
    for request in place.server.log[asked:]:
        words = unquote(request.path).partition("?")[0].split("/")
        require(".." not in words and request.path.isprintable(), f"{name!r} asked for {request.path}")
    outside = {path.name for path in place.folder.iterdir()} - {"hub", ".ollama", ".lmstudio", "mycli"}
    require(not outside, f"{name!r} wrote {outside}")
    if done.returncode != 0:
        return ExitCode(done.returncode).name
    answer = json.loads(done.stdout)
    path = Path(answer["folder"])
    if answer["repo"] is not None:
        _require_named(place.server, name, answer["repo"], answer["commit"], path)
    elif path.is_file():
        require(path.read_bytes() in _STORED.values() and ("tiny" in name or "local" in name), f"{name!r}: {path}")
    else:
        require(path.resolve() == PICO.with_name(name).resolve(), f"{name!r}: {path}")
    again = json.loads(place.run("pull", "--json", "--offline", "--", name).stdout or "{}")
    require(again.get("folder") == answer["folder"], f"{name!r}: {path}, then {again}")
    return "pulled" if answer["repo"] else "found"


def _require_named(server: HubServer, name: str, repo: str, commit: str, path: Path) -> None:
    branches = [branch for branch, other in server.refs[repo].items() if other == commit]
    revision = "v2" if re.search(r"(@|/tree/|/blob/|/resolve/)v2", name) else "main"
    require(bool(REPO.fullmatch(repo)) and repo in name and revision in branches, f"{name!r}: {repo} of {branches}")
    files = server.repos[repo][commit]
    if path.suffix != ".gguf":
        require(contents(path) == files, f"{name!r}: other files in {path}")
        return
    word = name.rpartition(":")[2].lower()
    require(path.name in name or word in path.name.lower(), f"{name!r}: {path}")
    require(path.read_bytes() == files[path.name], f"{name!r}: other bytes in {path}")


@cache
def _models() -> dict[str, dict[str, bytes]]:
    """Return small folders: one file, several, experts, and text models in folders that see."""
    small = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 64, "vocab_size": 256}
    with tempfile.TemporaryDirectory() as name:
        base = Path(name)
        folders = {"llama": random_model(base / "llama", **small)}
        for family, changes in (("qwen3_moe", {"num_experts": 4}), ("gemma2", {}), ("qwen3", {"head_dim": 32})):
            make(base / family, family, {**small, **changes})
            folders[family] = base / family
        for family in ("qwen3_vl", "qwen2_5_vl", "gemma3"):
            make_folder(base / f"{family}-seeing", family)
            folders[f"{family}-seeing"] = base / f"{family}-seeing"
        models = {key: contents(folder) for key, folder in folders.items()}
    models["parts"] = _in_parts(models["llama"])
    return models


def _in_parts(files: dict[str, bytes]) -> dict[str, bytes]:
    tensors = fuzz.load(files[fuzz.WEIGHTS])
    parts = ("model-1.safetensors", "model-2.safetensors")
    table = {key: parts[number % 2] for number, key in enumerate(sorted(tensors))}
    rest = {key: data for key, data in files.items() if key != fuzz.WEIGHTS}
    stored = {part: fuzz.save({key: tensors[key] for key in table if table[key] == part}) for part in parts}
    index = json.dumps({"metadata": {}, "weight_map": table}).encode()
    return {**rest, **stored, "model.safetensors.index.json": index}


def _fault(draw: random.Random) -> tuple[str, Fault]:
    statuses = tuple(Fault(status=status) for status in (401, 403, 404, 408, 416, 429, 500, 503))
    cuts = tuple(Fault(drop_after=draw.randrange(5000)) for _ in range(6))
    lies = (Fault(announced=draw.randrange(9000)), Fault(shifted=draw.choice((-8, 1, 64))), Fault(ignore_range=True))
    if draw.random() < 0.2:  # files that are read whole
        return "hub:/org", Fault(altered=True)
    return draw.choice(("storage:", "storage:", "resolve", "hub:/api")), draw.choice((*statuses, *cuts, *lies))


def ranges(place: Place, draw: random.Random) -> str:
    """Quantize a model, maybe a damaged one, while it is downloaded, from a server with faults.

    The bytes must be those of `pull`, then `quantize`. What fails by the server's faults must succeed without them.
    """
    server, target, whole = place.server, place.folder / "copies/ranges", place.folder / "copies/whole"
    server.repos.clear()
    files = draw.choice(sorted(_models().items()))[1]
    if draw.random() < 0.4 and fuzz.WEIGHTS in files:
        files = fuzz.damaged(files, f"ranges {draw.random()}")
    server.add(MODEL, files)
    target.parent.mkdir()
    expected = place.run("pull", MODEL).returncode or place.run("quantize", MODEL, *RTN, "-o", str(whole)).returncode
    shutil.rmtree(place.folder / "hub", ignore_errors=True)
    for _ in range(draw.choice((0, 1, 1, 2, 4))):
        server.fail(*_fault(draw), times=draw.choice((1, 1, 2, 50)))
    command = ("pull", MODEL, *RTN, "-o", str(target))
    first = place.run(*command).returncode
    server.forgive()
    last = place.run(*command).returncode if first else first
    require(bool(last) == bool(expected), f"{last}, after pull {expected}")
    if last:
        return ExitCode(last).name
    require(contents(target) == contents(whole), "other bytes than after pull")
    return "after faults" if first else "equal"


_ODD = ("tiny.gguf", "mmproj-a.gguf", "a\nb.gguf", "\x1b[2J.gguf", ".gguf", "é.gguf", "a b.gguf", "x.GGUF", "m.bin")
_SPLIT = ("s-00001-of-00002.gguf", "s-00002-of-00002.gguf", "t-00001-of-00009.gguf", "config.json")


_PLACES = (
    ("registry.ollama.ai", "registry.ollama.ai", "hf.co", "registry.example.com", "a b"),
    ("library", "library", "org", "é"),
    ("tiny", "tiny", "a.b", "-"),
    ("1b", "latest", "Q4_K_M", "tiny.gguf", "\x1b[2J"),
)


def stores(place: Place, draw: random.Random) -> str:
    """List stores of Ollama and LM Studio with damaged manifests, odd names, links and damaged files.

    What is listed without a problem must be found by its name, inside of its store.
    """
    home, paths = place.folder, set[Path]()
    for _ in range(draw.randint(1, 3)):
        data = fuzz.damaged({fuzz.FILE: _gguf()}, str(draw.random()))[fuzz.FILE] if draw.random() < 0.3 else _gguf()
        if draw.random() < 0.5:
            path = ollama(home, data, *(draw.choice(words) for words in _PLACES[draw.choice((0, 0, 1, 4)) :]))
            if draw.random() < 0.5:
                changed = json.dumps(fuzz._other(json.loads(path.read_bytes()), draw)).encode()
                path.write_bytes(draw.choice((changed, fuzz._bytes(path.read_bytes(), draw))))
        else:
            repo = draw.choice(("org/tiny", "org/tiny", "org/local", "o/é", "-/-", "a b/c", "org/x\n"))
            path = lm_studio(home, data, f"{repo}/{draw.choice((*_ODD, *_SPLIT))}")
        paths.add(path)
    for path in sorted(paths):
        if draw.random() < 0.15:
            path.unlink()
            path.symlink_to(draw.choice((PICO / "config.json", home, path.parent / "none", path)))
    place.run("list")
    listed = json.loads(place.run("list", "--json").stdout)["models"]
    outcomes = set()
    for model in (model for model in listed if model["kind"] in ("ollama", "lm-studio")):
        done = place.run("pull", "--json", "--offline", "--", model["name"])
        outcomes.add(model["kind"] if done.returncode == 0 else ExitCode(done.returncode).name)
        if done.returncode == 0:
            found = Path(json.loads(done.stdout)["folder"]).resolve()
            root = home / (".ollama/models/blobs" if model["kind"] == "ollama" else ".lmstudio/models")
            require(found.is_relative_to(root.resolve()), f"{model}: {found}")
        else:
            require(bool(model["problem"]), f"{model} is not found by its name: {done.stderr}")
    return " and ".join(sorted(outcomes)) or "none"


SETS: dict[str, Callable[[Place, random.Random], str]] = {"names": names, "ranges": ranges, "stores": stores}


@contextmanager
def place() -> Iterator[Place]:
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder, hub_server() as server:
        os.chdir(folder)
        yield Place(Path(folder), server)
        os.chdir(before)


def attempt(name: str, seed: int, where: Place) -> str:
    where.clear()
    where.server.log.clear()
    return SETS[name](where, random.Random(f"{name} {seed}"))


def main() -> None:
    """Print one line per set and a traceback per fault; exit with 1 after a fault."""
    options = fuzz.command_line(__doc__, list(SETS)).parse_args()
    record = fuzz.Record(options.record and options.record.absolute(), options.seed)
    _models(), _gguf()  # made once, in no case's time
    # A client that has what it needs closes the connection.
    with mock.patch("socketserver.BaseServer.handle_error"), place() as where:
        faults = [
            fuzz.repeat(name, options.seconds, record, lambda seed, name=name: attempt(name, seed, where))
            for name in options.sets
        ]
    sys.exit(any(faults))


if __name__ == "__main__":
    main()
