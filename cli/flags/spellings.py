"""Names of our options in other programs: those with the same meaning are accepted, the others have a hint."""

from collections.abc import Callable, Collection
from typing import Any

from mycli.runtime.errors import UsageError

# Options of llama.cpp, mlx-lm, vLLM and SGLang, and parameters of Ollama, that take the same value -> ours.
EQUIVALENT_OPTIONS = {
    "--adapter-path": "--adapter",
    "--chat-template-file": "--chat-template",
    "--context-length": "--ctx",
    "--ctx-size": "--ctx",
    "--draft-model": "--draft",
    "--group-size": "--group",
    "--json-schema": "--schema",
    "--lora": "--adapter",
    "--max-model-len": "--ctx",
    "--max-new-tokens": "--max-tokens",
    "--max-num-seqs": "--max-sequences",
    "--mlx-path": "--output",
    "--model-draft": "--draft",
    "--n-predict": "--max-tokens",
    "--num-beams": "--beams",
    "--num-ctx": "--ctx",
    "--num-predict": "--max-tokens",
    "--num-return-sequences": "--samples",
    "--num-thread": "--threads",
    "--outfile": "--output",
    "--parallel": "--max-sequences",
    "--predict": "--max-tokens",
    "--q-bits": "--bits",
    "--q-group-size": "--group",
    "--repeat-penalty": "--repetition-penalty",
    "--served-model-name": "--alias",
    "--system-prompt": "--system",
    "--temp": "--temperature",
}
_PROMPT = "the prompt is an argument, not an option: mycli run MODEL PROMPT"
_MODEL = "the model is an argument, not an option: {usage}"
_FILE = "omit it and name the file: mycli pull org/name:file.gguf"
_STORE = "omit it: models are stored in the Hugging Face cache; HF_HUB_CACHE names another folder"
_WHOLE = "omit it: a model runs on the GPU completely or not at all; --device cuda or cpu chooses"
_ATTENTION = "omit it: no option chooses the attention kernel"
_CACHE = "--kv bf16, int8 or int4"
_KEY = "mycli serve MODEL --api-key-file FILE, or the environment variable MYCLI_API_KEY"
_ALWAYS = "omit it: this is always on"
_TEMPLATE = "omit it: the chat template decides how tool calls and reasoning are read"
_STDOUT = "omit it: standard output has only the reply"
_PASSES = "omit it: no option sets how many tokens of a prompt one pass computes"
_MEMORY = "omit it: no option chooses how weights are kept in memory"
_TLS = "omit it: a reverse proxy, such as nginx, adds TLS"
_GRAMMAR = "--schema FILE or --regex RE: grammars in GBNF are not read"
_GPU = "--device cuda:N"
_ENGINE = "mycli serve MODEL --engine vllm --tensor-parallel-size N"
_DRAFT = "--draft MODEL: its number of tokens to draft is chosen while it runs"
_SAMPLER = "--top-p X or --min-p X: this way of sampling is not implemented"
_PENALTIES = "omit it: penalties count all tokens, not only the last ones"
_LINES = "omit it: the shell writes line breaks, as in $'first\\nsecond'"
_COLOR = "omit it: only a terminal gets colour; NO_COLOR=1 switches it off"
_SHIFT = "mycli chat MODEL --overflow drop-oldest"
_PREFIXES = "--prefix-cache-dir DIR"
_ONE = "mycli run MODEL PROMPT"
_SYSTEM_FILE = '--system "$(cat FILE)"'
_ROPE = "omit it: the config.json of the model decides the rotary embedding"
_TOKEN = "omit it: the environment variable HF_TOKEN holds the token"
_LORA = "--adapter PATH"
_LOG = "-v"
# Other options of these programs -> what to type here; `{usage}` is the command with its arguments.
FOREIGN_OPTIONS = {
    "--allowed-origins": "mycli serve MODEL --cors ORIGIN",
    "--api-key": _KEY,
    "--batch-size": _PASSES,
    "--cache-reuse": _ALWAYS,
    "--cache-type-k": _CACHE,
    "--cache-type-v": _CACHE,
    "--chat-template-kwargs": "--template-arg NAME=VALUE",
    "--color": _COLOR,
    "--cont-batching": _ALWAYS,
    "--context-shift": _SHIFT,
    "--cpu-moe": _WHOLE,
    "--cpu-offload-gb": _WHOLE,
    "--device-map": _WHOLE,
    "--disable-log-requests": "omit it: only -v logs requests",
    "--do-sample": "--temperature X",
    "--download-dir": _STORE,
    "--draft-max": _DRAFT,
    "--draft-n": _DRAFT,
    "--dry-multiplier": _SAMPLER,
    "--enable-auto-tool-choice": _TEMPLATE,
    "--enable-chunked-prefill": _ALWAYS,
    "--enable-lora": _LORA,
    "--enable-prefix-caching": _ALWAYS,
    "--enforce-eager": "omit it: no option chooses how the model runs; mycli doctor MODEL shows it",
    "--escape": _LINES,
    "--flash-attn": _ATTENTION,
    "--format": "--json-mode, or --schema FILE",
    "--gpu-layers": _WHOLE,
    "--gpu-memory-utilization": "--ctx N: the length of the context decides the memory of the KV cache",
    "--grammar": _GRAMMAR,
    "--grammar-file": _GRAMMAR,
    "--greedy": "--temperature 0",
    "--hf-file": _FILE,
    "--hf-path": _MODEL,
    "--hf-repo": _MODEL,
    "--hf-token": _TOKEN,
    "--ignore-chat-template": "mycli run MODEL PROMPT --raw",
    "--ignore-eos": "mycli bench MODEL -n N: replies of N tokens",
    "--imatrix": "mycli quantize MODEL --calib FILE; the importance is measured on its text",
    "--include": _FILE,
    "--interactive": "mycli chat MODEL",
    "--jinja": "omit it: the chat template of the model is always used",
    "--json-schema-file": "--schema FILE",
    "--keep": _SHIFT,
    "--keepalive": "mycli serve MODEL --idle TIME",
    "--kl-divergence": "mycli eval MODEL --ref MODEL",
    "--kv-bits": _CACHE,
    "--kv-cache-dtype": _CACHE,
    "--load-in-4bit": "mycli quantize MODEL --bits 4",
    "--load-in-8bit": "mycli quantize MODEL --bits 8",
    "--local-dir": _STORE,
    "--log-disable": _STDOUT,
    "--log-level": _LOG,
    "--log-verbosity": _LOG,
    "--lora-modules": _LORA,
    "--lora-scaled": _LORA,
    "--main-gpu": _GPU,
    "--max-kv-size": "--ctx N",
    "--max-num-batched-tokens": _PASSES,
    "--metrics": "omit it: GET /metrics is always served",
    "--mirostat": _SAMPLER,
    "--mlock": _MEMORY,
    "--model": _MODEL,
    "--n-cpu-moe": _WHOLE,
    "--n-gpu-layers": _WHOLE,
    "--n-probs": "--logprobs N --json",
    "--no-color": _COLOR,
    "--no-context-shift": _SHIFT,
    "--no-conversation": _ONE,
    "--no-display-prompt": _STDOUT,
    "--no-kv-offload": _WHOLE,
    "--no-mmap": _MEMORY,
    "--num-draft-tokens": _DRAFT,
    "--num-gpu": _WHOLE,
    "--num-speculative-tokens": _DRAFT,
    "--outtype": "mycli export MODEL --to gguf:TYPE",
    "--override-tensor": _WHOLE,
    "--prompt": _PROMPT,
    "--prompt-cache": _PREFIXES,
    "--prompt-cache-file": _PREFIXES,
    "--quantization": "omit it: the files of the model name their format",
    "--reasoning-format": _TEMPLATE,
    "--reasoning-parser": _TEMPLATE,
    "--repeat-last-n": _PENALTIES,
    "--repetition-context-size": _PENALTIES,
    "--reverse-prompt": "--stop TEXT",
    "--rope-freq-base": _ROPE,
    "--rope-freq-scale": _ROPE,
    "--rope-scaling": _ROPE,
    "--samplers": _SAMPLER,
    "--single-turn": _ONE,
    "--speculative-config": _DRAFT,
    "--split-mode": _ENGINE,
    "--ssl-cert-file": _TLS,
    "--ssl-certfile": _TLS,
    "--ssl-key-file": _TLS,
    "--ssl-keyfile": _TLS,
    "--system-prompt-file": _SYSTEM_FILE,
    "--tensor-split": _ENGINE,
    "--think": "mycli chat MODEL --think on; or --template-arg enable_thinking=true",
    "--threads-batch": "--threads N",
    "--tokenizer": "omit it: the tokenizer is that of the model",
    "--tool-call-parser": _TEMPLATE,
    "--trust-remote-code": "omit it: no code from a model folder is run",
    "--typical": _SAMPLER,
    "--ubatch-size": _PASSES,
    "--verbosity": _LOG,
    "--xtc-probability": _SAMPLER,
    "-V": "mycli --version",
    "-b": _PASSES,
    "-cmoe": _WHOLE,
    "-cnv": "mycli chat MODEL",
    "-ctk": _CACHE,
    "-ctv": _CACHE,
    "-e": _LINES,
    "-fa": _ATTENTION,
    "-hf": _MODEL,
    "-hff": _FILE,
    "-hft": _TOKEN,
    "-i": "mycli chat MODEL",
    "-jf": "--schema FILE",
    "-lv": _LOG,
    "-m": _MODEL,
    "-md": "--draft MODEL",
    "-mg": _GPU,
    "-ncmoe": _WHOLE,
    "-ngl": _WHOLE,
    "-nkvo": _WHOLE,
    "-no-cnv": _ONE,
    "-np": "mycli serve MODEL --max-sequences N",
    "-ot": _WHOLE,
    "-p": _PROMPT,
    "-pg": "mycli bench MODEL -d N -n N: replies after a prompt of N tokens",
    "-r": "--stop TEXT",
    "-s": "--seed N",
    "-sm": _ENGINE,
    "-st": _ONE,
    "-sys": "--system TEXT",
    "-sysf": _SYSTEM_FILE,
    "-t": "--threads N",
    "-tb": "--threads N",
    "-tp": _ENGINE,
    "-ts": _ENGINE,
    "-ub": _PASSES,
}


def usage_line(command: Any, name: str) -> str:
    """Return a command with its arguments: `mycli run MODEL PROMPT`."""
    arguments = (parameter.metavar for parameter in command.params if parameter.param_type_name == "argument")
    return " ".join(("mycli", name, *arguments))


def argument_usage(argument: Any) -> str:
    """Return an argument as a usage line shows it: MODEL, MODEL... for several, [MODEL] if it may be omitted."""
    name = argument.metavar if argument.nargs == 1 else f"{argument.metavar}..."
    return name if argument.required else f"[{name}]"


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
