"""Runs llama.cpp's quantizer on a model: `llama-quantize`, with the importance matrix of `llama-imatrix`.

The programs are read from a build folder (`cmake --build . --target llama-quantize llama-imatrix llama-perplexity`).
Their output is read back as fp32 weights (`tests.benchmarks.gguf`) and measured by the same evaluator as ours;
llama.cpp itself also rounds activations, which is not counted here.
"""

import re
import subprocess
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from mycli.quant.layer_streaming import StreamedModel
from tests.benchmarks import gguf


@dataclass(frozen=True)
class Llama:
    """Runs the programs in `programs` on the model of `source`; writes files to `folder`."""

    programs: Path
    source: Path
    folder: Path

    @property
    def version(self) -> str:
        done = self._run("llama-perplexity", "--version")
        found = re.search(r"version: .*", done.stdout + done.stderr)
        return found[0] if found else "version unknown"

    @property
    def model(self) -> Path:
        path = self.folder / "original.gguf"
        if not path.exists():
            gguf.write(self.source, path)
        return path

    def perplexity(self, model: Path, windows: Tensor) -> float:
        """Return llama.cpp's perplexity of the second halves of `windows` int64 [windows, context]."""
        said = self._run("llama-perplexity", "-m", model, *self._text(windows)).stderr
        found = re.search(r"Final estimate: PPL = ([\d.]+)", said)
        assert found, said[-1000:]
        return float(found[1])

    def imatrix(self, windows: Tensor) -> Path:
        """Return the importance matrix of `windows` int64 [windows, context], with every window as its own chunk."""
        path = self.folder / "imatrix.gguf"
        self._run("llama-imatrix", "-m", self.model, *self._text(windows), "--no-ppl", "-o", path)
        return path

    def quantize(self, kind: str, imatrix: Path | None) -> tuple[Path, float, Counter[str]]:
        """Return a folder of the quantized model, the bits per weight of its linears, and the count of each type.

        The embedding is not quantized. Raises RuntimeError with the end of the program's output, for example when the
        type needs an importance matrix.
        """
        name = f"{kind}{'-imatrix' if imatrix else ''}"
        path, given = self.folder / f"{name}.gguf", ("--imatrix", imatrix) if imatrix else ()
        kept = ("--token-embedding-type", "bf16", "--output-tensor-type", "bf16")
        self._run("llama-quantize", *given, *kept, self.model, path, kind)
        gguf.read(path, self.source, self.folder / name)
        return self.folder / name, *gguf.linears(path, self.source)

    def _text(self, windows: Tensor) -> tuple[str | Path, ...]:
        path = self.folder / "text"
        path.write_text(gguf.as_text(windows.flatten().tolist()), encoding="utf-8")
        return "-f", path, "-c", str(windows.shape[1]), "-t", str(torch.get_num_threads())

    def _run(self, program: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
        command = [self.programs / program, *arguments]
        # The output contains vocabulary pieces that are cut in the middle of a character.
        done = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace")
        if done.returncode:
            raise RuntimeError(f"{program}: {done.stderr[-500:]}")
        return done


@torch.inference_mode()
def second_half_perplexity(model: StreamedModel, windows: Tensor) -> float:
    """Return our perplexity, computed as `Llama.perplexity` computes llama.cpp's."""
    norm, half, total = model.final_norm(), windows.shape[1] // 2, 0.0
    for stream, ids in zip(model.hidden(windows), windows, strict=True):
        logits = model.head(norm(stream[half:-1]))
        total += float(functional.cross_entropy(logits.float(), ids[half + 1 :], reduction="sum"))
    return float(torch.tensor(total / windows[:, half + 1 :].numel()).exp())
