"""Reads a folder with vLLM: python _vllm_child.py MODEL TOKENS ANSWER. Imports nothing of mycli."""

import importlib
import importlib.metadata
import json
import os
import sys
from pathlib import Path

_LIKELIEST = 10


def _main(model: str, tokens: list[int], answer: str) -> None:
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB; its default is most of the memory
    os.environ.update(VLLM_NO_USAGE_STATS="1", HF_HUB_OFFLINE="1")
    vllm = importlib.import_module("vllm")
    engine = vllm.LLM(
        model=model,
        skip_tokenizer_init=True,
        max_model_len=4 * len(tokens),
        max_num_seqs=1,
        enforce_eager=True,
        disable_log_stats=True,
    )
    sampling = vllm.SamplingParams(temperature=0, max_tokens=1, logprobs=_LIKELIEST, ignore_eos=True, detokenize=False)
    output = engine.generate([{"prompt_token_ids": tokens}], sampling, use_tqdm=False)[0].outputs[0]
    likeliest = {str(token): entry.logprob for token, entry in output.logprobs[0].items()}
    program = f"vLLM {vllm.__version__}"
    Path(answer).write_text(json.dumps({"program": program, "weights": {}, "likeliest": likeliest}), encoding="utf-8")


if __name__ == "__main__":
    _main(sys.argv[1], json.loads(sys.argv[2]), sys.argv[3])
