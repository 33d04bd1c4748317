"""Writes pico as a mixture of experts: the same function, with experts that see few or many tokens.

python -m tests.support.skewed_mixture OUT
"""

# Every expert has the weights of pico's MLP, and the weights of the chosen two sum to one, so any routing gives the
# same function. A longer row of the router wins more often, so the shares of experts are far apart, as in mixtures
# whose load is not balanced.

import sys
from pathlib import Path

import torch
from torch import Tensor

from tests.support.changed_pico import write_changed

EXPERTS, CHOSEN = 8, 2
_LAYERS = 6
_SKEW = 2.0  # the ratio of the lengths of neighbouring rows of the router
_NAMES = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}


def mixture(tensors: dict[str, Tensor], seed: int = 0) -> dict[str, Tensor]:
    """Return the tensors of pico with `EXPERTS` copies of each MLP and a router of random rows."""
    generator = torch.Generator().manual_seed(seed)
    result = dict(tensors)
    for layer in range(_LAYERS):
        prefix = f"model.layers.{layer}."
        parts = {name: result.pop(f"{prefix}mlp.{name}.weight") for name in _NAMES.values()}
        for expert in range(EXPERTS):
            for name, part in _NAMES.items():
                result[f"{prefix}block_sparse_moe.experts.{expert}.{name}.weight"] = parts[part].clone()
        hidden = parts["gate_proj"].shape[1]
        lengths = _SKEW ** -torch.arange(EXPERTS, dtype=torch.float32)
        router = torch.randn(EXPERTS, hidden, generator=generator) * lengths.unsqueeze(1)
        result[f"{prefix}block_sparse_moe.gate.weight"] = router.to(parts["gate_proj"].dtype)
    return result


def write(out: Path) -> Path:
    fields = {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "num_local_experts": EXPERTS,
        "num_experts_per_tok": CHOSEN,
        "sliding_window": None,
    }
    return write_changed(out, mixture, fields)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
