"""Writes pico with massive activations: the same function, with channels of each MLP that one token makes enormous.

python -m tests.support.sink_tokens OUT
"""

# In large models a few channels before down_proj are a thousand times larger than the others, at delimiters and at the
# first token. Here such channels are added: their rows find the token among all others, and nothing reads them, so the
# function is the same. What they may harm is what stands beside them: activations that share a scale, and the Hessian.

import sys
from pathlib import Path

import torch
from torch import Tensor

from mycli.quant.evaluate import cut, held_out_text
from mycli.quant.layer_streaming import StreamedModel
from mycli.runtime.checkpoint.open_folder import open_model_folder
from tests.support.changed_pico import write_changed
from tests.support.models import CPU
from tests.support.paths import PICO

_CHANNELS = 768  # in each MLP of pico
ADDED = 128  # channels in each MLP, evenly among the others: groups of 128 still fit
MASSIVE = 9  # of them, 1 % of all; the rest are zeros
SIZE = 2000.0  # of a massive activation; the median of all is below 1
TOKEN = "\n"
_RIDGE = 1e-3  # of the mean eigenvalue
_TOKENS = 4096


@torch.no_grad()
def _directions() -> list[Tensor]:
    # For each layer of pico, the row fp32 [hidden] whose product with the MLP's input is nearest 1 for TOKEN, else 0.
    model = StreamedModel(open_model_folder(PICO), CPU)
    tokenizer = model.folder.tokenizer()
    windows = cut(held_out_text(), tokenizer, 512, _TOKENS).windows
    chosen = (windows == tokenizer.encode(TOKEN, add_special=False)[-1]).flatten().float()
    stream, context = model.embed(windows), model.context(512)
    found = []
    for layer in range(model.config.layers):
        block, inputs = model.block(layer), list[Tensor]()
        product = block.products["gate_up"]
        product.register_forward_pre_hook(lambda _, arguments, kept=inputs: kept.append(arguments[0].flatten(0, -2)))
        model.advance(block, stream, context)
        x = torch.cat(inputs)
        gram = x.T @ x
        gram.diagonal().add_(_RIDGE * gram.diagonal().mean())
        found.append(torch.linalg.solve(gram, x.T @ chosen))
    return found


def _widened(part: Tensor, rows: Tensor) -> Tensor:
    """Put `rows` [ADDED, width] between those of `part` [channels, width]."""
    step = (len(part) + ADDED) // ADDED
    added = torch.arange(len(part) + ADDED) % step == step - 1
    result = part.new_empty(len(added), part.shape[1])
    result[~added], result[added] = part, rows.to(part.dtype)
    return result


def _plant(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    for layer, direction in enumerate(_directions()):
        prefix = f"model.layers.{layer}.mlp."
        rows = torch.zeros(ADDED, len(direction))
        rows[:: ADDED // MASSIVE + 1] = SIZE**0.5 * direction  # silu(gate) * up is about SIZE where both are its root
        for name in ("gate", "up"):
            tensors[f"{prefix}{name}_proj.weight"] = _widened(tensors[f"{prefix}{name}_proj.weight"], rows)
        down = tensors[f"{prefix}down_proj.weight"].T
        tensors[f"{prefix}down_proj.weight"] = _widened(down, torch.zeros(ADDED, down.shape[1])).T.contiguous()
    return tensors


def write(out: Path) -> Path:
    return write_changed(out, _plant, {"intermediate_size": _CHANNELS + ADDED})


if __name__ == "__main__":
    write(Path(sys.argv[1]))
