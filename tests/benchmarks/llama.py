"""llama.cpp's quantizer on a model: `llama-quantize`, with the importance matrix of `llama-imatrix`.

The programs are those of a folder that its build made (`cmake --build . --target llama-quantize llama-imatrix
llama-perplexity`). What they make is read back as fp32 weights (`tests.benchmarks.gguf`), so that the evaluator which
measures ours measures it too; llama.cpp itself also rounds activations, which is not counted here.
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
    """The programs in `programs`, about the model of `source`; files go to `folder`."""

    programs: Path
    source: Path
    folder: Path

    @property
    def version(self) -> str:
        """As the program says it."""
        done = self._run("llama-perplexity", "--version")
        found = re.search(r"version: .*", done.stdout + done.stderr)
        return found[0] if found else "version unknown"

    @property
    def model(self) -> Path:
        """The model in fp32, written when it is first asked for."""
        path = self.folder / "original.gguf"
        if not path.exists():
            gguf.write(self.source, path)
        return path

    def perplexity(self, model: Path, windows: Tensor) -> float:
        """llama.cpp's own, of the second halves of `windows` int64 [windows, context] given the first."""
        said = self._run("llama-perplexity", "-m", model, *self._text(windows)).stderr
        found = re.search(r"Final estimate: PPL = ([\d.]+)", said)
        assert found, said[-1000:]
        return float(found[1])

    def imatrix(self, windows: Tensor) -> Path:
        """The importance matrix of `windows` int64 [windows, context], every window a chunk of its own."""
        path = self.folder / "imatrix.gguf"
        self._run("llama-imatrix", "-m", self.model, *self._text(windows), "--no-ppl", "-o", path)
        return path

    def quantize(self, kind: str, imatrix: Path | None) -> tuple[Path, float, Counter[str]]:
        """A model folder of what `kind` made of the weights, its bits per weight of the linears, and their types.

        The embedding keeps its values. Raises RuntimeError with the end of what the program said, such as that this
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
        # Of its vocabulary, it prints what it cuts in the middle of a character.
        done = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace")
        if done.returncode:
            raise RuntimeError(f"{program}: {done.stderr[-500:]}")
        return done


@torch.inference_mode()
def second_half_perplexity(model: StreamedModel, windows: Tensor) -> float:
    """Of ours, what `Llama.perplexity` measures of theirs."""
    norm, half, total = model.final_norm(), windows.shape[1] // 2, 0.0
    for stream, ids in zip(model.hidden(windows), windows, strict=True):
        logits = model.head(norm(stream[half:-1]))
        total += float(functional.cross_entropy(logits.float(), ids[half + 1 :], reduction="sum"))
    return float(torch.tensor(total / windows[:, half + 1 :].numel()).exp())
