"""Compares greedy tokens of vLLM on the CPU with two ranks with ours, on a folder of pico that we quantized.

    make test-vllm        # or: python -m tests.benchmarks.vllm_tokens --python ENV/bin/python

vLLM runs in a separate environment; the Makefile says how it is made. Its CPU build (0.32) has a kernel for 4 bits
only; other widths use a plain one (`vllm_plain`), so that for them only its loading and sharding of the folder are
tested, not its arithmetic. It computes in bf16, so two almost equally likely tokens may swap: each of its tokens must
be ours, or within `TIE` of ours in the logits of our fp32 pass over its reply.
"""

import argparse
import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

from mycli.quant.evaluate import held_out_text
from mycli.quant.export import ExportRequest, find_export_target
from mycli.quant.layer_streaming import StreamedModel
from mycli.quant.progress import silent
from mycli.quant.recipe import Recipe
from mycli.runtime.checkpoint.open_folder import open_model_folder
from mycli.runtime.hub.resolve import Source
from mycli.runtime.tokenizer.tokenizer import Tokenizer
from tests.support.models import CPU
from tests.support.paths import PICO
from tests.support.quantizing import make

TIE = 0.15  # in logits: a few steps of bf16 at the size of pico's logits
PROMPTS, PROMPT, REPLY = 8, 48, 32
ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "0|1", "HF_HUB_OFFLINE": "1"}


def plugin(folder: Path) -> None:
    """Write an importable package to `folder`, whose entry point registers `vllm_plain` in every rank of vLLM."""
    info = folder / "vllm_plain-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm-plain\nVersion: 0\n")
    (info / "entry_points.txt").write_text("[vllm.general_plugins]\nplain = vllm_plain:register\n")
    shutil.copy(Path(__file__).with_name("vllm_plain.py"), folder)


def theirs(python: str, folder: Path, prompts: list[list[int]], ranks: int, path: Path) -> list[list[int]]:
    """Return vLLM's replies; `path` is an extra folder of packages for its Python."""
    child = Path(__file__).with_name("vllm_child.py")
    command = [python, str(child), str(folder), str(ranks), "bfloat16", str(REPLY), json.dumps(prompts)]
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "OMP_"))}
    ran = subprocess.run(command, env={**kept, **ENVIRONMENT, "PYTHONPATH": str(path)}, capture_output=True, text=True)
    lines = [line for line in ran.stdout.splitlines() if line.startswith("tokens ")]
    if not lines:
        raise SystemExit(f"vLLM failed ({ran.returncode}):\n{ran.stdout[-2000:]}\n{ran.stderr[-4000:]}")
    replies: list[list[int]] = json.loads(lines[0].removeprefix("tokens "))
    return replies


def agreement(folder: Path, prompts: list[list[int]], replies: list[list[int]]) -> tuple[int, int, float]:
    """Return the number of greedy tokens equal to ours, of all tokens, and how far the worst other lies below ours."""
    model = StreamedModel(open_model_folder(folder), CPU)
    tokens = torch.tensor([prompt + reply for prompt, reply in zip(prompts, replies, strict=True)])
    hidden = model.hidden(tokens)
    same, worst = 0, 0.0
    for row, ids in zip(hidden, tokens, strict=True):
        logits = model.logits(row[PROMPT - 1 : -1])
        chosen = logits.gather(1, ids[PROMPT:, None]).squeeze(1)
        below = logits.max(1).values - chosen
        same += int((below == 0).sum())
        worst = max(worst, float(below.max()))
    return same, tokens.shape[0] * REPLY, worst


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=os.environ.get("VLLM_PYTHON"))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--bits", type=int, nargs="*", default=[4, 8, 3, 2])
    parser.add_argument(
        "--exports", nargs="*", default=["gptq", "awq"], metavar="LAYOUT[:BITS]", help="4 bits unless it says"
    )
    given = parser.parse_args()
    if not given.python or not Path(given.python).exists():
        print("skipped: no environment with vLLM (make test-vllm makes one)")
        return
    tokenizer = Tokenizer.load(PICO, StreamedModel(open_model_folder(PICO), CPU).config.vocab_size)
    ids = tokenizer.encode(held_out_text()[: PROMPTS * PROMPT * 8], add_special=False)
    prompts = [ids[start : start + PROMPT] for start in range(0, PROMPTS * PROMPT, PROMPT)]
    failed = False
    exports = [(int(bits or 4), target) for target, _, bits in (one.partition(":") for one in given.exports)]
    for bits, target in (*((bits, "") for bits in given.bits), *exports):
        with tempfile.TemporaryDirectory() as name:
            folder, site = Path(name) / "out", Path(name) / "site"
            site.mkdir()
            plugin(site)
            make(Source("pico", PICO, None, None), folder, Recipe(bits=bits, samples=16, seq=256))
            if target:
                source, folder = folder, Path(name) / target
                module, variant = find_export_target(target)
                request = ExportRequest(Source("pico", source), open_model_folder(source), folder, variant)
                module.export(request, silent)
            same, tokens, worst = agreement(folder, prompts, theirs(given.python, folder, prompts, given.ranks, site))
        ok = worst <= TIE
        failed |= not ok
        kind = f"{bits} bits as {target}" if target else f"{bits} bits"
        print(
            f"{kind}, {given.ranks} ranks: {same} of {tokens} greedy tokens are ours, the others at most"
            f" {worst:.3f} below in the logit: {'ok' if ok else 'FAILED'}",
            flush=True,
        )
    raise SystemExit(failed)


if __name__ == "__main__":
    main()
