"""vLLM on the CPU reads what we quantize of other families than pico's, and answers as its arithmetic allows.

    python -m tests.benchmarks.vllm_families [FAMILY ...] --python ENV/bin/python [--method gptq awq]

vLLM lives in an environment of its own (the Makefile says how it is made). Of each family transformers makes a small
random model, which is quantized at 4 bits in groups of 128: of experts vLLM's CPU build (0.32) takes no others. On AMX
it multiplies packed weights by activations of 8 bits, experts always, others unless VLLM_CPU_INT4_W4A8=0. So its tokens
are judged beside two runs of transformers over its replies, with the weights as compressed-tensors unpacks them, which
must be ours bit for bit: in fp32, which is the truth, and with what enters packed products rounded to 8 bits a row.
What vLLM's tokens lose in the logits of the truth, in the mean, may be what the likeliest tokens of the rounded run
lose, and `ERRORS` standard errors of the difference more.
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

from mycli.quant.pipeline import quantize
from mycli.quant.planning.plan import plan_quantization
from mycli.quant.recipe import Recipe
from mycli.runtime.checkpoint.model_folder import ModelFolder
from mycli.runtime.checkpoint.open_folder import open_model_folder
from mycli.runtime.engine.loading.loader import load_model
from mycli.runtime.hub.resolve import Source
from tests.benchmarks.vllm_tokens import PROMPT, PROMPTS, theirs
from tests.support.families import enliven, experts_of, packed_weights, weights_of
from tests.support.models import CPU
from tests.support.paths import PICO

ERRORS = 2.0  # standard errors of a mean over some hundred tokens
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
# What differs from `SHAPE`, by model_type; gemma3 has no head of its own.
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
    """A random model of `family` in `folder`, at 4 bits in groups of 128, as its experts want them."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **{**SHAPE, **FAMILIES[family]})
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    enliven(model)
    if config.tie_word_embeddings:  # else every token would say itself again
        model.get_input_embeddings().weight.data.mul_(0.2)
    for name, parameter in model.named_parameters():
        if name.endswith("mlp.gate.weight"):  # tokens that are sure of their experts
            parameter.data.mul_(8)
    model.bfloat16().save_pretrained(folder / "source")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(PICO / name, folder / "source" / name)
    recipe = Recipe(method, 4, 128, samples=16, seq=128)
    quantize(plan_quantization(Source("random", folder / "source"), recipe, report="none"), folder / "copy", CPU)
    return folder / "copy"


@dataclass(frozen=True)
class Judgement:
    """Of vLLM's tokens: how many are the truth's, and what they lose of a logit, in the mean.

    `allowed`: what the likeliest tokens with rounded inputs lose; `spare`: what chance adds to the difference.
    """

    same: int
    tokens: int
    lost: float
    allowed: float
    spare: float

    @property
    def ok(self) -> bool:
        """Whether they lose no more than rounding and chance explain."""
        return self.lost - self.allowed <= self.spare


def judge(truth: Tensor, rounded: Tensor, chosen: Tensor) -> Judgement:
    """Tokens `chosen` int64 [n] by the logits [n, vocab] of the truth, beside those with rounded inputs."""
    best = truth.max(-1).values
    lost = best - truth.gather(1, chosen.unsqueeze(1)).squeeze(1)
    allowed = best - truth.gather(1, rounded.argmax(-1, keepdim=True)).squeeze(1)
    spare = ERRORS * float((lost - allowed).std()) / len(chosen) ** 0.5
    return Judgement(int((lost == 0).sum()), len(chosen), float(lost.mean()), float(allowed.mean()), spare)


def rounded_rows(x: Tensor, bits: int) -> Tensor:
    """x [..., K], each row to whole multiples of its largest magnitude over 2^(bits - 1) - 1."""
    scales = x.abs().amax(-1, keepdim=True).clamp(min=1e-12) / (2 ** (bits - 1) - 1)
    return (x / scales).round() * scales


def round_inputs(model: nn.Module, folder: ModelFolder, bits: int = 8) -> None:
    """From now on what enters the packed products of `folder`, those of experts too, is rounded to `bits` a row."""

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
    """The copy in `path` as transformers reads it, in bf16, its weights unpacked."""
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    model(torch.zeros(1, 1, dtype=torch.long))  # unpacks
    return model


def differing_weights(folder: ModelFolder, reference: nn.Module) -> list[str]:
    """Names of the packed weights that are not bit for bit what compressed-tensors unpacked into `reference`."""
    ours, unpacked = packed_weights(load_model(folder, CPU).model), weights_of(reference, experts_of(folder))
    return [name for name in folder.packings if name in ours and not torch.equal(ours[name], unpacked[name])]


@torch.no_grad()
def judged(path: Path, prompts: list[list[int]], replies: list[list[int]]) -> tuple[Judgement, list[str]]:
    """What is to be said of vLLM's replies from the copy in `path`, and the weights that are not read as they are."""
    folder = open_model_folder(path)
    model = unpacked_model(path)
    differing = differing_weights(folder, model)
    nn.Module.float(model)  # what transformers calls so refuses models that were packed once
    tokens = torch.tensor([prompt + reply for prompt, reply in zip(prompts, replies, strict=True)])
    start = tokens.shape[1] - len(replies[0])
    truth = model(tokens).logits[:, start - 1 : -1].flatten(0, 1)
    round_inputs(model, folder)
    rounded = model(tokens).logits[:, start - 1 : -1].flatten(0, 1)
    return judge(truth, rounded, tokens[:, start:].flatten()), differing


def main() -> None:
    """One line a family and method; a failure ends the program with 1."""
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
