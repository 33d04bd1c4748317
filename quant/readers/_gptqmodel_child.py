"""Reads a folder with GPTQModel: python _gptqmodel_child.py MODEL TOKENS ANSWER. Imports nothing of mycli."""

import hashlib
import importlib
import importlib.metadata
import json
import sys
from pathlib import Path
from typing import Any


def _describe(tensor: Any) -> dict[str, Any]:
    rows = (tensor.detach().float() + 0).reshape(len(tensor) if tensor.dim() > 1 else 1, -1).contiguous().numpy()
    digests = [hashlib.blake2b(row.tobytes(), digest_size=8).hexdigest() for row in rows]
    dtype = str(tensor.dtype).removeprefix("torch.")
    return {"dtype": dtype, "shape": list(tensor.shape), "rows": digests}


def _unpack(part: Any) -> Any:
    """Return the weight [outputs, inputs] of a packed layer, by GPTQModel's own functions."""
    if hasattr(part, "dequantize_weight"):
        return part.dequantize_weight().T
    awq = importlib.import_module("gptqmodel.quantization.awq.utils.packing_utils")
    return awq.dequantize_gemm(part.qweight, part.qzeros, part.scales, part.bits, part.group_size).T


def _main(model: str, tokens: list[int], answer: str) -> None:
    torch, gptqmodel = importlib.import_module("torch"), importlib.import_module("gptqmodel")
    config = json.loads((Path(model) / "config.json").read_text(encoding="utf-8"))
    # The plain kernels, because others repack weights; fp16, because in bf16 it rounds the fp16 scales of the file.
    backend = "torch_awq" if config["quantization_config"]["quant_method"] == "awq" else "torch"
    read = gptqmodel.GPTQModel.load(model, device="cpu", backend=backend, dtype=torch.float16).model.eval()
    packed = {name: part for name, part in read.named_modules() if hasattr(part, "qweight")}
    parts = {f"{name}.{parameter}" for name in packed for parameter in ("scales", "qzeros", "qweight", "g_idx")}
    state = {name: tensor for name, tensor in read.state_dict().items() if tensor.is_floating_point()}
    weights = {name: _describe(tensor) for name, tensor in state.items() if name not in parts}
    # Before the first pass, in which kernels may repack.
    weights |= {f"{name}.weight": _describe(_unpack(part)) for name, part in packed.items()}
    with torch.no_grad():
        logits = read(torch.tensor([tokens])).logits[0, -1].float().tolist()
    program = f"GPTQModel {importlib.metadata.version('gptqmodel')}"
    Path(answer).write_text(json.dumps({"program": program, "weights": weights, "logits": logits}), encoding="utf-8")


if __name__ == "__main__":
    _main(sys.argv[1], json.loads(sys.argv[2]), sys.argv[3])
