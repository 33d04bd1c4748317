"""Build small valid models of every layout, which `fuzz` damages: file name -> bytes for each."""

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mycli.quant.export import ExportRequest, find_export_target
from mycli.quant.progress import silent
from mycli.quant.recipe import Recipe
from mycli.runtime.checkpoint.gguf.files import GgufFiles
from mycli.runtime.checkpoint.gguf.types import QUANTIZED, TYPES_BY_NAME
from mycli.runtime.checkpoint.gguf.writer import make_gguf_header
from mycli.runtime.checkpoint.open_folder import open_model_folder
from mycli.runtime.hub.resolve import Source
from tests.runtime.checkpoint.gguf.test_blocks import random_blocks
from tests.runtime.checkpoint.gguf.test_folder import MODELS, llama3_factors
from tests.runtime.checkpoint.test_foreign_layouts import COMPRESSED, compressed_case
from tests.runtime.checkpoint.test_layout_attacks import model_folder
from tests.runtime.checkpoint.test_published_methods import RENAMED
from tests.runtime.tokenizer.test_gguf_tokenizer import sentencepiece
from tests.support import gguf_files, quantizing
from tests.support.families import CASES, make
from tests.support.foreign_layouts import Case, stored
from tests.support.gguf_exports import exported_families, make_exported
from tests.support.models import random_model
from tests.support.multimodal_families import FOLDERS, make_folder

Models = dict[str, dict[str, bytes]]
QUANTIZED_NAMES = [kind.name for kind in QUANTIZED]
_GGUF = (
    ("llama-rope-llama3", "Q8_0", gguf_files.byte_tokenizer),
    ("llama-biases-hd32", "F16", sentencepiece),
    ("qwen2-biases", "Q4_K", gguf_files.byte_tokenizer),
    ("qwen3-hd32", "Q6_K", gguf_files.byte_tokenizer),
    ("phi3-window16", "Q4_1", sentencepiece),
    ("gemma2-window7", "F32", sentencepiece),
    ("gemma3-window7-six-layers", "IQ2_XS", sentencepiece),
    ("smollm3-five-layers", "MXFP4", gguf_files.byte_tokenizer),
    ("olmo2-mha", "Q3_K", gguf_files.byte_tokenizer),
)


def _files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()}


def _of_cases(cases: dict[str, Case]) -> Models:
    models: Models = {}
    for name, case in cases.items():
        with tempfile.TemporaryDirectory() as folder:
            models[name] = _files(model_folder(Path(folder), case))
    return models


def _compressed() -> Models:
    selected = ("pack-int3-g32", "pack-int4-g16-zeros", "pack-int8-gNone", "nvfp4", "mxfp4", "mxfp8", "float-block32")
    names = [name for name in COMPRESSED if name in selected or name.endswith(("-quantized-tensor", "-channel-zeros"))]
    return _of_cases({name: compressed_case(name) for name in names})


def _published() -> Models:
    return _of_cases({name: RENAMED[name] for name in sorted(RENAMED)[::5]})


def _ours() -> Models:
    """Return folders that this program writes: packed words of several widths, and NF4."""
    models: Models = {}
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder)
        model = random_model(base / "dense", num_hidden_layers=1, hidden_size=64, intermediate_size=64)
        recipes = [Recipe(method="rtn", bits=bits, group=32) for bits in (2, 3, 4, 8)]
        for recipe in (*recipes, Recipe(method="nf4", group=64)):
            name = f"{recipe.method}-int{recipe.bits}"
            models[name] = _files(quantizing.make(Source("dense", model), base / name, recipe).folder)
    return models


def _gguf() -> Models:
    """Return GGUF models that cover every architecture, type and kind of tokenizer."""
    models: Models = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, kind, vocabulary in _GGUF:
            path, (arch, model_type, changes, keys) = Path(folder) / "a.gguf", MODELS[name]
            size = 256 if vocabulary is gguf_files.byte_tokenizer else len(sentencepiece()["tokenizer.ggml.tokens"])
            words = vocabulary(size) if vocabulary is gguf_files.byte_tokenizer else sentencepiece()
            wide = {"hidden_size": 256, "intermediate_size": 256} if kind in QUANTIZED_NAMES else {}
            make(Path(folder) / name, model_type, {**changes, **wide, "vocab_size": size})
            config = json.loads((Path(folder) / name / "config.json").read_text())
            extra = {"rope_freqs.weight": llama3_factors(config)} if name == "llama-rope-llama3" else {}
            stored = "F32" if kind in QUANTIZED_NAMES else kind
            gguf_files.write_model(Path(folder) / name, path, arch, stored, config, {**words, **keys}, extra)
            models[f"{name}-{kind}"] = {"model.gguf": in_blocks(path, kind)}
    return models


def in_blocks(path: Path, kind: str) -> bytes:
    """Return the file with its matrices in a type that no library writes: random blocks with finite values."""
    if kind not in QUANTIZED_NAMES:
        return path.read_bytes()
    header = GgufFiles.open(path).header
    metadata = {key: _plain(value) for key, value in header.metadata.values.items()}
    block = TYPES_BY_NAME[kind].block
    table = [
        (name, kind if len(tensor.shape) == 2 and tensor.shape[1] % block == 0 else tensor.dtype, tensor.shape)
        for name, tensor in header.tensors.items()
    ]
    head, entries = make_gguf_header(metadata, table, path.name)
    data, stored = bytearray(head), path.read_bytes()
    for name, entry in entries.items():
        data += bytes(entry.offset - len(data))
        old = header.tensors[name]
        if entry.dtype == kind:
            data += random_blocks(kind, entry.shape[0], entry.shape[1] // block).numpy().tobytes()
        else:
            data += stored[old.offset : old.offset + old.nbytes]
    return bytes(data)


def _plain(value: Any) -> Any:
    return value if isinstance(value, bool | int | float | str) else list(value)


def _architectures() -> Models:
    """Return an export of every GGUF architecture that is written."""
    models: Models = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in exported_families():
            path = Path(folder) / name
            make_exported(path, name)
            variant = "" if CASES[name][0] == "gpt_oss" else "f16"
            request = ExportRequest(
                Source(name, path), open_model_folder(path), path / "a.gguf", variant, requantize=True
            )
            models[name] = {"model.gguf": find_export_target("gguf")[0].export(request, silent).path.read_bytes()}
    return models


def _blocks() -> Models:
    models: Models = {}
    arch, model_type, changes, keys = MODELS["qwen2-biases"]
    with tempfile.TemporaryDirectory() as folder:
        size, path, hf = {"hidden_size": 256, "intermediate_size": 256}, Path(folder) / "a.gguf", Path(folder) / "hf"
        make(hf, model_type, {**changes, **size, "vocab_size": 256, "num_hidden_layers": 1})
        config = json.loads((hf / "config.json").read_text())
        words = {**gguf_files.byte_tokenizer(256), **keys}
        gguf_files.write_model(hf, path, arch, "F32", config, words, {})
        for kind in QUANTIZED_NAMES:
            models[kind] = {"model.gguf": in_blocks(path, kind)}
    return models


def _multimodal() -> Models:
    """Return folders whose text model is one part of several."""
    models: Models = {}
    for name in FOLDERS:
        if name in ("aya_vision", "cohere2_vision"):  # transformers leaves out their logit_scale
            continue
        with tempfile.TemporaryDirectory() as folder:
            make_folder(Path(folder), name)
            models[name] = _files(Path(folder))
    return models


LAYOUTS: dict[str, Callable[[], Models]] = {
    "gguf": _gguf,
    "architectures": _architectures,
    "blocks": _blocks,
    "gptq": lambda: _of_cases(stored("gptq")),
    "awq": lambda: _of_cases(stored("awq")),
    "compressed-tensors": _compressed,
    "fp8": lambda: _of_cases(stored("fp8")),
    "mlx": lambda: _of_cases(stored("mlx")),
    "bitsandbytes": lambda: _of_cases(stored("bitsandbytes")),
    "ours": _ours,
    "published": _published,
    "multimodal": _multimodal,
}
