"""Builds the stores of Ollama and LM Studio in a home folder."""

import hashlib
import json
from pathlib import Path
from typing import Any

MODEL = "application/vnd.ollama.image.model"
MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"


def ollama(home: Path, data: bytes, *place: str, **changes: Any) -> Path:
    """Store `data` as the model of a manifest in Ollama's store and return the manifest."""
    root = home / ".ollama/models"
    digest = hashlib.sha256(data).hexdigest()
    blob = root / "blobs" / f"sha256-{digest}"
    blob.parent.mkdir(parents=True, exist_ok=True)
    blob.write_bytes(data)
    layers = [
        {"mediaType": MODEL, "digest": f"sha256:{digest}", "size": len(data)},
        {"mediaType": "application/vnd.ollama.image.template", "digest": f"sha256:{'0' * 64}", "size": 3},
    ]
    path = root.joinpath("manifests", *(place or ("registry.ollama.ai", "library", "tiny", "1b")))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"schemaVersion": 2, "mediaType": MANIFEST, "layers": layers, **changes}))
    return path


def lm_studio(home: Path, data: bytes, name: str) -> Path:
    """Store `data` as the file PUBLISHER/REPOSITORY/NAME.gguf of LM Studio's store and return its path."""
    path = home / ".lmstudio/models" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path
