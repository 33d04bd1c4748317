"""Prints greedy tokens of vLLM: python vllm_child.py FOLDER RANKS DTYPE TOKENS [[ids], ...].

Runs in vLLM's own environment and prints one JSON list of lists. Imports nothing of this project.
"""

import json
import sys


def main() -> None:
    from vllm import LLM, SamplingParams

    folder, ranks, dtype, tokens, prompts = sys.argv[1:6]
    model = LLM(
        folder,
        skip_tokenizer_init=True,
        max_model_len=256,
        max_num_seqs=8,
        tensor_parallel_size=int(ranks),
        dtype=dtype,
        enforce_eager=True,
        disable_log_stats=True,
    )
    sampling = SamplingParams(temperature=0, max_tokens=int(tokens), ignore_eos=True, detokenize=False)
    outputs = model.generate([{"prompt_token_ids": ids} for ids in json.loads(prompts)], sampling, use_tqdm=False)
    print("tokens " + json.dumps([list(output.outputs[0].token_ids) for output in outputs]))


if __name__ == "__main__":
    main()
