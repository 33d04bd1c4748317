"""Compares llama-server's tokenization with ours for every rule of `tokenizer.ggml.pre`.

    python -m tests.benchmarks.gguf_rules --llama-server PATH [RULE ...]

The vocabulary is pico's; the file names another rule each time. The path may also be set in $LLAMA_SERVER.
"""

import argparse
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

from mycli.quant.export import ExportRequest, find_export_target
from mycli.quant.ggml import file as layout
from mycli.quant.progress import silent
from mycli.runtime.checkpoint.open_folder import open_model_folder
from mycli.runtime.hub.resolve import Source
from mycli.runtime.tokenizer.split_patterns import PRE_TOKENIZERS
from tests.benchmarks.llama_tokens import ask, serving, texts
from tests.support.paths import PICO

# Inputs on which the rules differ.
_TEXTS = (
    *("1234567 12 123 1", "abc12345x", "x 1000000\n\n\n  y", "1,234,567.8901", "$12.50 (12345)", "١٢٣٤٥ ½¼"),
    *("日本語テキスト한국어ไทย", "é́ à", "naïve ÅNGSTRÖM fooBar HTTPServer", "Don't WE'LL THEY'RE", "a b c d  e"),
    *("  \n \n\n\t x", "foo/bar\n/baz", "hello\r\nworld\r\r\n", " " * 37 + "x", " " * 700),
)


def _export(rule: str, folder: Path) -> Path:
    original = layout.tokenizer_metadata

    def named(*arguments: Any) -> Mapping[str, Any]:
        return {**original(*arguments), "tokenizer.ggml.pre": rule}

    module, variant = find_export_target("gguf:bf16")
    request = ExportRequest(Source("pico", PICO), open_model_folder(PICO), folder / "a.gguf", variant, True, True)
    with mock.patch.object(layout, "tokenizer_metadata", named):
        return module.export(request, silent).path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rules", nargs="*", default=list(PRE_TOKENIZERS))
    parser.add_argument("--llama-server", default=os.environ.get("LLAMA_SERVER"))
    given = parser.parse_args()
    if not given.llama_server or not Path(given.llama_server).exists():
        print("skipped: no llama-server (give --llama-server or set LLAMA_SERVER)")
        return
    failed = False
    for rule in given.rules:
        with tempfile.TemporaryDirectory() as folder:
            path = _export(rule, Path(folder))
            tokenizer = open_model_folder(path).tokenizer()
            inputs = (*texts(tokenizer), *_TEXTS)
            with serving(given.llama_server, path) as address:
                theirs = [ask(address, "/tokenize", content=text, add_special=False)["tokens"] for text in inputs]
        pairs = zip(inputs, theirs, strict=True)
        others = [text for text, ids in pairs if ids != tokenizer.encode(text, add_special=False)]
        failed |= bool(others)
        print(f"| {rule} | {len(inputs) - len(others)} of {len(inputs)} | {others[:2] or ''} |", flush=True)
    raise SystemExit(failed)


if __name__ == "__main__":
    main()
