"""Reads what llama.cpp's own converter writes: random models of every family, logits compared with transformers.

    python -m tests.benchmarks.gguf_converter LLAMA_CPP [NAME ...] [--type f32|bf16|q8_0] [--record FILE]

LLAMA_CPP is a source tree with `conversion/` and `gguf-py/`, as in the sdist of llama-cpp-python. NAME is a case of
`tests.support.families` or the beginning of one. `--record` writes keys and tensor names as JSON, for the tests.
"""

import argparse
import importlib
import json
import logging
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from gguf import GGUFReader

from mycli.runtime.checkpoint.open_folder import open_model_folder
from mycli.runtime.engine.loader import load_model
from mycli.runtime.errors import UserError
from tests.support.engines import whole
from tests.support.families import CASES, TOKENS, make
from tests.support.gguf_files import byte_tokenizer
from tests.support.models import CPU

BOUND = 1e-4  # of the largest logit, at F32
TYPES = {"f32": "ALL_F32", "bf16": "MOSTLY_BF16", "q8_0": "MOSTLY_Q8_0"}
# Cases that the converter cannot write or that GGUF has no key for, with the reason.
REASONS: dict[str, str] = {}


def _vocabulary(model: Any) -> None:
    for key, value in byte_tokenizer(model.hparams["vocab_size"]).items():
        write = model.gguf_writer
        if isinstance(value, list):
            write.add_array(key, value)
        elif isinstance(value, str):
            write.add_string(key, value)
        else:
            write.add_uint32(key, value)


@contextmanager
def _modules(root: Path) -> Iterator[Any]:
    paths = [str(root), str(root / "gguf-py")]
    ours = {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] == "gguf"}
    with mock.patch.object(sys, "path", [*paths, *sys.path]):
        yield importlib.import_module("conversion")
    for name in [name for name in sys.modules if name.split(".")[0] in ("gguf", "conversion")]:
        del sys.modules[name]
    sys.modules.update(ours)


def converter(root: Path) -> Callable[[Path, Path, str], None]:
    """Return a function (folder, file, type) that writes a GGUF file with llama.cpp's converter."""
    with _modules(root) as conversion:
        gguf = sys.modules["gguf"]
        base = sys.modules["conversion.base"]

    def write(folder: Path, path: Path, kind: str) -> None:
        logging.disable(logging.WARNING)
        settings = json.loads((folder / "config.json").read_text())
        with mock.patch.dict(sys.modules, {"gguf": gguf, "conversion": conversion, "conversion.base": base}):
            cls = conversion.get_model_class(settings["architectures"][0])
            model = cls(folder, gguf.LlamaFileType[TYPES[kind]], path)
            target = getattr(model, "impl", model)
            target.set_vocab = lambda: _vocabulary(target)
            model.write()

    return write


def compare(name: str, write: Callable[[Path, Path, str], None], kind: str, folder: Path) -> tuple[float, Path]:
    """Return the largest difference of logits relative to the largest logit, and the file."""
    model_type, changes = CASES[name]
    reference = make(folder / "hf", model_type, changes)
    path = folder / "model.gguf"
    write(folder / "hf", path, kind)
    tokens = torch.randint(3, 97, (2, TOKENS), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = reference(tokens).logits
        actual = whole(load_model(open_model_folder(path), CPU).model, tokens)
    return ((actual - expected).abs().max() / expected.abs().max()).item(), path


def facts(path: Path) -> dict[str, Any]:
    """Return keys and values, except the tokenizer's, and the shape of every tensor."""
    reader = GGUFReader(path)
    skipped = ("GGUF.", "general.", "tokenizer.")
    keys = {
        name: field.contents()
        for name, field in reader.fields.items()
        if not name.startswith(skipped) or name == "general.architecture"
    }
    return {"keys": keys, "tensors": {tensor.name: [int(size) for size in tensor.shape] for tensor in reader.tensors}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("llama_cpp", type=Path)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--type", choices=TYPES, default="f32")
    parser.add_argument("--record", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    write, recorded = converter(arguments.llama_cpp), {}
    for name in CASES:
        if arguments.names and not name.startswith(tuple(arguments.names)):
            continue
        with tempfile.TemporaryDirectory() as folder:
            try:
                difference, path = compare(name, write, arguments.type, Path(folder))
                recorded[name] = facts(path)
                outcome = f"{difference:.1e}" + ("" if difference <= BOUND else " DIFFERS")
            except UserError as error:
                outcome = f"refused: {error}"
            except Exception as error:  # of the converter
                outcome = f"{type(error).__name__}: {error}"
        print(f"| {name} | {outcome:.150} |", flush=True)
    if arguments.record:
        arguments.record.write_text(json.dumps(recorded, indent=1))


if __name__ == "__main__":
    main()
