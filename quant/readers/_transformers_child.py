"""Reads a folder with transformers: python _transformers_child.py MODEL TOKENS ANSWER. Imports nothing of mycli."""

import hashlib
import importlib
import importlib.metadata
import json
import sys
from pathlib import Path
from typing import Any

_SEPARATE = {"compressed-tensors": "CompressedTensorsConfig"}  # methods whose config can dequantize while loading

_BITSANDBYTES = "bitsandbytes"  # dequantizes after loading


def _describe(tensor: Any) -> dict[str, Any]:
    rows = (tensor.detach().float() + 0).reshape(len(tensor) if tensor.dim() > 1 else 1, -1).contiguous().numpy()
    digests = [hashlib.blake2b(row.tobytes(), digest_size=8).hexdigest() for row in rows]
    dtype = str(tensor.dtype).removeprefix("torch.")
    return {"dtype": dtype, "shape": list(tensor.shape), "rows": digests}


def _load(model: str, method: str | None) -> Any:
    transformers = importlib.import_module("transformers")
    settings = {}
    if method in _SEPARATE:
        settings["quantization_config"] = getattr(transformers, _SEPARATE[method])(dequantize=True)
    read = transformers.AutoModelForCausalLM.from_pretrained(model, dtype="auto", device_map="cpu", **settings).eval()
    return read.dequantize() if method == _BITSANDBYTES else read


def _packed(model: Any) -> dict[str, Any]:
    """Return the linear layers that GPTQModel keeps packed, of GPTQ and AWQ folders, by name."""
    return {name: part for name, part in model.named_modules() if hasattr(part, "qweight")}


def _stored(model: Any, packed: dict[str, Any], dequantized: bool) -> dict[str, Any]:
    """Return the weights by their names in the files."""
    # transformers joins some when it loads them, such as those of experts; this is its own way back.
    loading = importlib.import_module("transformers.core_model_loading")
    parameters = {f"{name}.{parameter}" for name in packed for parameter in ("scales", "qzeros", "qweight", "g_idx")}
    state = {name: tensor for name, tensor in model.state_dict().items() if tensor.is_floating_point()}
    state = {name: tensor for name, tensor in state.items() if name not in parameters}
    # GPTQModel unpacks to [inputs, outputs].
    state |= {f"{name}.weight": part.dequantize_weight().T for name, part in packed.items()}
    if dequantized:
        # The way back of packed experts fails in transformers 5.23 ("Undefined Operation encountered!"): it expects
        # scales and shapes that are gone. The way back of the architecture alone has none.
        model._weight_conversions = None
    result: dict[str, Any] = loading.revert_weight_conversion(model, state)
    return result


def _main(model: str, tokens: list[int], answer: str) -> None:
    torch, transformers = importlib.import_module("torch"), importlib.import_module("transformers")
    config = json.loads((Path(model) / "config.json").read_text(encoding="utf-8"))
    method = config.get("quantization_config", {}).get("quant_method")
    read = _load(model, method)
    program = f"transformers {transformers.__version__}"
    with torch.no_grad():
        if any(hasattr(part, "weight_packed") for part in read.modules()):
            read(torch.tensor([tokens[:1]]))  # some versions decode in the first pass
        dequantized = method == _BITSANDBYTES or method in _SEPARATE
        packed = _packed(read)  # before the first pass, in which kernels may repack
        weights = {name: _describe(tensor) for name, tensor in _stored(read, packed, dequantized).items()}
        if packed:  # their kernels have no fp32
            program += f" with GPTQModel {importlib.metadata.version('gptqmodel')}"
        else:
            read = read.float()
        logits = read(torch.tensor([tokens])).logits[0, -1].tolist()
    text = json.dumps({"program": program, "weights": weights, "logits": logits})
    Path(answer).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    _main(sys.argv[1], json.loads(sys.argv[2]), sys.argv[3])
