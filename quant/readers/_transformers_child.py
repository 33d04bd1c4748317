"""Reads a folder with transformers: python _transformers_child.py MODEL TOKENS ANSWER. Imports nothing of mycli."""

import hashlib
import importlib
import json
import sys
from pathlib import Path
from typing import Any

_SEPARATE = {"compressed-tensors": "CompressedTensorsConfig"}  # methods whose config can dequantize while loading


def _digests(tensor: Any) -> list[str]:
    rows = (tensor.detach().float() + 0).reshape(len(tensor) if tensor.dim() > 1 else 1, -1).contiguous().numpy()
    return [hashlib.blake2b(row.tobytes(), digest_size=8).hexdigest() for row in rows]


def _describe(tensor: Any) -> dict[str, Any]:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return {"dtype": dtype, "shape": list(tensor.shape), "rows": _digests(tensor)}


def _load(model: str) -> Any:
    transformers = importlib.import_module("transformers")
    config = json.loads((Path(model) / "config.json").read_text(encoding="utf-8"))
    method = config.get("quantization_config", {}).get("quant_method")
    settings = {}
    if method in _SEPARATE:
        settings["quantization_config"] = getattr(transformers, _SEPARATE[method])(dequantize=True)
    return transformers.AutoModelForCausalLM.from_pretrained(model, dtype="auto", device_map="cpu", **settings).eval()


def _stored(model: Any) -> dict[str, Any]:
    """Return the weights by their names in the files."""
    # transformers joins some when it loads them, such as those of experts; this is its own way back.
    loading = importlib.import_module("transformers.core_model_loading")
    state = {name: tensor for name, tensor in model.state_dict().items() if tensor.is_floating_point()}
    result: dict[str, Any] = loading.revert_weight_conversion(model, state)
    return result


def _main(model: str, tokens: list[int], answer: str) -> None:
    torch, transformers = importlib.import_module("torch"), importlib.import_module("transformers")
    read = _load(model)
    with torch.no_grad():
        if any(hasattr(part, "weight_packed") for part in read.modules()):
            read(torch.tensor([tokens[:1]]))  # some versions decode in the first pass
        weights = {
            name: {
                "dtype": str(tensor.dtype).removeprefix("torch."),
                "shape": list(tensor.shape),
                "rows": _digests(tensor),
            }
            for name, tensor in _stored(read).items()
        }
        logits = read.float()(torch.tensor([tokens])).logits[0, -1].tolist()
    program = f"transformers {transformers.__version__}"
    text = json.dumps({"program": program, "weights": weights, "logits": logits})
    Path(answer).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    _main(sys.argv[1], json.loads(sys.argv[2]), sys.argv[3])
