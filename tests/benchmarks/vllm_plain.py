"""Adds a plain kernel to vLLM's CPU build for the widths that it lacks: 8, 3 and 2 bits.

Runs in vLLM's own environment, registered in every rank as a vLLM plugin (`vllm_tokens` makes the entry point). vLLM
reads the folder and shards it over the ranks; the kernel dequantizes its shard of a packed weight after loading.
Imports nothing of this project: it follows docs/format.md independently.
"""

from typing import Any


def register() -> None:
    import torch
    from vllm.model_executor.kernels.linear import register_linear_kernel
    from vllm.model_executor.kernels.linear.mixed_precision.MPLinearKernel import MPLinearKernel
    from vllm.platforms import PlatformEnum

    class PlainLinearKernel(MPLinearKernel):  # type: ignore[misc]  # vLLM is not installed where mypy runs
        @classmethod
        def get_min_capability(cls) -> int:
            return -1

        @classmethod
        def can_implement(cls, c: Any) -> tuple[bool, str | None]:
            return not c.zero_points, "symmetric weights only"

        def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
            packed, scales, _ = self._get_weight_params(layer)
            bits, columns = self.config.weight_type.size_bits, self.config.partition_weight_shape[0]
            words = packed.data.to(torch.int64) & 0xFFFFFFFF
            pairs = words | torch.nn.functional.pad(words[:, 1:], (0, 1)) << 32  # a field may continue in the next word
            first = torch.arange(columns) * bits
            codes = pairs[:, first // 32] >> first % 32 & (1 << bits) - 1
            each = columns // scales.shape[1]
            wide = scales.data.float().repeat_interleave(each, dim=1)
            layer.plain = ((codes - (1 << bits - 1)) * wide).to(self.config.act_type)

        def apply_weights(
            self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
        ) -> torch.Tensor:
            return torch.nn.functional.linear(x, layer.plain, bias)

    register_linear_kernel(PlainLinearKernel, PlatformEnum.CPU)
