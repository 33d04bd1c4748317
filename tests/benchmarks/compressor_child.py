"""Quantizes with llm-compressor in its own environment: SOURCE WINDOWS TARGET BITS GROUP METHOD.

Run by `tests.benchmarks.peers`. Uses llm-compressor's defaults (columns ordered by activation, static groups) with
symmetric groups, for every linear except the head.
"""

import sys

import torch
from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modifiers.quantization import GPTQModifier, QuantizationModifier
from transformers import AutoModelForCausalLM


def main() -> None:
    source, windows, target, bits, group, method = sys.argv[1:]
    tokens = torch.load(windows, weights_only=True)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    weights = {"num_bits": int(bits), "type": "int", "symmetric": True, "strategy": "group", "group_size": int(group)}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    kind = GPTQModifier if method == "gptq" else QuantizationModifier
    data = Dataset.from_dict({"input_ids": tokens.tolist(), "attention_mask": torch.ones_like(tokens).tolist()})
    oneshot(
        model=model,
        dataset=data,
        recipe=kind(config_groups=groups, ignore=["lm_head"]),
        num_calibration_samples=len(tokens),
        max_seq_length=tokens.shape[1],
    )
    model.save_pretrained(target, save_compressed=True)


if __name__ == "__main__":
    main()
