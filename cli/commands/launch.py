"""`mycli launch`: starts a coding agent on a served model."""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from mycli.cli.command import Call, command
from mycli.cli.flags import options
from mycli.cli.flags.options import KEY_VARIABLE
from mycli.cli.serving.local_server import started_server
from mycli.runtime.errors import NotFoundError, UsageError
from mycli.runtime.hub.store import state_dir
from mycli.runtime.server.http.run_file import running_servers

EXAMPLES = (
    "mycli launch codex --model pico  # needs the program",
    "mycli launch claude --print  # needs the program, and a running server",
)


@dataclass(frozen=True)
class Setup:
    """The arguments and environment variables that make an agent use a server."""

    arguments: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Agent:
    """A program: its command, and how it is installed."""

    command: str
    install: str


_STOPS = {signal.SIGTERM, signal.SIGHUP}
AGENTS: Mapping[str, Agent] = {
    "codex": Agent("codex", "npm install -g @openai/codex"),
    "claude": Agent("claude", "npm install -g @anthropic-ai/claude-code"),
    "opencode": Agent("opencode", "npm install -g opencode-ai"),
    "aider": Agent("aider", "python -m pip install aider-chat"),
}


def agent_setup(name: str, url: str, model: str, key: str) -> Setup:
    """Return how the agent `name` reaches `model` at `url` with `key`."""
    if name == "codex":
        provider = {"name": "mycli", "base_url": f"{url}/v1", "wire_api": "responses", "env_key": KEY_VARIABLE}
        words = [f"model_providers.mycli.{field}={json.dumps(value)}" for field, value in provider.items()]
        words += ['model_provider="mycli"', f"model={json.dumps(model)}"]
        return Setup([part for word in words for part in ("-c", word)], {KEY_VARIABLE: key})
    if name == "claude":
        models = ("ANTHROPIC_MODEL", "ANTHROPIC_SMALL_FAST_MODEL", "ANTHROPIC_DEFAULT_HAIKU_MODEL")
        environment = {"ANTHROPIC_BASE_URL": url, "ANTHROPIC_AUTH_TOKEN": key, **dict.fromkeys(models, model)}
        return Setup((), {**environment, "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1"})
    if name == "opencode":
        settings: dict[str, Any] = {
            "npm": "@ai-sdk/openai-compatible",
            "name": "mycli",
            "options": {"baseURL": f"{url}/v1", "apiKey": key},
            "models": {model: {"name": model}},
        }
        config = {"provider": {"mycli": settings}, "model": f"mycli/{model}", "small_model": f"mycli/{model}"}
        # The program merges this with the user's own settings, which are not touched.
        return Setup((), {"OPENCODE_CONFIG_CONTENT": json.dumps(config)})
    environment = {"OPENAI_API_BASE": f"{url}/v1", "OPENAI_API_KEY": key}
    return Setup(("--model", f"openai/{model}", "--no-show-model-warnings"), environment)


@command
def launch(
    call: Call,
    agent: Annotated[str, options.argument("AGENT", "codex, claude, opencode or aider.")],
    arguments: Annotated[list[str] | None, options.argument("ARGUMENT", "Arguments of the agent, after --.")] = None,
    *,
    model: Annotated[
        str | None,
        options.option(
            "--model", "MODEL", "A model of a running server, or one to serve meanwhile.", show_default="the one served"
        ),
    ] = None,
    context: options.Context = None,
    print_only: Annotated[bool, options.flag("--print", "Print environment and command; do not start it.")] = False,
) -> None:
    """Start a coding agent on a served model.

    Uses the server that runs (mycli ps), and otherwise serves MODEL until the agent ends. The agent gets the address,
    the model and the key through its environment and arguments; its settings are not changed. Ends with the agent's
    exit code.
    """
    if agent not in AGENTS:
        raise UsageError(f"unknown agent {agent!r:.60}", f"one of: {', '.join(AGENTS)}")
    program = shutil.which(AGENTS[agent].command)
    if program is None:
        raise NotFoundError(f"{agent} is not installed", f"install it: {AGENTS[agent].install}")
    with _server(call, model, context) as (url, served):
        setup = agent_setup(agent, url, served, os.environ.get(KEY_VARIABLE, "").strip() or "any")
        line = [program, *setup.arguments, *(arguments or ())]
        if print_only:
            answer = {"url": url, "model": served, "environment": dict(setup.environment), "command": line}
            if not call.out.answered(answer):
                values = [f"{name}={shlex.quote(value)}" for name, value in setup.environment.items()]
                call.out.result(" ".join([*values, shlex.join(line)]))
            return
        call.out.note(f"{agent} on {served} at {url}")
        # Ctrl-C reaches both processes of the terminal, but agents use it to cancel a reply: only the agent handles it.
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_BLOCK, _STOPS)  # until `child` can be ended
        try:
            child = subprocess.Popen(line, env={**os.environ, **setup.environment}, preexec_fn=_default_signals)
            try:
                signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOPS)
                code = child.wait()
            except BaseException:  # SIGTERM, which only this process has received: no agent outlives its server
                child.terminate()
                raise
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOPS)
            signal.signal(signal.SIGINT, before)
    sys.exit(code if code >= 0 else 128 - code)


def _default_signals() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOPS)


@contextmanager
def _server(call: Call, model: str | None, context: int | None) -> Iterator[tuple[str, str]]:
    # Yield the address and the model's name of a running server, or of one that runs inside this context.
    running = [server for server in running_servers(state_dir() / "servers") if not server.url.startswith("unix:")]
    matching = [server for server in running if model is None or Path(model).name in server.names]
    if matching:
        yield matching[-1].url, Path(model).name if model is not None else matching[-1].model
        return
    if model is None:
        raise NotFoundError(
            "no server is running", "name a model to serve: --model MODEL; or start one: mycli serve MODEL"
        )
    call.out.note(f"serving {model}")
    flags = [] if context is None else ["--ctx", str(context)]
    with started_server(call, model, *flags, quiet=True) as served:  # agents draw on the whole screen
        yield str(served["url"]), str(served.get("model", Path(model).name))
