"""Names of our options in other programs: those with the same meaning are accepted, the others have a hint."""

from collections.abc import Callable, Collection
from typing import Any

from mycli.runtime.errors import UsageError

# Options of llama.cpp, mlx-lm, vLLM and SGLang that take the same value -> ours.
EQUIVALENT_OPTIONS = {
    "--adapter-path": "--adapter",
    "--chat-template-file": "--chat-template",
    "--context-length": "--ctx",
    "--ctx-size": "--ctx",
    "--draft-model": "--draft",
    "--json-schema": "--schema",
    "--lora": "--adapter",
    "--max-model-len": "--ctx",
    "--max-new-tokens": "--max-tokens",
    "--max-num-seqs": "--max-sequences",
    "--model-draft": "--draft",
    "--n-predict": "--max-tokens",
    "--parallel": "--max-sequences",
    "--predict": "--max-tokens",
    "--repeat-penalty": "--repetition-penalty",
    "--served-model-name": "--alias",
    "--system-prompt": "--system",
    "--temp": "--temperature",
}
_PROMPT = "the prompt is an argument, not an option: mycli run MODEL PROMPT"
_MODEL = "the model is an argument, not an option: {usage}"
_WHOLE = "omit it: a model runs on the GPU completely or not at all; --device cuda or cpu chooses"
_ATTENTION = "omit it: no option chooses the attention kernel"
_CACHE = "--kv bf16, int8 or int4"
_KEY = "mycli serve MODEL --api-key-file FILE, or the environment variable MYCLI_API_KEY"
_ENGINE = "mycli serve MODEL --engine vllm --tensor-parallel-size N"
# Other options of these programs -> what to type here; `{usage}` is the command with its arguments.
FOREIGN_OPTIONS = {
    "--api-key": _KEY,
    "--cache-type-k": _CACHE,
    "--cache-type-v": _CACHE,
    "--flash-attn": _ATTENTION,
    "--gpu-layers": _WHOLE,
    "--gpu-memory-utilization": "--ctx N: the length of the context decides the memory of the KV cache",
    "--hf-repo": _MODEL,
    "--interactive": "mycli chat MODEL",
    "--kv-bits": _CACHE,
    "--kv-cache-dtype": _CACHE,
    "--model": _MODEL,
    "--n-gpu-layers": _WHOLE,
    "--prompt": _PROMPT,
    "-V": "mycli --version",
    "-cnv": "mycli chat MODEL",
    "-ctk": _CACHE,
    "-ctv": _CACHE,
    "-fa": _ATTENTION,
    "-hf": _MODEL,
    "-i": "mycli chat MODEL",
    "-m": _MODEL,
    "-md": "--draft MODEL",
    "-ngl": _WHOLE,
    "-np": "mycli serve MODEL --max-sequences N",
    "-p": _PROMPT,
    "-s": "--seed N",
    "-sys": "--system TEXT",
    "-t": "--threads N",
    "-tp": _ENGINE,
}


def usage_line(command: Any, name: str) -> str:
    """Return a command with its arguments: `mycli run MODEL PROMPT`."""
    arguments = (parameter.metavar for parameter in command.params if parameter.param_type_name == "argument")
    return " ".join(("mycli", name, *arguments))


def spelling_rule(known: Collection[str], usage: str) -> Callable[[str], str]:
    """Return the function with which the parser of a command with the options `known` normalizes their names.

    It takes names without hyphens, and raises UsageError for those such as -ngl: the parser reads this as `-n gl`.
    """

    def normalize(name: str) -> str:
        if f"--{name}" in known:
            return name
        ours = EQUIVALENT_OPTIONS.get(f"--{name}")
        if ours is not None and ours in known:
            return ours.lstrip("-")
        if len(name) > 1 and f"-{name}" in FOREIGN_OPTIONS:
            raise UsageError(f"no such option: -{name}", FOREIGN_OPTIONS[f"-{name}"].format(usage=usage))
        return name

    return normalize
