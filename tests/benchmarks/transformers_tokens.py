"""Compares logits and greedy tokens of transformers with GPTQModel on our GPTQ and AWQ exports of pico with ours.

    PYTHONPATH=.links python -m tests.benchmarks.transformers_tokens --python ENV/bin/python

ENV has transformers and gptqmodel (7.7; its compiled kernels are not needed). Both sides compute in fp32 from the same
packed weights; GPTQModel rounds 8-bit and AWQ weights when it dequantizes them, which changes logits by a thousandth.
Each of its tokens must be ours, or within `TIE` standard deviations of our logits below ours.
"""

import argparse
import json
import os
import subprocess
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file

from mycli.quant.evaluate import held_out_text
from mycli.quant.export import ExportRequest, find_export_target
from mycli.quant.progress import silent
from mycli.quant.recipe import Recipe
from mycli.runtime.checkpoint.open_folder import open_model_folder
from mycli.runtime.engine.loading.loader import load_model
from mycli.runtime.hub.resolve import Source
from mycli.runtime.layers.transformer import Transformer
from tests.benchmarks.llama_tokens import agreement, logits_over
from tests.support.engines import whole
from tests.support.models import CPU
from tests.support.paths import PICO
from tests.support.quantizing import make

TIE = 0.01  # in standard deviations of a step's logits
PROMPTS, PROMPT, REPLY = 8, 48, 24
WIDTHS: dict[str, tuple[tuple[int, int | None], ...]] = {
    "gptq": ((8, 32), (8, None), (4, 32), (4, 128), (3, 32), (3, 128), (2, 32), (2, 64)),
    "awq": ((4, 32), (4, 64), (4, 128)),
}


def export(target: str, bits: int, group: int | None, work: Path) -> Path:
    name = f"int{bits}-{group or 'channel'}"
    packed = work / name
    if not packed.exists():
        recipe = Recipe(method="rtn", bits=bits, group=group)
        make(Source("pico", PICO), packed, recipe)
    module, variant = find_export_target(target)
    request = ExportRequest(Source(name, packed), open_model_folder(packed), work / f"{target}-{name}", variant)
    return module.export(request, silent).path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=os.environ.get("GPTQMODEL_PYTHON"))
    given = parser.parse_args()
    if not given.python or not Path(given.python).exists():
        print("skipped: no environment with transformers and gptqmodel (give --python or set GPTQMODEL_PYTHON)")
        return
    ids = open_model_folder(PICO).tokenizer().encode(held_out_text()[: PROMPTS * PROMPT * 8], add_special=False)
    prompts = [ids[start : start + PROMPT] for start in range(0, PROMPTS * PROMPT, PROMPT)]
    failed = False
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        folders = {
            f"{target} int{bits}-{f'g{group}' if group else 'channel'}": export(target, bits, group, work)
            for target, widths in WIDTHS.items()
            for bits, group in widths
        }
        request = {"folders": {key: str(path) for key, path in folders.items()}, "prompts": prompts, "reply": REPLY}
        (work / "request.json").write_text(json.dumps(request))
        child = Path(__file__).with_name("transformers_child.py")
        kept = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
        command = [given.python, str(child), str(work / "request.json"), str(work / "out.safetensors")]
        plain = {"HF_HUB_OFFLINE": "1", "TORCHDYNAMO_DISABLE": "1"}  # otherwise it compiles every dequantization
        ran = subprocess.run(command, env={**kept, **plain}, capture_output=True, text=True)
        if ran.returncode:
            raise SystemExit(f"transformers failed ({ran.returncode}):\n{ran.stdout[-2000:]}\n{ran.stderr[-4000:]}")
        found = load_file(work / "out.safetensors")
        reasons = dict(line.split(": ", 1) for line in ran.stdout.splitlines() if line.split(": ", 1)[0] in folders)
        for key, path in folders.items():
            line, ok = compared(key, path, prompts, found) if f"{key}/logits" in found else (reasons[key], False)
            failed |= not ok
            print(f"{key}: {line}: {'ok' if ok else 'FAILED'}", flush=True)
    raise SystemExit(failed)


def compared(key: str, path: Path, prompts: list[list[int]], found: dict[str, torch.Tensor]) -> tuple[str, bool]:
    """Compare transformers' logits and tokens with ours; return a report line and whether they agree."""
    model = load_model(open_model_folder(path), CPU).model
    assert isinstance(model, Transformer)
    ours, theirs = whole(model, torch.tensor(prompts)), found[f"{key}/logits"]
    apart = ((ours - theirs).abs().amax(-1) / ours.abs().amax(-1)).max().item()
    top = (ours.argmax(-1) == theirs.argmax(-1)).float().mean().item()
    replies = found[f"{key}/tokens"]
    over = torch.cat([logits_over(model, *one) for one in zip(prompts, replies.tolist(), strict=True)])
    same, worst = agreement(over, replies.flatten())
    line = (
        f"logits within {apart:.1g} of the largest, {top:.2%} of likeliest tokens the same; {same} of"
        f" {PROMPTS * REPLY} greedy tokens are ours, the others at most {worst:.4f} deviations below"
    )
    return line, worst <= TIE


if __name__ == "__main__":
    main()
