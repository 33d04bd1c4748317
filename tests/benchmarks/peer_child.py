"""Quantizes with another program in its own environment: PROGRAM SOURCE WINDOWS TARGET BITS GROUP METHOD.

Run by `tests.benchmarks.peers`. Each program has its defaults, with symmetric groups, for every linear except the head:
llm-compressor orders columns by activation, GPTQModel within groups, and auto-round takes 200 steps a block.
"""

import sys
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer


def compressor(source: str, windows: Tensor, target: str, bits: int, group: int, method: str) -> None:
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import GPTQModifier, QuantizationModifier

    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    weights = {"num_bits": bits, "type": "int", "symmetric": True, "strategy": "group", "group_size": group}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    kind = GPTQModifier if method == "gptq" else QuantizationModifier
    data = Dataset.from_dict({"input_ids": windows.tolist(), "attention_mask": torch.ones_like(windows).tolist()})
    oneshot(
        model=model,
        dataset=data,
        recipe=kind(config_groups=groups, ignore=["lm_head"]),
        num_calibration_samples=len(windows),
        max_seq_length=windows.shape[1],
    )
    model.save_pretrained(target, save_compressed=True)


def gptq_model(source: str, windows: Tensor, target: str, bits: int, group: int, method: str) -> None:
    from gptqmodel import BACKEND, GPTQModel, QuantizeConfig

    assert method == "gptq"
    model = GPTQModel.load(source, QuantizeConfig(bits=bits, group_size=group, sym=True), device="cpu")
    data = [{"input_ids": row, "attention_mask": [1] * len(row)} for row in windows.tolist()]
    model.quantize(data, batch_size=8, backend=BACKEND.TORCH)
    model.save(target)


def auto_round(source: str, windows: Tensor, target: str, bits: int, group: int, method: str) -> None:
    from auto_round import AutoRound
    from torch.utils.data import DataLoader

    assert method == "signround"
    AutoRound(
        AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16),
        AutoTokenizer.from_pretrained(source),
        scheme={"bits": bits, "group_size": group, "sym": True, "data_type": "int"},
        dataset=DataLoader([{"input_ids": row} for row in windows], batch_size=8),
        seqlen=windows.shape[1],
        nsamples=len(windows),
        device_map="cpu",
        enable_torch_compile=False,  # compiling takes longer than a small model
    ).quantize_and_save(target, format="auto_gptq")
    (config,) = Path(target).rglob("config.json")  # since 0.16 in a folder named after model and widths
    for file in config.parent.iterdir():
        file.rename(Path(target, file.name))


def main() -> None:
    program, source, windows, target, bits, group, method = sys.argv[1:]
    quantize = {"llm-compressor": compressor, "GPTQModel": gptq_model, "auto-round": auto_round}[program]
    quantize(source, torch.load(windows, weights_only=True), target, int(bits), int(group), method)


if __name__ == "__main__":
    main()
