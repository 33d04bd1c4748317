"""Writes pico with outlier channels: the same function, bit for bit, with weights that are hard to quantize.

python -m tests.support.planted_outliers OUT [--kind outliers|heavy-tails]
"""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from tests.support.changed_pico import write_changed

Kind = Literal["outliers", "heavy-tails"]
_LAYERS, _HEADS, _KV_HEADS, _HEAD_DIM = 6, 4, 2, 64
_SHARE = 0.01  # of the channels


def _factors(size: int, kind: Kind, generator: torch.Generator) -> Tensor:
    # Powers of two up to 64: neither a product nor a stored value is rounded. Half of them are below one.
    if kind == "outliers":
        factors = torch.ones(size)
        chosen = torch.randperm(size, generator=generator)[: max(2, round(size * _SHARE))]
        factors[chosen[::2]], factors[chosen[1::2]] = 64.0, 1 / 64
        return factors
    normal = torch.randn(4, size, generator=generator)
    student = normal[0] / normal[1:].square().mean(0).sqrt()  # three degrees of freedom
    return student.round().clamp(-6, 6).exp2()


def plant(tensors: dict[str, Tensor], kind: Kind, seed: int = 0) -> dict[str, Tensor]:
    """Return the tensors of pico with gains and rows multiplied by factors, and the columns behind them divided."""
    generator = torch.Generator().manual_seed(seed)
    result = dict(tensors)

    def scale(name: str, factors: Tensor) -> None:
        result[name] = (result[name].float() * factors).to(result[name].dtype)

    for layer in range(_LAYERS):
        prefix = f"model.layers.{layer}."
        for norm, readers in _norms(prefix):
            factors = _factors(len(result[norm]), kind, generator)
            scale(norm, factors)
            for reader in readers:
                scale(reader, 1 / factors)
        values = _factors(_KV_HEADS * _HEAD_DIM, kind, generator)
        scale(f"{prefix}self_attn.v_proj.weight", values.unsqueeze(1))
        copies = values.view(_KV_HEADS, 1, _HEAD_DIM).expand(-1, _HEADS // _KV_HEADS, -1).reshape(-1)
        scale(f"{prefix}self_attn.o_proj.weight", 1 / copies)
        inner = _factors(len(result[f"{prefix}mlp.up_proj.weight"]), kind, generator)
        scale(f"{prefix}mlp.up_proj.weight", inner.unsqueeze(1))
        scale(f"{prefix}mlp.down_proj.weight", 1 / inner)
    return result


def _norms(prefix: str) -> Iterator[tuple[str, list[str]]]:
    yield f"{prefix}input_layernorm.weight", [f"{prefix}self_attn.{name}_proj.weight" for name in "qkv"]
    mlp = [f"{prefix}mlp.{name}_proj.weight" for name in ("gate", "up")]
    yield f"{prefix}post_attention_layernorm.weight", mlp


def write(out: Path, kind: Kind = "outliers") -> Path:
    return write_changed(out, lambda tensors: plant(tensors, kind))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder to write")
    parser.add_argument("--kind", choices=("outliers", "heavy-tails"), default="outliers")
    options = parser.parse_args()
    write(options.out, options.kind)


if __name__ == "__main__":
    main()
