"""Servers of other makers for models that one GPU does not hold: vLLM and SGLang, started on the same folder.

Knows how they are called and what of a request they are told: where to listen, the name, the context, the number
formats, how many GPUs share the model, how much of their memory they may take. The process becomes theirs, so that
signals and the exit code are theirs. Does not know how to run a model.
"""

import json
import math
import os
import shlex
import shutil
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import typer

from mycli.cli.command import Call
from mycli.cli.flags import options
from mycli.runtime.checkpoint.model_folder import ModelFolder
from mycli.runtime.checkpoint.open_folder import open_model_folder
from mycli.runtime.device.nvml import Gpu, gpus
from mycli.runtime.diagnostics.vllm_tp import obstacles
from mycli.runtime.engine.config import EngineConfig
from mycli.runtime.errors import ModelError, ResourceError, UsageError
from mycli.runtime.hub.resolve import resolve
from mycli.runtime.memory.estimate import estimate, rank_bytes
from mycli.runtime.memory.fit import SHORTEST_CONTEXT
from mycli.runtime.memory.plan import DEFAULT_CONTEXT, MemoryPlan
from mycli.runtime.server.settings import ServerSettings
from mycli.runtime.utils.units import human_bytes

OURS = "mycli"
RANKS = (2, 4, 8)  # GPUs of one machine that share a model
_MOST_MEMORY = 0.92  # of a GPU: what vLLM takes unless told otherwise


@dataclass(frozen=True)
class EngineFlags:
    """Whose engine serves, and over how many GPUs, as it was typed."""

    engine: Annotated[
        str,
        options.word_option(
            "--engine",
            words=("mycli", "vllm", "sglang"),
            help="Start another project's server on the same model, which can split it over GPUs.",
        ),
    ] = OURS
    ranks: Annotated[
        int,
        typer.Option("--tensor-parallel-size", min=1, max=1024, metavar="N", help="With --engine: GPUs that share it."),
    ] = 1

    def resolve(self) -> "OtherEngine | None":
        """The other engine, None for our own. Raises UsageError for one that is not known."""
        name = options.choice("--engine", self.engine, (OURS, *_ENGINES), "engine")
        if name != OURS:
            return _ENGINES[name]
        if self.ranks > 1:
            raise UsageError(
                "--tensor-parallel-size splits a model, which our own server does not do",
                "add --engine vllm, or --engine sglang",
            )
        return None


@dataclass(frozen=True)
class Launch:
    """What a server of another maker is to do; `share`: of each GPU's memory, None for as much as usual."""

    folder: Path
    settings: ServerSettings
    context: int
    together: int
    ranks: int
    dtype: str  # bfloat16, float16, float32, auto
    kv: str  # bfloat16, auto
    share: float | None
    cache_bytes: int
    cores: tuple[tuple[int, ...], ...] = ()  # of a CPU, for each part of the model; () where the engine sees to it
    host: str = "127.0.0.1"
    port: int = 8080


def _vllm(wanted: Launch) -> tuple[list[str], dict[str, str]]:
    """Arguments and environment of vLLM 0.11 and later."""
    arguments = ["serve", str(wanted.folder), "--host", wanted.host, "--port", str(wanted.port)]
    arguments += ["--served-model-name", *wanted.settings.names]
    arguments += ["--max-model-len", str(wanted.context), "--max-num-seqs", str(wanted.together)]
    arguments += ["--tensor-parallel-size", str(wanted.ranks), "--dtype", wanted.dtype]
    arguments += ["--kv-cache-dtype", wanted.kv]
    if wanted.share is not None:
        arguments += ["--gpu-memory-utilization", f"{wanted.share:.2f}"]
    arguments += ["--allowed-origins", json.dumps(list(wanted.settings.origins))]  # else all may
    environment = {"VLLM_CPU_KVCACHE_SPACE": str(max(1, math.ceil(wanted.cache_bytes / (1 << 30))))}
    if wanted.cores:  # else it wants a NUMA node for each
        environment["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(",".join(map(str, part)) for part in wanted.cores)
    if wanted.settings.key is not None:
        environment["VLLM_API_KEY"] = wanted.settings.key.decode()
    return arguments, environment


def _sglang(wanted: Launch) -> tuple[list[str], dict[str, str]]:
    """Arguments of SGLang 0.5 and later. Raises UsageError for a key: SGLang takes one where others can read it."""
    if wanted.settings.key is not None:
        raise UsageError(
            "SGLang takes a key from its command line alone, where other users can read it",
            "serve it without a key to this machine alone, behind a proxy that asks for one, or use --engine vllm",
        )
    if wanted.settings.origins:
        raise UsageError("SGLang cannot be told which pages may use it", "omit --cors, or use --engine vllm")
    arguments = ["serve", "--model-path", str(wanted.folder), "--host", wanted.host, "--port", str(wanted.port)]
    arguments += ["--served-model-name", wanted.settings.names[0]]
    arguments += ["--context-length", str(wanted.context), "--max-running-requests", str(wanted.together)]
    arguments += ["--tp-size", str(wanted.ranks), "--dtype", wanted.dtype, "--kv-cache-dtype", wanted.kv]
    if wanted.share is not None:
        arguments += ["--mem-fraction-static", f"{wanted.share:.2f}"]
    return arguments, {}


@dataclass(frozen=True)
class OtherEngine:
    """A maker's server: its executable, the package that brings it, and how it is called."""

    title: str
    executable: str
    package: str
    call: Callable[[Launch], tuple[list[str], dict[str, str]]]

    def find(self) -> str:
        """Its executable: on PATH, or beside this Python. Raises ResourceError where it is not installed."""
        beside = str(Path(sys.executable).parent)
        found = shutil.which(self.executable) or shutil.which(self.executable, path=beside)
        if found is None:
            raise ResourceError(
                f"{self.title} is not installed: there is no {self.executable} on PATH",
                f"install it in an environment of its own (pip install {self.package}) and put its bin folder on PATH",
            )
        return found


_ENGINES: Mapping[str, OtherEngine] = {
    "vllm": OtherEngine("vLLM", "vllm", "vllm", _vllm),
    "sglang": OtherEngine("SGLang", "sglang", "sglang", _sglang),
}


def beyond_one_gpu(model: str, plan: MemoryPlan, free: int) -> tuple[int, str] | None:
    """(GPUs, command) to serve what `plan` says on GPUs with `free` bytes each, as few as do; None where none do."""
    for ranks in RANKS:
        if rank_bytes(plan, ranks) <= free and not obstacles(plan.config, plan.packings, ranks):
            words = ["mycli", "serve", model, "--engine", "vllm", "--tensor-parallel-size", str(ranks)]
            return ranks, shlex.join([*words, "--ctx", str(plan.context)])
    return None


def start(
    call: Call,
    engine: OtherEngine,
    model: str,
    asked: EngineConfig,
    settings: ServerSettings,
    host: str,
    port: int,
    ranks: int,
) -> None:
    """Become the other engine's server of MODEL; returns to nobody.

    Raises UsageError for what it does not do, ModelError for a model that it cannot split, ResourceError where it is
    not installed or the GPUs are not there.
    """
    executable = engine.find()
    source = resolve(model, offline=call.offline)
    folder = open_model_folder(source.folder)
    if not source.folder.is_dir():
        raise ModelError(f"{model}: {engine.title} takes folders of safetensors, not a GGUF file", "name its original")
    found = [] if asked.device == "cpu" else gpus()
    if found and len(found) < ranks:
        raise ResourceError(f"{ranks} GPUs were asked for, {len(found)} are here", "ask for fewer")
    if asked.kv not in ("auto", "bf16"):
        raise UsageError(f"{engine.title} does not keep its cache in {asked.kv}", "omit --kv")
    for one in obstacles(folder.config, folder.packings, ranks):
        problem = f"{one.where}: {one.problem}"
        if asked.device != "cpu":  # the rules of kernels for GPUs
            hint = f"mycli estimate {shlex.quote(model)} --tp {ranks} shows all of it; --device cpu tries anyway"
            raise ModelError(f"{model} cannot be shared by {ranks} GPUs: {problem}", hint)
        call.out.warn(f"{engine.title} may refuse it: {problem}")
    wanted = replace(_wanted(folder, asked, settings, found[:ranks], ranks), host=host, port=port)
    arguments, environment = engine.call(wanted)
    command = [executable, *arguments]
    if call.out.json_mode:
        call.out.json_record({"engine": engine.executable, "command": command, "environment": sorted(environment)})
    else:
        call.out.note(shlex.join(command))
    call.out.flush()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_DFL)
    os.execve(executable, command, {**environment, **os.environ, **_key(environment)})


def _key(environment: Mapping[str, str]) -> dict[str, str]:
    """What is ours to say, whatever the environment says already."""
    return {name: value for name, value in environment.items() if name.endswith("_KEY")}


def _wanted(folder: ModelFolder, asked: EngineConfig, settings: ServerSettings, found: list[Gpu], ranks: int) -> Launch:
    """What follows from the estimate: the context that fits, and the share of memory that is free."""
    plan = MemoryPlan(
        folder.config,
        folder.packings,
        context=asked.context or folder.config.max_context,
        batch=asked.sequences,
        dtype=asked.dtype,
        gpu=bool(found),
        kv=asked.kv,
    )
    share: float | None = None
    cores: tuple[tuple[int, ...], ...] = ()
    if found:
        share = min(_MOST_MEMORY, min(int(gpu.free / gpu.total * 100) - 1 for gpu in found) / 100)
        free = min(int(gpu.total * share) for gpu in found)
        while asked.context is None and plan.context > SHORTEST_CONTEXT and rank_bytes(plan, ranks) > free:
            plan = replace(plan, context=plan.context // 2)
        if (needed := rank_bytes(replace(plan, batch=1), ranks)) > free:
            raise ResourceError(
                f"each of {ranks} GPUs would hold {human_bytes(needed)}, {human_bytes(free)} are free", code="more-gpus"
            )
    else:
        cores = _parted(_cores(), ranks) if _memory_nodes() < ranks else ()
        if asked.context is None:
            plan = replace(plan, context=min(plan.context, DEFAULT_CONTEXT))
    return Launch(
        folder.path,
        settings,
        plan.context,
        asked.running or asked.sequences,
        ranks,
        asked.dtype or "auto",
        "bfloat16" if asked.kv == "bf16" else "auto",
        share,
        estimate(plan).cache,
        cores,
    )


def _cores() -> list[int]:
    """The numbers of the cores that this process may use, none where they are not told."""
    return sorted(os.sched_getaffinity(0)) if sys.platform == "linux" else []


def _memory_nodes() -> int:
    """NUMA nodes of this machine, 1 where it does not tell."""
    return len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))) or 1


def _parted(cores: list[int], parts: int) -> tuple[tuple[int, ...], ...]:
    """`cores` in so many parts that lie together and differ by one at most; () where some would have none."""
    if len(cores) < parts:
        return ()
    bounds = [len(cores) * part // parts for part in range(parts + 1)]
    return tuple(tuple(cores[begin:end]) for begin, end in pairwise(bounds))
