"""How a model is spelled: `org/repo[@revision][:file.gguf]`, an address of the hub, a path, or another program's name.

Reads text only; where a model of that name lies is `runtime.hub.resolve`.
"""

import re

from mycli.runtime.errors import UsageError

GGUF = ".gguf"
DATASETS = "datasets/"  # in front of `org/name`, in addresses too; models have nothing there
REPO = re.compile(r"[A-Za-z0-9](?:[\w.-]{0,95})/[A-Za-z0-9_](?:[\w.-]{0,95})", re.ASCII)
_REVISION = re.compile(r"[\w+-][\w./+@-]{0,199}", re.ASCII)
_NAME = re.compile(r"[\w+-][\w.+ @=-]{0,199}", re.ASCII)
_ADDRESS = re.compile(
    r"(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/(?!datasets/|spaces/)([^/?#\s]+/[^/?#\s]+)"
    r"(?:/(?:tree|resolve|blob)/([^/?#\s]+))?(?:[/?#]\S*)?|hf://([^/?#\s]+/[^/?#@\s]+)"
)
# Well-known models of the supported families, for names that another program would know.
_WELL_KNOWN = (
    "meta-llama/Llama-3.2-1B-Instruct",
    "meta-llama/Llama-3.2-3B-Instruct",
    "meta-llama/Llama-3.1-8B-Instruct",
    "meta-llama/Llama-3.3-70B-Instruct",
    "meta-llama/Llama-2-7b-chat-hf",
    "Qwen/Qwen3-0.6B",
    "Qwen/Qwen3-1.7B",
    "Qwen/Qwen3-4B",
    "Qwen/Qwen3-8B",
    "Qwen/Qwen3-14B",
    "Qwen/Qwen3-32B",
    "Qwen/Qwen2.5-0.5B-Instruct",
    "Qwen/Qwen2.5-1.5B-Instruct",
    "Qwen/Qwen2.5-7B-Instruct",
    "Qwen/Qwen2.5-Coder-7B-Instruct",
    "mistralai/Mistral-7B-Instruct-v0.3",
    "microsoft/phi-4",
    "microsoft/Phi-3-mini-4k-instruct",
    "HuggingFaceTB/SmolLM2-135M-Instruct",
    "HuggingFaceTB/SmolLM2-360M-Instruct",
    "HuggingFaceTB/SmolLM2-1.7B-Instruct",
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0",
    "allenai/OLMo-2-1124-7B-Instruct",
)
_CANDIDATES = 4  # at most, that a hint names


def normalize_model_name(model: str) -> str:
    """`org/repo[@revision][:file.gguf]` for an address of the hub as a browser shows it; anything else as it is."""
    match = _ADDRESS.fullmatch(model.strip())
    if match is None:
        return model
    file = re.search(r"/(?:resolve|blob)/[^/?#\s]+/([^/?#\s]+\.gguf)(?:[?#]|$)", model.strip())
    return (match[1] or match[3]) + (f"@{match[2]}" if match[2] else "") + (f":{file[1]}" if file else "")


def candidates(name: str) -> list[str]:
    """Well-known models that `name` may mean, such as llama3, qwen2.5:7b or Phi4."""
    words = [re.sub(r"[^a-z0-9]", "", word) for word in re.split(r"[:/\s]", name.lower())]
    words = [word for word in words if word and word != "latest"]
    found = [repo for repo in _WELL_KNOWN if all(word in re.sub(r"[^a-z0-9]", "", repo.lower()) for word in words)]
    return found[:_CANDIDATES] if any(len(word) > 2 for word in words) else []


def is_path(model: str) -> bool:
    """Whether `model` is spelled as a folder, not as a name."""
    return model.startswith((".", "/", "~")) or model.endswith("/") or "\\" in model


def is_hub_name(model: str) -> bool:
    """Whether `model` is spelled like `org/repo[@revision]`; `split_name` says whether it may be one."""
    return not is_path(model) and model.partition("@")[0].count("/") == 1


def split_file(model: str) -> tuple[str, str | None]:
    """`org/repo[@revision]:NAME.gguf` as the model before the colon and the file; None for a model without one."""
    name, _, file = model.partition(":")
    return (name, file) if file.endswith(GGUF) and is_hub_name(name) else (model, None)


def split_name(model: str) -> tuple[str, str | None]:
    """`org/repo[@revision]` as its parts. Raises UsageError for anything else, before it can become a path or a URL."""
    model = split_file(model)[0]
    repo, _, revision = model.partition("@")
    parts_bad = "--" in repo or ".." in repo or repo.endswith((".git", ".", "-"))
    if not REPO.fullmatch(repo) or parts_bad:
        raise UsageError(f"{model}: not a model of the hub", "give it as org/name or org/name@revision")
    if "@" in model and (not _REVISION.fullmatch(revision) or ".." in revision or revision.endswith("/")):
        raise UsageError(f"{model}: {revision!r} is not a revision", "give a branch, a tag or a commit")
    return repo, revision or None


def safe_name(name: str) -> bool:
    """Whether a file of this name may be fetched: in the repository's root, with nothing that could act as a path."""
    return _NAME.fullmatch(name) is not None
