"""A kernel for vLLM's CPU build at the widths that it has none for, 8, 3 and 2 bits: plain, in vLLM's own environment.

Registered as vLLM's plugins are (`vllm_tokens` makes the entry point), in every rank. What reads the folder and splits
it over the ranks is vLLM; here its part of a packed weight becomes dense when it is there. Imports nothing of this
project: it follows docs/format.md on its own.
"""

from typing import Any


def register() -> None:
    """The plugin."""
    import torch
    from vllm.model_executor.kernels.linear import register_linear_kernel
    from vllm.model_executor.kernels.linear.mixed_precision.MPLinearKernel import MPLinearKernel
    from vllm.platforms import PlatformEnum

    class PlainLinearKernel(MPLinearKernel):  # type: ignore[misc]  # vLLM is not in the environment of the checks
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
            pairs = words | torch.nn.functional.pad(words[:, 1:], (0, 1)) << 32  # a field may go on in the next word
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
