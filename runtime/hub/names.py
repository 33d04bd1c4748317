"""Model names: `org/repo[@revision][:file.gguf]`, addresses of the hub, paths, and names of other programs."""

import re
import shlex
from collections.abc import Iterable
from urllib.parse import unquote

from mycli.runtime.errors import NotFoundError, UsageError

GGUF = ".gguf"
DATASETS = "datasets/"  # prefix of a dataset's `org/name`, in URLs too; models have none
# Names are checked before they become part of a path or a URL: no `..`, NUL, newline, backslash or leading dot.
REPO = re.compile(r"[A-Za-z0-9](?:[\w.-]{0,95})/[A-Za-z0-9_](?:[\w.-]{0,95})", re.ASCII)
_REVISION = re.compile(r"[\w+-][\w./+@-]{0,199}", re.ASCII)
_NAME = re.compile(r"[\w+-][\w.+ @=-]{0,199}", re.ASCII)
_ADDRESS = re.compile(
    r"(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/(?!datasets/|spaces/)([^/?#\s]+/[^/?#\s]+)"
    r"(?:/(?:tree|resolve|blob)/([^/?#\s]+))?(?:[/?#]\S*)?|hf://([^/?#\s]+/[^/?#@\s]+)"
)
# Quants as files are named: Q4_K_M, IQ4_XS, UD-Q4_K_XL, BF16, MXFP4_MOE.
_QUANT = re.compile(
    r"(?:UD-)?(?:I?Q[1-8]_\w{1,8}|TQ[12]_0|BF16|F16|F32|MXFP4(?:_MOE)?|NVFP4)", re.IGNORECASE | re.ASCII
)
_OLLAMA = re.compile(r"(?:https?://)?(?:www\.)?ollama\.com/(?:library/)?([\w./:-]+)/?|ollama (?:run|pull) ([\w./:-]+)")
# Suggested for names of other programs, such as llama3 or qwen2.5:7b.
_WELL_KNOWN = {
    "meta-llama": "Llama-3.2-1B-Instruct Llama-3.2-3B-Instruct Llama-3.1-8B-Instruct Llama-3.3-70B-Instruct "
    "Llama-2-7b-chat-hf",
    "Qwen": "Qwen3-0.6B Qwen3-1.7B Qwen3-4B Qwen3-8B Qwen3-14B Qwen3-32B Qwen2.5-0.5B-Instruct Qwen2.5-1.5B-Instruct "
    "Qwen2.5-7B-Instruct Qwen2.5-Coder-7B-Instruct",
    "mistralai": "Mistral-7B-Instruct-v0.3",
    "microsoft": "phi-4 Phi-3-mini-4k-instruct",
    "HuggingFaceTB": "SmolLM2-135M-Instruct SmolLM2-360M-Instruct SmolLM2-1.7B-Instruct",
    "TinyLlama": "TinyLlama-1.1B-Chat-v1.0",
    "allenai": "OLMo-2-1124-7B-Instruct",
}
_MAX_SUGGESTIONS = 4


def normalize_model_name(model: str) -> str:
    """Return `org/repo[@revision][:file.gguf]` for an address of the hub, also as Ollama takes it; else `model`."""
    match = _ADDRESS.fullmatch(re.sub(r"^ollama (?:run|pull) (?=(?:hf\.co|huggingface\.co)/)", "", model.strip()))
    if match is None:
        return model
    file = re.search(r"/(?:resolve|blob)/[^/?#\s]+/([^?#\s]+\.gguf)(?:[?#]|$)", model.strip())
    name = (match[1] or match[3]) + (f"@{match[2]}" if match[2] else "") + (f":{file[1]}" if file else "")
    return unquote(name)  # a revision such as refs/pr/1 is one segment of an address: refs%2Fpr%2F1


def suggest_models(name: str) -> list[str]:
    """Return well-known repositories that `name` may mean, such as llama3, qwen2.5:7b or Phi4."""
    words = [re.sub(r"[^a-z0-9]", "", word) for word in re.split(r"[:/\s]", name.lower())]
    words = [word for word in words if word and word != "latest"]
    if not any(len(word) > 2 for word in words):
        return []
    repos = (f"{organization}/{name}" for organization, names in _WELL_KNOWN.items() for name in names.split())
    matches = [repo for repo in repos if all(word in re.sub(r"[^a-z0-9]", "", repo.lower()) for word in words)]
    return matches[:_MAX_SUGGESTIONS]


def is_path(model: str) -> bool:
    return model.startswith((".", "/", "~")) or model.endswith("/") or "\\" in model


def is_hub_name(model: str) -> bool:
    """Return whether `model` has the shape of `org/repo[@revision][:file]`; `split_name` checks the characters."""
    return not is_path(model) and re.split("[@:]", model, maxsplit=1)[0].count("/") == 1


def split_file(model: str) -> tuple[str, str | None]:
    """Split `org/repo[@revision]:[FOLDER/]NAME.gguf` into name and file; the file is None where there is none."""
    name, _, file = model.partition(":")
    named = file.endswith(GGUF) and is_hub_name(name) and ("/" not in file or safe_path(file))
    return (name, file) if named else (model, None)


def split_quant(model: str) -> tuple[str, str | None]:
    """Split `org/repo[@revision]:QUANT`, such as `:Q4_K_M`, into name and quant; None where there is none."""
    name, _, quant = model.partition(":")
    return (name, quant) if _QUANT.fullmatch(quant) and is_hub_name(name) else (model, None)


def choose_quant(names: Iterable[str], quant: str) -> str | None:
    """Return the GGUF file among `names` (whole files and first parts) that a quant such as Q4_K_M means.

    The quant must be a word of the name, or the folder of the file, in either case. Of several files the shortest name
    counts, then the first in order: `UD-Q4_K_M` has a word more than `Q4_K_M`.
    """
    word = re.compile(rf"(?:^|[-._/]){re.escape(quant)}(?=[-./]|$)", re.IGNORECASE)
    matching = [name for name in names if word.search(name.removesuffix(GGUF))]
    return min(matching, key=lambda name: (len(name), name), default=None)


def ollama_name(model: str) -> str | None:
    """Return the name in Ollama's library that an address or a command of Ollama gives; None for anything else."""
    match = _OLLAMA.fullmatch(model.strip())
    return None if match is None else match[1] or match[2]


def not_pulled_by_ollama(model: str) -> NotFoundError:
    """Return the error for an address or a command of Ollama, naming repositories that its model may be."""
    name = ollama_name(model) or model
    return NotFoundError(
        f"{model}: {name} is a name of Ollama's library, and Ollama has not pulled it on this machine",
        code="hub-candidates" if (candidates := suggest_models(name)) else "search-hub",
        data={"words": shlex.quote(re.sub(r"[:/]", " ", name)), "candidates": ", ".join(candidates)},
    )


def split_name(model: str) -> tuple[str, str | None]:
    """Split `org/repo[@revision]`. Raises UsageError for anything that could act as a path or alter a URL."""
    if ollama_name(model) is not None:
        raise not_pulled_by_ollama(model)
    model = split_file(split_quant(model)[0])[0]
    repo, _, revision = model.partition("@")
    invalid = "--" in repo or ".." in repo or repo.endswith((".git", ".", "-"))
    if not REPO.fullmatch(repo) or invalid:
        raise UsageError(f"{model}: not a model of the hub", "give it as org/name or org/name@revision")
    if "@" in model and (not _REVISION.fullmatch(revision) or ".." in revision or revision.endswith("/")):
        raise UsageError(f"{model}: {revision!r} is not a revision", "give a branch, a tag or a commit")
    return repo, revision or None


def safe_name(name: str) -> bool:
    """Return whether a file of this name may be written: a plain name in the repository's root, not a path."""
    return _NAME.fullmatch(name) is not None


def safe_path(path: str) -> bool:
    """Return whether a file of this path in a repository may be written below the repository's root."""
    return len(path) < 1024 and all(map(safe_name, path.split("/")))
