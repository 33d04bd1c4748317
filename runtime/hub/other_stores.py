"""Finds models that Ollama and LM Studio downloaded, to use them where they lie. Nothing is written there.

Ollama: `manifests/HOST/NAMESPACE/MODEL/TAG` is JSON that names blobs by digest, `blobs/sha256-HEX`; the model is a GGUF
file, its LoRA adapter another. LM Studio: `PUBLISHER/REPOSITORY/` with GGUF files or a folder in the Hugging Face
layout. All of it is untrusted: names and digests become paths only after they matched a pattern, and a link out of a
store is refused.
"""

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from mycli.runtime.errors import ModelError
from mycli.runtime.hub.names import GGUF, choose_quant, ollama_name
from mycli.runtime.hub.store import file_bytes, gguf_files, list_folder
from mycli.runtime.utils.files import expand_user
from mycli.runtime.utils.json_fields import read_object

Program = Literal["ollama", "lm-studio"]
_REGISTRY, _LIBRARY, _LATEST, _HUB = "registry.ollama.ai", "library", "latest", "hf.co"
_PART = re.compile(r"[A-Za-z0-9_][\w.-]{0,127}", re.ASCII)
_DIGEST = re.compile(r"sha256:([0-9a-f]{64})")
_MODEL = "application/vnd.ollama.image.model"
_ADAPTER = "application/vnd.ollama.image.adapter"
_MANIFESTS = ("application/vnd.docker.distribution.manifest.v2+json", "application/vnd.oci.image.manifest.v1+json")
_MAX_LAYERS, _MAX_MODELS = 1000, 10_000
_AGAIN = "ollama pull the model again, or give another one"


@dataclass(frozen=True)
class StoredModel:
    """A model in another program's store. path: its GGUF file or folder; problem: why it cannot be used, or ""."""

    name: str
    program: Program
    path: Path
    problem: str = ""
    adapter: Path | None = None  # a GGUF file

    @property
    def nbytes(self) -> int:
        if self.path.is_dir():
            return sum(file_bytes(path) for path in list_folder(self.path) if path.is_file())
        return file_bytes(self.path) + (0 if self.adapter is None else file_bytes(self.adapter))


def find_stored(model: str) -> StoredModel | None:
    """Return the model of this name in a store of another program; None if there is none.

    Ollama's names are `model[:tag]` and `namespace/model[:tag]`, also in an address or a command. LM Studio's are
    `publisher/repository[:file or quant]`.
    Raises ModelError for a model whose manifest or files are not acceptable.
    """
    model = ollama_name(model) or model
    return _find_ollama(model) or _find_lm_studio(model)


def stored_models() -> Iterator[StoredModel]:
    """Yield the models of all stores, those that cannot be used with the reason."""
    for root in _ollama_roots():
        for path in sorted(list_folder(root / "manifests", "*/*/*/*"))[:_MAX_MODELS]:
            parts = path.relative_to(root / "manifests").parts
            if not all(map(_PART.fullmatch, parts)):
                continue
            name = _ollama_name(*parts)
            try:
                yield _read_manifest(name, root, path)
            except ModelError as error:
                yield StoredModel(name, "ollama", path, error.message)
    for root in _lm_studio_roots():
        for folder in sorted(list_folder(root, "*/*"))[:_MAX_MODELS]:
            publisher, repository = folder.parts[-2:]
            if _PART.fullmatch(publisher) and _PART.fullmatch(repository) and folder.is_dir():
                yield from _lm_studio_models(root, folder, f"{publisher}/{repository}")


def _ollama_roots() -> list[Path]:
    configured = os.environ.get("OLLAMA_MODELS")
    # The last one is where Ollama's service for Linux keeps models.
    roots = [expand_user(configured)] if configured else [Path.home() / ".ollama/models"]
    return [*roots, Path("/usr/share/ollama/.ollama/models")]


def _lm_studio_roots() -> list[Path]:
    return [Path.home() / ".lmstudio/models", Path.home() / ".cache/lm-studio/models"]


def _ollama_name(host: str, namespace: str, model: str, tag: str) -> str:
    if host != _REGISTRY:
        return f"{host}/{namespace}/{model}:{tag}"
    return f"{model}:{tag}" if namespace == _LIBRARY else f"{namespace}/{model}:{tag}"


def _find_ollama(model: str) -> StoredModel | None:
    name, _, tag = model.partition(":")
    parts = [*name.split("/"), tag or _LATEST]
    if not all(map(_PART.fullmatch, parts)):
        return None
    if len(parts) == 2:
        places = [(_REGISTRY, _LIBRARY, *parts)]
    elif len(parts) == 3:  # or a repository of the hub, whose address was shortened to its name
        places = [(_REGISTRY, *parts), (_HUB, *parts)]
    else:
        places = [tuple(parts)] if len(parts) == 4 else []
    for root in _ollama_roots():
        for place in places:
            path = root.joinpath("manifests", *place)
            if os.path.lexists(path) and not path.is_dir():
                return _read_manifest(model, root, path)
    return None


def _read_manifest(name: str, root: Path, path: Path) -> StoredModel:
    """Return the model of a manifest. Raises ModelError naming the manifest and what is wrong with it."""
    _require_inside(root, path)
    manifest = read_object(path)
    source = f"{path.parent.name}:{path.name}: manifest"
    kind = manifest.text("mediaType", _MANIFESTS[0])
    if kind not in _MANIFESTS:
        raise ModelError(f"{source}: mediaType {kind!r:.80} is not a manifest", _AGAIN)
    layers = manifest.array("layers", dict, _MAX_LAYERS)
    kinds = [layer.get("mediaType") for layer in layers]
    if kinds.count(_ADAPTER) > 1:
        raise ModelError(f"{source}: {kinds.count(_ADAPTER)} adapters, of which Ollama applies one", _AGAIN)
    if kinds.count(_MODEL) != 1:
        raise ModelError(f"{source}: {kinds.count(_MODEL)} layers are models, expected one", _AGAIN)
    adapter = _find_blob(root, source, layers[kinds.index(_ADAPTER)]) if _ADAPTER in kinds else None
    return StoredModel(name, "ollama", _find_blob(root, source, layers[kinds.index(_MODEL)]), adapter=adapter)


def _find_blob(root: Path, source: str, layer: Mapping[str, Any]) -> Path:
    digest, size = layer.get("digest"), layer.get("size")
    match = _DIGEST.fullmatch(digest) if isinstance(digest, str) else None
    if match is None:
        raise ModelError(f"{source}: digest {digest!r:.80} is not a SHA-256", _AGAIN)
    blob = root / "blobs" / f"sha256-{match[1]}"
    if not os.path.lexists(blob):
        raise ModelError(f"{source}: {blob.name[:19]}... is missing in {blob.parent}", _AGAIN)
    _require_inside(root, blob)
    if not blob.is_file() or type(size) is not int or file_bytes(blob) != size:
        raise ModelError(f"{source}: {blob.name[:19]}... has {file_bytes(blob)} bytes, expected {size!r:.40}", _AGAIN)
    return blob


def _require_inside(root: Path, path: Path) -> None:
    # The store may be a link to another disk, what is in it may not.
    real = Path(os.path.realpath(root)) / path.relative_to(root)
    if path.is_symlink() or os.path.realpath(path) != str(real):  # the latter is equal for a link to itself
        raise ModelError(f"{path}: a link, which is not followed in another program's store", "give the file itself")


def _find_lm_studio(model: str) -> StoredModel | None:
    name, _, file = model.partition(":")
    parts = name.split("/")
    if len(parts) != 2 or not all(map(_PART.fullmatch, parts)):
        return None
    for root in _lm_studio_roots():
        if not (folder := root.joinpath(*parts)).is_dir():
            continue
        models = {stored.name: stored for stored in _lm_studio_models(root, folder, name)}
        names = [stored.partition(":")[2] for stored in models]
        exact = file if file in names else choose_quant(names, file) if file else None
        if not file and len(models) > 1:
            listed = " or ".join(sorted(models)[:4])
            raise ModelError(f"{model}: LM Studio has {len(models)} files of it", f"give one: {listed}")
        stored = next(iter(models.values()), None) if not file else models.get(f"{name}:{exact}")
        if stored is not None:
            if stored.problem:
                raise ModelError(stored.problem, "give another model")
            return stored
    return None


def _lm_studio_models(root: Path, folder: Path, name: str) -> Iterator[StoredModel]:
    names = gguf_files(path.name for path in list_folder(folder))
    paths = {f"{name}:{file}": folder / file for file in names if _PART.fullmatch(file.removesuffix(GGUF))}
    if (folder / "config.json").exists():
        paths[name] = folder
    for label, path in paths.items():
        try:
            _require_inside(root, path)
        except ModelError as error:
            yield StoredModel(label, "lm-studio", path, error.message)
        else:
            yield StoredModel(label, "lm-studio", path)
