"""Test whole models on CUDA against the CPU in fp32: dense and packed, prefill and decoding; run by `make test-gpu`."""

import pytest
import torch

from mycli.runtime.checkpoint.open_folder import open_model_folder
from mycli.runtime.device.placement import Placement
from mycli.runtime.engine.loading.loader import load_model
from mycli.runtime.kernels.reference import DequantizeKernel
from mycli.runtime.quantization.packed_weight import PackedWeight, dequantize, pack
from mycli.runtime.quantization.scheme import BITS, Packing
from tests.support.engines import contiguous_engine, tokens_of, whole
from tests.support.paths import PICO
from tests.support.random_tensors import codes, normal

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
PROMPT = [1, 300, 301, 302, 5, 17, 400, 12, 800, 44, 2]


def logits(device: str, dtype: torch.dtype) -> torch.Tensor:
    model = load_model(open_model_folder(PICO), Placement(torch.device(device), dtype)).model
    tokens = torch.arange(3, 203, device=model.device).unsqueeze(0)
    return whole(model, tokens).cpu()


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-3), (torch.bfloat16, 0.05)], ids=["fp32", "bf16"])
def test_logits_equal_the_cpu(dtype: torch.dtype, bound: float) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    reference = logits("cpu", torch.float32)
    assert ((logits("cuda", dtype) - reference).norm() / reference.norm()) < bound


def test_greedy_tokens_equal_the_cpu() -> None:
    drawn = []
    for device in ("cpu", "cuda"):
        runner = load_model(open_model_folder(PICO), Placement(torch.device(device), torch.float32))
        drawn.append(tokens_of(contiguous_engine(runner, 64), PROMPT, 24))
    assert drawn[0] == drawn[1]


@pytest.mark.parametrize("bits", BITS)
def test_packed_products(bits: int) -> None:
    scales = normal(96, 4).bfloat16()
    weight = PackedWeight(pack(codes(bits, 96, 256), bits).cuda(), scales.cuda(), Packing(bits, 64), 256)
    x = normal(5, 256, seed=1).bfloat16()
    expected = x.double() @ dequantize(weight).cpu().double().t()
    actual = DequantizeKernel().prepare(weight, torch.bfloat16)(x.cuda()).cpu().double()
    assert ((actual - expected).norm() / expected.norm()) < 5e-3
