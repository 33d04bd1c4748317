"""Generate random weights and models on the device, without host memory or files."""

import torch

from mycli.runtime.engine.model_runner import ModelRunner
from mycli.runtime.engine.passes import compile_passes
from mycli.runtime.kernels.registry import select_kernel
from mycli.runtime.layers.linear import Linear, dense_matmul
from mycli.runtime.layers.norm import RMSNorm
from mycli.runtime.layers.transformer import Transformer
from mycli.runtime.models.config import ModelConfig
from mycli.runtime.quantization.packed_weight import Kernel, Matmul, PackedWeight
from mycli.runtime.quantization.scheme import Packing

DEVIATION = 0.02  # standard deviation of weights


def packed(n: int, k: int, packing: Packing, device: torch.device) -> PackedWeight:
    """Return uniform random codes with bf16 scales of both signs, so that weights deviate by about `DEVIATION`."""
    words = torch.randint(-(1 << 31), 1 << 31, (n, packing.words(k)), device=device, dtype=torch.int32)
    step = DEVIATION * 12**0.5 / (1 << packing.bits)
    scales = torch.randn(n, packing.groups(k), device=device).bfloat16() * step
    return PackedWeight(words, scales, packing, k)


def kernel_of(weight: PackedWeight) -> Kernel:
    """Return the kernel that a model would use."""
    return select_kernel(weight.packing, weight.out_features, weight.in_features, weight.packed.device, torch.bfloat16)


def dense(n: int, k: int, device: torch.device) -> torch.Tensor:
    """Return a bf16 weight [N, K]."""
    return torch.empty(n, k, dtype=torch.bfloat16, device=device).normal_(0, DEVIATION)


def model(config: ModelConfig, packing: Packing | None, device: torch.device) -> tuple[ModelRunner, str]:
    """Return a bf16 model that can run, and the name of its kernel. Linears that share an input are one product."""
    made, names = Transformer(config), set[str]()

    def product(linear: Linear) -> Matmul:
        if packing is None:
            return dense_matmul(dense(linear.out_features, linear.in_features, device))
        weight = packed(linear.out_features, linear.in_features, packing, device)
        kernel = kernel_of(weight)
        names.add(kernel.name)
        return kernel.prepare(weight, torch.bfloat16)

    made.embedding = dense(config.vocab_size, config.hidden_size, device)
    for module in made.modules():
        if isinstance(module, RMSNorm):
            module.weight = torch.ones(module.weight.shape, dtype=torch.bfloat16, device=device)
        elif isinstance(module, Linear):
            tied = module is made.head and config.tie_embeddings
            module.replace(made.embedding if tied else product(module))
    if packing is not None and device.type == "cuda":
        passes = compile_passes(made, "auto", lambda declined: names.add(str(declined)))
        names.add("launched one by one" if len(passes.passes) == 1 else "fused, replayed")
        return ModelRunner(made, passes=passes), ", ".join(sorted(names))
    return ModelRunner(made), ", ".join(sorted(names)) or "dense"
