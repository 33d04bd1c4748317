"""Compare compressed-tensors folders loaded by transformers and by this project.

Weights are equal bit for bit. transformers loads such a folder in two ways: with `dequantize` it multiplies dense
weights; otherwise it decompresses them at the first pass and also rounds activations as the config says. This project
does not round activations, so only that causes different logits.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
    QuantizationStatus,
    apply_quantization_config,
)
from torch import Tensor
from transformers import AutoModelForCausalLM, CompressedTensorsConfig, LlamaConfig

from mycli.runtime.checkpoint.formats import quantizable, read_dense
from mycli.runtime.checkpoint.open_folder import open_model_folder
from tests.support.grids import chosen

FLOAT: dict[str, Any] = {"num_bits": 8, "type": "float"}
FOUR: dict[str, Any] = {"num_bits": 4, "type": "float"}
# id -> format, dtype that weights are rounded to
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "pack-int4-g32": ("pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": 32}),
    "pack-int8-channel": ("pack-quantized", {"num_bits": 8, "strategy": "channel"}),
    "int8-channel": ("int-quantized", {"num_bits": 8, "strategy": "channel"}),
    "fp8-channel": ("float-quantized", {**FLOAT, "strategy": "channel"}),
    "fp8-tensor": ("float-quantized", {**FLOAT, "strategy": "tensor"}),
    "fp8-block16": ("float-quantized", {**FLOAT, "strategy": "block", "block_structure": [16, 16]}),
    "mxfp4": (
        "mxfp4-pack-quantized",
        {**FOUR, "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"},
    ),
    "nvfp4": (
        "nvfp4-pack-quantized",
        {**FOUR, "strategy": "tensor_group", "group_size": 16, "scale_dtype": "torch.float8_e4m3fn"},
    ),
}
QUICK = ("pack-int4-g32", "fp8-channel", "nvfp4")
DYNAMIC = {"num_bits": 8, "strategy": "token", "dynamic": True}


def _set_scales(module: torch.nn.Module, kind: str) -> None:
    """Set scales from each group's largest weight so that codes of all sizes occur; powers of two for MX formats."""
    shape = module.weight_scale.shape
    weight: Tensor = module.weight.float()
    largest = weight.abs().amax().expand(shape)
    if len(shape) == 2:
        largest = weight.view(shape[0], -1, shape[1], weight.shape[1] // shape[1]).abs().amax((1, 3))
    scale = {"p": largest / 7.5, "i": largest / 127, "f": largest / 448, "m": (largest / 4).log2().floor().exp2()}
    scale["n"] = largest * 20  # times the shared scale
    module.weight_scale.data.copy_(scale[kind[0]])
    if kind == "nvfp4":
        module.weight_global_scale.data.fill_(120.0)
    module.quantization_status = QuantizationStatus.FROZEN


def compressed(folder: Path, kind: str, activations: dict[str, Any] | None) -> Path:
    layout, arguments = KINDS[kind]
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "vocab_size": 96}
    config = LlamaConfig(**shape, num_attention_heads=4, num_key_value_heads=2, dtype=torch.bfloat16)
    model = AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    scheme = QuantizationScheme(
        targets=["Linear"],
        weights=QuantizationArgs(**arguments),
        input_activations=None if activations is None else QuantizationArgs(**activations),
        format=layout,
    )
    settings = QuantizationConfig(config_groups={"a": scheme}, ignore=["lm_head"], format=layout)
    apply_quantization_config(model, settings)
    for module in model.modules():
        if getattr(module, "quantization_scheme", None) is not None:
            _set_scales(module, kind)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(folder)
    return folder


def logits(model: torch.nn.Module) -> Tensor:
    tokens = torch.randint(0, 96, (2, 16), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        actual: Tensor = model(tokens).logits
    return actual


@pytest.mark.parametrize("activations", [None, DYNAMIC], ids=["weights-only", "activations-int8"])
@pytest.mark.parametrize("kind", chosen(KINDS, QUICK))
def test_weights_are_equal_and_activations_explain_the_rest(
    kind: str, activations: dict[str, Any] | None, tmp_path: Path
) -> None:
    folder = compressed(tmp_path / "model", kind, activations)
    lazy = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    settings = CompressedTensorsConfig(dequantize=True)
    dense = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, quantization_config=settings)
    first, expected = logits(lazy), logits(dense)
    assert torch.equal(first, expected) == (activations is None)

    opened = open_model_folder(folder)
    packed = [spec for spec in quantizable(opened.config) if spec.name in opened.packings]
    assert len(packed) == 7
    for spec in packed:
        ours = read_dense(opened.checkpoint(), spec, opened.packings, torch.device("cpu")).bfloat16()
        assert torch.equal(ours, dense.get_submodule(spec.name).weight), spec.name
        assert torch.equal(ours, lazy.get_submodule(spec.name).weight), spec.name
        lazy.get_submodule(spec.name).quantization_enabled = False  # disables activation quantization
    assert torch.equal(logits(lazy), expected)
