"""`mycli serve --engine`: starts vLLM or SGLang on the same model folder, for models too large for one GPU.

The process is replaced by the other server, so signals and the exit code are that server's.
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

from mycli.cli.command import Call
from mycli.cli.flags import options
from mycli.cli.flags.address import AddressFlags
from mycli.runtime.checkpoint.model_folder import ModelFolder
from mycli.runtime.device.nvml import Gpu, gpus
from mycli.runtime.diagnostics.vllm_tp import obstacles
from mycli.runtime.engine.config import EngineConfig
from mycli.runtime.errors import ModelError, ResourceError, UsageError
from mycli.runtime.hub.resolve import resolve
from mycli.runtime.memory.estimate import estimate, rank_bytes
from mycli.runtime.memory.fit import SHORTEST_CONTEXT
from mycli.runtime.memory.plan import DEFAULT_CONTEXT, MemoryPlan
from mycli.runtime.server.http.settings import ServerSettings
from mycli.runtime.utils.units import human_bytes, pluralize

OWN = "mycli"
RANKS = (2, 4, 8)  # usual numbers of GPUs in one machine
_MAX_MEMORY_SHARE = 0.92  # of a GPU: the default of vLLM


@dataclass(frozen=True)
class EngineFlags:
    """The server program and its number of GPUs, as typed."""

    engine: Annotated[
        str,
        options.words(
            "--engine",
            ("mycli", "vllm", "sglang"),
            "Start the server of vLLM or SGLang on the same model instead; these can split it over GPUs.",
        ),
    ] = OWN
    ranks: Annotated[
        int, options.option("--tensor-parallel-size", "N", "With --engine: number of GPUs.", min=1, max=1024)
    ] = 1

    def resolve(self) -> "OtherEngine | None":
        """Return the other engine, None for mycli's own server. Raises UsageError for an unknown name."""
        name = options.choice("--engine", self.engine, (OWN, *_ENGINES))
        if name != OWN:
            return _ENGINES[name]
        if self.ranks > 1:
            raise UsageError(
                "--tensor-parallel-size is not supported by mycli's own server",
                "add --engine vllm or --engine sglang",
            )
        return None


@dataclass(frozen=True)
class Launch:
    """Settings for the other server; `share`: share of each GPU's memory, None for its default."""

    folder: Path
    settings: ServerSettings
    context: int
    sequences: int
    ranks: int
    dtype: str  # bfloat16, float16, float32, auto
    kv: str  # bfloat16, auto
    share: float | None
    cache_bytes: int
    cores: tuple[tuple[int, ...], ...] = ()  # CPU cores for each rank; () leaves the choice to the engine
    host: str = "127.0.0.1"
    port: int = 8080


def _vllm(launch: Launch) -> tuple[list[str], dict[str, str]]:
    # vLLM 0.11 and later.
    arguments = ["serve", str(launch.folder), "--host", launch.host, "--port", str(launch.port)]
    arguments += ["--served-model-name", *launch.settings.names]
    arguments += ["--max-model-len", str(launch.context), "--max-num-seqs", str(launch.sequences)]
    arguments += ["--tensor-parallel-size", str(launch.ranks), "--dtype", launch.dtype]
    arguments += ["--kv-cache-dtype", launch.kv]
    if launch.share is not None:
        arguments += ["--gpu-memory-utilization", f"{launch.share:.2f}"]
    arguments += ["--allowed-origins", json.dumps(list(launch.settings.origins))]  # its default allows every origin
    environment = {"VLLM_CPU_KVCACHE_SPACE": str(max(1, math.ceil(launch.cache_bytes / (1 << 30))))}
    if launch.cores:  # its default needs a NUMA node per rank
        environment["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(",".join(map(str, part)) for part in launch.cores)
    if launch.settings.key is not None:
        environment["VLLM_API_KEY"] = launch.settings.key.decode()
    return arguments, environment


def _sglang(launch: Launch) -> tuple[list[str], dict[str, str]]:
    # SGLang 0.5 and later.
    if launch.settings.key is not None:
        raise UsageError(
            "SGLang takes an API key only on its command line, where other users can read it",
            "serve without a key behind a proxy that requires one, or use --engine vllm",
        )
    if launch.settings.origins:
        raise UsageError("--cors is not supported by SGLang", "omit --cors, or use --engine vllm")
    arguments = ["serve", "--model-path", str(launch.folder), "--host", launch.host, "--port", str(launch.port)]
    arguments += ["--served-model-name", launch.settings.names[0]]
    arguments += ["--context-length", str(launch.context), "--max-running-requests", str(launch.sequences)]
    arguments += ["--tp-size", str(launch.ranks), "--dtype", launch.dtype, "--kv-cache-dtype", launch.kv]
    if launch.share is not None:
        arguments += ["--mem-fraction-static", f"{launch.share:.2f}"]
    return arguments, {}


@dataclass(frozen=True)
class OtherEngine:
    """Another server program: its executable, its package, and how it is called."""

    title: str
    executable: str
    package: str
    call: Callable[[Launch], tuple[list[str], dict[str, str]]]

    def find(self) -> str:
        """Return its executable, on PATH or next to this Python. Raises ResourceError if it is not installed."""
        folder = str(Path(sys.executable).parent)
        path = shutil.which(self.executable) or shutil.which(self.executable, path=folder)
        if path is None:
            raise ResourceError(
                f"{self.title} is not installed: no {self.executable} on PATH",
                f"install it in a separate environment (pip install {self.package}) and add its bin folder to PATH",
            )
        return path


_ENGINES: Mapping[str, OtherEngine] = {
    "vllm": OtherEngine("vLLM", "vllm", "vllm", _vllm),
    "sglang": OtherEngine("SGLang", "sglang", "sglang", _sglang),
}


def command_for_more_gpus(model: str, plan: MemoryPlan, free: int) -> tuple[int, str] | None:
    """Return the smallest number of GPUs with `free` bytes each that hold `plan`, and the command; None if too few."""
    for ranks in RANKS:
        if rank_bytes(plan, ranks) <= free and not obstacles(plan.config, plan.packings, ranks):
            words = ["mycli", "serve", model, "--engine", "vllm", "--tensor-parallel-size", str(ranks)]
            return ranks, shlex.join([*words, "--ctx", str(plan.context)])
    return None


def start(
    call: Call,
    engine: OtherEngine,
    model: str,
    config: EngineConfig,
    settings: ServerSettings,
    address: AddressFlags,
    ranks: int,
) -> None:
    """Replace this process by the other server; does not return.

    Raises UsageError for unsupported options, ModelError for a model that cannot be split, ResourceError if the server
    is not installed or GPUs are missing.
    """
    executable = engine.find()
    source = resolve(model, offline=call.offline)
    folder = source.open()
    if not source.folder.is_dir():
        raise ModelError(f"{model}: {engine.title} needs safetensors, not a GGUF file", "name the original model")
    visible = [] if config.device == "cpu" else gpus()
    if visible and len(visible) < ranks:
        message = f"--tensor-parallel-size {ranks}: this machine has {pluralize(len(visible), 'GPU')}"
        raise ResourceError(message, f"use --tensor-parallel-size {len(visible)}")
    if config.kv not in ("auto", "bf16"):
        raise UsageError(f"--kv {config.kv} is not supported by {engine.title}", "omit --kv")
    if config.activations != "auto":
        message = f"--activations {config.activations} is not supported by {engine.title}"
        raise UsageError(message, "omit --activations")
    for obstacle in obstacles(folder.config, folder.packings, ranks):
        problem = f"{obstacle.where}: {obstacle.problem}"
        if config.device != "cpu":  # these are limits of GPU kernels
            hint = f"mycli estimate {shlex.quote(model)} --tp {ranks} lists all reasons; --device cpu tries anyway"
            raise ModelError(f"{model} cannot be split over {ranks} GPUs: {problem}", hint)
        call.out.warn(f"{engine.title} may refuse it: {problem}")
    launch = replace(_plan(folder, config, settings, visible[:ranks], ranks), host=address.host, port=address.port)
    arguments, environment = engine.call(launch)
    command = [executable, *arguments]
    if call.out.json_mode:
        call.out.json_record({"engine": engine.executable, "command": command, "environment": sorted(environment)})
    else:
        call.out.note(shlex.join(command))
    call.out.flush()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_DFL)
    keys = {name: value for name, value in environment.items() if name.endswith("_KEY")}  # over the user's environment
    os.execve(executable, command, {**environment, **os.environ, **keys})


def _plan(
    folder: ModelFolder, config: EngineConfig, settings: ServerSettings, visible: list[Gpu], ranks: int
) -> Launch:
    # The context that fits and the share of GPU memory that is free, by our own estimate.
    plan = MemoryPlan(
        folder.config,
        folder.packings,
        context=config.context or folder.config.max_context,
        batch=config.sequences,
        dtype=config.dtype,
        gpu=bool(visible),
        kv=config.kv,
    )
    share: float | None = None
    cores: tuple[tuple[int, ...], ...] = ()
    if visible:
        share = min(_MAX_MEMORY_SHARE, min(int(gpu.free / gpu.total * 100) - 1 for gpu in visible) / 100)
        free = min(int(gpu.total * share) for gpu in visible)
        while config.context is None and plan.context > SHORTEST_CONTEXT and rank_bytes(plan, ranks) > free:
            plan = replace(plan, context=plan.context // 2)
        if (needed := rank_bytes(replace(plan, batch=1), ranks)) > free:
            raise ResourceError(
                f"each of {ranks} GPUs needs {human_bytes(needed)}, but {human_bytes(free)} are free", code="more-gpus"
            )
    else:
        cores = _split(_cores(), ranks) if _numa_nodes() < ranks else ()
        if config.context is None:
            plan = replace(plan, context=min(plan.context, DEFAULT_CONTEXT))
    return Launch(
        folder.path,
        settings,
        plan.context,
        config.running or config.sequences,
        ranks,
        config.dtype or "auto",
        "bfloat16" if config.kv == "bf16" else "auto",
        share,
        estimate(plan).cache,
        cores,
    )


def _cores() -> list[int]:
    return sorted(os.sched_getaffinity(0)) if sys.platform == "linux" else []


def _numa_nodes() -> int:
    return len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))) or 1


def _split(cores: list[int], parts: int) -> tuple[tuple[int, ...], ...]:
    # Neighbouring cores share caches, so each part is contiguous.
    if len(cores) < parts:
        return ()
    bounds = [len(cores) * part // parts for part in range(parts + 1)]
    return tuple(tuple(cores[begin:end]) for begin, end in pairwise(bounds))
