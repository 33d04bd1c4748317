"""vLLM on the CPU reads what we quantize of other families than pico's, and says what we say: greedy tokens.

    python -m tests.benchmarks.vllm_families [FAMILY ...] --python ENV/bin/python [--method gptq awq]

vLLM lives in an environment of its own (the Makefile says how it is made). Of each family transformers makes a small
random model, which is quantized at 4 bits in groups of 128: of experts vLLM's CPU build (0.32) takes no others. It
computes in bf16: each of its tokens must be ours, or within `TIE` of ours in the logits of our own pass in fp32 over
its reply. On AMX it multiplies packed weights by activations of 8 bits, experts always, others unless
VLLM_CPU_INT4_W4A8=0: of qwen3_moe more tokens differ than ties explain (docs/families.md says how many).
"""

import argparse
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers

from mycli.quant.pipeline import quantize
from mycli.quant.planning.plan import plan_quantization
from mycli.quant.recipe import Recipe
from mycli.runtime.hub.resolve import Source
from tests.benchmarks.vllm_tokens import PROMPT, PROMPTS, agreement, theirs
from tests.support.families import enliven
from tests.support.models import CPU
from tests.support.paths import PICO

TIE = 0.15  # of a logit, whose spread is 2 to 4
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
            same, tokens, worst = agreement(folder, prompts, replies)
        distinct = len({token for reply in replies for token in reply})
        failed |= worst > TIE
        print(
            f"{family}, {method}: {same} of {tokens} greedy tokens are ours, the others at most {worst:.3f} below in"
            f" the logit ({distinct} different ones): {'ok' if worst <= TIE else 'FAILED'}",
            flush=True,
        )
    raise SystemExit(failed)


if __name__ == "__main__":
    main()
