"""Checks vLLM on the CPU with our quantized models of families other than pico's, within its arithmetic error.

    python -m tests.benchmarks.vllm_families [FAMILY ...] --python ENV/bin/python [--method gptq awq]

vLLM runs in a separate environment (the Makefile says how it is made). For each family transformers creates a small
random model, which is quantized at 4 bits in groups of 128, the only format of experts that vLLM's CPU build (0.32)
accepts. On AMX it multiplies packed weights by 8-bit activations: experts always, other weights unless
VLLM_CPU_INT4_W4A8=0. So its tokens are compared with two runs of transformers over its replies, with the weights as
compressed-tensors unpacks them, which must be bit-identical to ours: in fp32, the reference, and with the inputs of
packed products rounded to 8 bits per row. The mean loss of vLLM's tokens in the reference logits may exceed that of the
rounded run's most likely tokens by at most `ERRORS` standard errors of the difference.
"""

import argparse
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional

from mycli.quant.recipe import Recipe
from mycli.runtime.checkpoint.model_folder import ModelFolder
from mycli.runtime.checkpoint.open_folder import open_model_folder
from mycli.runtime.engine.loading.loader import load_model
from mycli.runtime.hub.resolve import Source
from tests.benchmarks.vllm_tokens import PROMPT, PROMPTS, theirs
from tests.support.families import enliven, experts_of, packed_weights, weights_of
from tests.support.models import CPU
from tests.support.paths import PICO
from tests.support.quantizing import make

ERRORS = 2.0  # standard errors of a mean over a few hundred tokens
SHAPE = {
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
# Differences from `SHAPE` by model_type; gemma3 has a tied head.
FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "gemma3_text": {
        "sliding_window": 32,
        "num_hidden_layers": 7,
        "query_pre_attn_scalar": 64,
        "tie_word_embeddings": True,
    },
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "norm_topk_prob": True},
    "phi3": {},
}


def quantized(folder: Path, family: str, method: str) -> Path:
    """Write a random model of `family` to `folder`, at 4 bits in groups of 128, as vLLM's experts require."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **{**SHAPE, **FAMILIES[family]})
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    enliven(model)
    if config.tie_word_embeddings:  # otherwise every token would repeat itself
        model.get_input_embeddings().weight.data.mul_(0.2)
    for name, parameter in model.named_parameters():
        if name.endswith("mlp.gate.weight"):  # makes the choice of experts unambiguous
            parameter.data.mul_(8)
    model.bfloat16().save_pretrained(folder / "source")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(PICO / name, folder / "source" / name)
    recipe = Recipe(method, 4, 128, samples=16, seq=128)
    make(Source("random", folder / "source"), folder / "copy", recipe)
    return folder / "copy"


@dataclass(frozen=True)
class Judgement:
    """Describes vLLM's tokens: how many are the reference's, and their mean loss in logits.

    `allowed`: the loss of the most likely tokens with rounded inputs; `spare`: the tolerance for chance.
    """

    same: int
    tokens: int
    lost: float
    allowed: float
    spare: float

    @property
    def ok(self) -> bool:
        """Return whether the loss is explained by rounding and chance."""
        return self.lost - self.allowed <= self.spare


def judge(truth: Tensor, rounded: Tensor, chosen: Tensor) -> Judgement:
    """Compare tokens `chosen` int64 [n] with the reference logits [n, vocab] and those with rounded inputs."""
    best = truth.max(-1).values
    lost = best - truth.gather(1, chosen.unsqueeze(1)).squeeze(1)
    allowed = best - truth.gather(1, rounded.argmax(-1, keepdim=True)).squeeze(1)
    spare = ERRORS * float((lost - allowed).std()) / len(chosen) ** 0.5
    return Judgement(int((lost == 0).sum()), len(chosen), float(lost.mean()), float(allowed.mean()), spare)


def rounded_rows(x: Tensor, bits: int) -> Tensor:
    """Round each row of x [..., K] to multiples of its largest magnitude over 2^(bits - 1) - 1."""
    scales = x.abs().amax(-1, keepdim=True).clamp(min=1e-12) / (2 ** (bits - 1) - 1)
    return (x / scales).round() * scales


def round_inputs(model: nn.Module, folder: ModelFolder, bits: int = 8) -> None:
    """Round the inputs of all packed products of `folder`, experts included, to `bits` per row from now on."""

    def experts(module: nn.Module) -> None:
        def forward(x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
            out = torch.zeros_like(x)
            for expert in range(len(module.down_proj)):
                token, rank = (chosen == expert).nonzero(as_tuple=True)
                gate, up = functional.linear(rounded_rows(x[token], bits), module.gate_up_proj[expert]).chunk(2, -1)
                inner = rounded_rows(module.act_fn(gate) * up, bits)
                made = functional.linear(inner, module.down_proj[expert])
                out.index_add_(0, token, made * weights[token, rank, None])
            return out

        module.forward = forward

    for name, module in model.named_modules():
        if name in folder.packings:
            module.register_forward_pre_hook(lambda _, given: (rounded_rows(given[0], bits), *given[1:]))
        elif name.endswith(".experts"):
            experts(module)


@torch.no_grad()
def unpacked_model(path: Path) -> transformers.PreTrainedModel:
    """Return the copy in `path` as transformers reads it, in bf16 with unpacked weights."""
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    model(torch.zeros(1, 1, dtype=torch.long))  # the first pass unpacks the weights
    return model


def differing_weights(folder: ModelFolder, reference: nn.Module) -> list[str]:
    """Return the names of packed weights that differ from those that compressed-tensors unpacked into `reference`."""
    ours, unpacked = packed_weights(load_model(folder, CPU).model), weights_of(reference, experts_of(folder))
    return [name for name in folder.packings if name in ours and not torch.equal(ours[name], unpacked[name])]


@torch.no_grad()
def judged(path: Path, prompts: list[list[int]], replies: list[list[int]]) -> tuple[Judgement, list[str]]:
    """Return the verdict on vLLM's replies from the copy in `path`, and the names of weights that differ."""
    folder = open_model_folder(path)
    model = unpacked_model(path)
    differing = differing_weights(folder, model)
    nn.Module.float(model)  # transformers' own `float` refuses models that were packed once
    tokens = torch.tensor([prompt + reply for prompt, reply in zip(prompts, replies, strict=True)])
    start = tokens.shape[1] - len(replies[0])
    truth = model(tokens).logits[:, start - 1 : -1].flatten(0, 1)
    round_inputs(model, folder)
    rounded = model(tokens).logits[:, start - 1 : -1].flatten(0, 1)
    return judge(truth, rounded, tokens[:, start:].flatten()), differing


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", metavar="FAMILY", default=list(FAMILIES))
    parser.add_argument("--python", default=os.environ.get("VLLM_PYTHON"))
    parser.add_argument("--method", nargs="*", default=["gptq", "awq"])
    given = parser.parse_args()
    if not given.python or not Path(given.python).exists():
        print("skipped: no environment with vLLM (make test-vllm makes one)")
        return
    prompts = torch.randint(3, 4096, (PROMPTS, PROMPT), generator=torch.Generator().manual_seed(0)).tolist()
    failed = False
    for family, method in ((family, method) for family in given.families for method in given.method):
        with tempfile.TemporaryDirectory() as name:
            folder, site = quantized(Path(name), family, method), Path(name) / "site"
            site.mkdir()
            try:
                replies = theirs(given.python, folder, prompts, 1, site)
            except SystemExit as error:
                print(f"{family}, {method}: FAILED: {error}", flush=True)
                failed = True
                continue
            verdict, differing = judged(folder, prompts, replies)
        distinct = len({token for reply in replies for token in reply})
        ok = verdict.ok and not differing
        failed |= not ok
        print(
            f"{family}, {method}: {verdict.same} of {verdict.tokens} greedy tokens ({distinct} different ones) are"
            f" those of fp32; they lose {verdict.lost:.4f} of a logit in the mean, inputs of 8 bits"
            f" {verdict.allowed:.4f}, chance {verdict.spare:.4f}; {len(differing)} weights differ:"
            f" {'ok' if ok else 'FAILED'}",
            flush=True,
        )
    raise SystemExit(failed)


if __name__ == "__main__":
    main()
