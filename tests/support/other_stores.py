"""Builds the stores of Ollama and LM Studio in a home folder."""

import hashlib
import json
from pathlib import Path
from typing import Any

MODEL = "application/vnd.ollama.image.model"
ADAPTER = "application/vnd.ollama.image.adapter"
MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"


def ollama(home: Path, data: bytes, *place: str, adapter: bytes = b"", **changes: Any) -> Path:
    """Store `data` as the model of a manifest in Ollama's store, maybe with an adapter, and return the manifest."""
    root = home / ".ollama/models"
    layers = [
        *(_layer(root, kind, blob) for kind, blob in ((MODEL, data), (ADAPTER, adapter)) if blob or kind == MODEL),
        {"mediaType": "application/vnd.ollama.image.template", "digest": f"sha256:{'0' * 64}", "size": 3},
    ]
    path = root.joinpath("manifests", *(place or ("registry.ollama.ai", "library", "tiny", "1b")))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"schemaVersion": 2, "mediaType": MANIFEST, "layers": layers, **changes}))
    return path


def _layer(root: Path, kind: str, data: bytes) -> dict[str, Any]:
    digest = hashlib.sha256(data).hexdigest()
    blob = root / "blobs" / f"sha256-{digest}"
    blob.parent.mkdir(parents=True, exist_ok=True)
    blob.write_bytes(data)
    return {"mediaType": kind, "digest": f"sha256:{digest}", "size": len(data)}


def lm_studio(home: Path, data: bytes, name: str) -> Path:
    """Store `data` as the file PUBLISHER/REPOSITORY/NAME.gguf of LM Studio's store and return its path."""
    path = home / ".lmstudio/models" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path
