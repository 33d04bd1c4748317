"""Describes a model for clients of Ollama: size, family, quantization, template, abilities. Imports no torch."""

import hashlib
import json
from collections import Counter
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from mycli.runtime.checkpoint.model_folder import ModelFolder
from mycli.runtime.tokenizer.parsing.reasoning_parser import find_reasoning_format

NEVER = "2318-01-01T00:00:00Z"  # about what Ollama shows for a model that is never unloaded


def utc_text(time: datetime) -> str:
    """Return a time in UTC as Ollama writes it."""
    return time.isoformat().replace("+00:00", "Z")


def utc_now() -> str:
    return utc_text(datetime.now(UTC))


def loaded_reply(model: str | None, as_message: bool, reason: str) -> dict[str, Any]:
    """Return the reply to a request that only loads or unloads a model: `reason` is "load" or "unload"."""
    fields: dict[str, Any] = {"message": {"role": "assistant", "content": ""}} if as_message else {"response": ""}
    return {"model": model, "created_at": utc_now(), **fields, "done": True, "done_reason": reason}


@dataclass(frozen=True)
class ModelCard:
    """The description of a model. modified: ISO 8601; digest: sha256 over names and sizes of the files."""

    # Not over the contents: hashing the weights of all listed models would read every byte from disk.

    nbytes: int = 0
    modified: str = "1970-01-01T00:00:00Z"
    digest: str = ""
    template: str = ""
    details: dict[str, Any] = field(default_factory=dict)
    info: dict[str, Any] = field(default_factory=dict)
    capabilities: tuple[str, ...] = ("completion",)

    def listed(self, name: str) -> dict[str, Any]:
        """Return the entry of a list of models."""
        return {
            "name": name,
            "model": name,
            "modified_at": self.modified,
            "size": self.nbytes,
            "digest": self.digest,
            "details": self.details,
        }

    def shown(self, name: str, fills_in: bool = False) -> dict[str, Any]:
        """Return the response of /api/show; `name`: for lists of models, such as that of VS Code.

        `fills_in`: whether the model completes text between a prefix and a suffix, which only its tokenizer shows.
        """
        return {
            "modelfile": "",
            "parameters": "",
            "license": "",
            "template": self.template,
            "details": self.details,
            "model_info": {**self.info, "general.basename": name},
            "capabilities": [*self.capabilities, *(("insert",) if fills_in else ())],
            "modified_at": self.modified,
        }


def running_entry(
    card: ModelCard, name: str, nbytes: int, gpu_bytes: int, context: int, expires: str = NEVER
) -> dict[str, Any]:
    """Return the entry of a loaded model; expires: when it is unloaded without further requests, ISO 8601."""
    listed = card.listed(name)
    return {
        **{key: value for key, value in listed.items() if key != "modified_at"},
        "size": nbytes,
        "size_vram": gpu_bytes,
        "context_length": context,
        "expires_at": expires,
    }


def model_card(folder: ModelFolder) -> ModelCard:
    """Describe a model from its files. Raises ModelError."""
    config = folder.config
    files = [path for path in folder.source_files() if path.is_file()]
    sizes = {path.name: path.stat().st_size for path in files}
    newest = max((path.stat().st_mtime for path in files), default=0.0)
    template = folder.chat_template()
    source = "" if template is None else template.source(tools=True)
    counts = Counter(packing.name for packing in folder.packings.values())
    gguf = any(name.endswith(".gguf") for name in sizes)
    family = config.model_type
    kinds: tuple[str, ...] = ()  # of a reranker, which Ollama has no name for
    if folder.embedding is not None:
        kinds = ("embedding",)
    elif not config.bidirectional:
        kinds = (
            "completion",
            *(("tools",) if source else ()),
            *(("thinking",) if find_reasoning_format(source).reasons(source) else ()),
        )
    return ModelCard(
        nbytes=sum(sizes.values()),
        modified=utc_text(datetime.fromtimestamp(newest, UTC)),
        digest=hashlib.sha256(json.dumps([family, config.parameters(), sorted(sizes.items())]).encode()).hexdigest(),
        template=source,
        details={
            "parent_model": "",
            "format": "gguf" if gguf else "safetensors",
            "family": family,
            "families": [family],
            "parameter_size": _short(config.parameters()),
            "quantization_level": counts.most_common(1)[0][0] if counts else config.dtype,
        },
        info={
            "general.architecture": family,
            "general.parameter_count": config.parameters(),
            f"{family}.context_length": config.max_context,
            f"{family}.embedding_length": config.hidden_size,
            f"{family}.block_count": config.layers,
            f"{family}.attention.head_count": config.heads,
            f"{family}.attention.head_count_kv": config.kv_heads,
            f"{family}.vocab_size": config.vocab_size,
        },
        capabilities=kinds,
    )


def _short(count: int) -> str:
    for size, letter in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if count >= size:
            return f"{count / size:.1f}{letter}"
    return str(count)
