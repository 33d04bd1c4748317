"""One decoder layer, written once: attention and MLP as sequences of products that whoever runs them multiplies.

Each half is a generator over the residual stream. It yields a linear with the input that is due to it, is sent what
came out, and returns the stream that leaves. Running a layer multiplies (`complete`); calibration looks at the inputs;
both see the same pass. What a layer is made of is its `LayerSpec`. Does not know caches' insides, batches or kernels.
"""

from collections.abc import Generator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mycli.runtime.cache.kv_cache import KeyValues, Stored
from mycli.runtime.checkpoint.reader import Checkpoint
from mycli.runtime.kernels.registry import SILU_MULTIPLY
from mycli.runtime.layers.attention import attend, visible
from mycli.runtime.layers.linear import Linear
from mycli.runtime.layers.norm import RMSNorm, make_norm
from mycli.runtime.layers.rope import Rope, rotate
from mycli.runtime.models.config import ModelConfig
from mycli.runtime.models.layer_spec import AttentionSpec, LayerSpec, MlpSpec
from mycli.runtime.quantization.scheme import Packing

Masks = Mapping[int | None, Tensor | None]
Steps = Generator[tuple[Linear, Tensor], Tensor, Tensor]  # yields a product and its input, is sent its output


@dataclass(frozen=True)
class PassContext:
    """What all layers of one pass share.

    rope: cosines and sines [tokens, head_dim / 2]; masks by window: bool [tokens, length] or None, see `visible`;
    cache: where keys and values go, None to attend to the tokens of this pass alone.
    """

    rope: tuple[Tensor, Tensor]
    masks: Masks
    cache: KeyValues | None = None

    @classmethod
    def make(cls, config: ModelConfig, rope: Rope, start: int, count: int, cache: KeyValues | None) -> "PassContext":
        """For `count` new tokens from position `start` on."""
        tables = rope.tables(start, count)
        masks = {window: visible(start, count, window, tables[0].device) for window in config.distinct_windows}
        return cls(tables, masks, cache)


def complete(steps: Steps, output: Tensor | None = None) -> Tensor:
    """Run a half of a layer to its end, every product multiplied: the stream that leaves it.

    `output` is of the product that was yielded last; None for steps that have not begun.
    """
    try:
        step = next(steps) if output is None else steps.send(output)
        while True:
            linear, x = step
            output = linear(x)
            del step, x  # what is done with is let go of at once: of a prompt these are the largest tensors
            step = steps.send(output)
            del output
    except StopIteration as end:
        result: Tensor = end.value
        return result


def _normed(norm: RMSNorm | None, x: Tensor) -> Tensor:
    if norm is None:
        return x
    y: Tensor = norm(x)
    return y


class Attention(nn.Module):
    """The first half of a layer: attention with grouped queries and rotary positions."""

    def __init__(self, spec: AttentionSpec, layer: int) -> None:
        super().__init__()
        self.spec = spec
        self._layer = layer
        self.norm = make_norm(spec.norm)
        self.qkv = Linear(spec.qkv)
        self.q_norm = make_norm(spec.q_norm)
        self.k_norm = make_norm(spec.k_norm)
        self.o = Linear((spec.o,))
        self.output_norm = make_norm(spec.output_norm)
        self.products = (self.qkv, self.o)

    def steps(self, x: Tensor, context: PassContext) -> Steps:
        """x [sequences, tokens, hidden]."""
        projected = yield self.qkv, _normed(self.norm, x)
        attended = self._attended(projected, context)
        del projected
        output = yield self.o, attended
        return x + _normed(self.output_norm, output)

    def _attended(self, projected: Tensor, context: PassContext) -> Tensor:
        """q, k, v side by side [sequences, tokens, (heads + 2 kv_heads) * head_dim] to [..., heads * head_dim]."""
        spec, cache = self.spec, context.cache
        sizes = [spec.heads, spec.kv_heads, spec.kv_heads]
        heads = projected.view(*projected.shape[:2], sum(sizes), spec.head_dim)
        query, key, value = torch.split(heads, sizes, dim=2)
        query, key = _normed_heads(self.q_norm, query), _normed_heads(self.k_norm, key)
        query, key = rotate(query, *context.rope), rotate(key, *context.rope).transpose(1, 2)
        value = value.transpose(1, 2)
        stored = (Stored(key), Stored(value)) if cache is None else cache.write(self._layer, cache.length, key, value)
        return attend(query, *stored, context.masks[spec.window], spec.window)


def _normed_heads(norm: RMSNorm | None, x: Tensor) -> Tensor:
    """x [sequences, tokens, heads, head_dim], over each head or, where the norm is as wide, over all of them at
    once."""
    if norm is None or norm.weight.shape[0] == x.shape[-1]:
        return _normed(norm, x)
    return _normed(norm, x.flatten(-2)).view_as(x)


class Mlp(nn.Module):
    """The second half of a layer: gate and up, silu(gate) * up, down."""

    def __init__(self, spec: MlpSpec) -> None:
        super().__init__()
        self.spec = spec
        self.norm = make_norm(spec.norm)
        self.gate_up = Linear(spec.gate_up)
        self.down = Linear((spec.down,))
        self.output_norm = make_norm(spec.output_norm)
        self.products = (self.gate_up, self.down)

    def steps(self, x: Tensor, context: PassContext) -> Steps:
        """x [sequences, tokens, hidden]."""
        gate_up = yield self.gate_up, _normed(self.norm, x)
        activated = SILU_MULTIPLY(gate_up)
        del gate_up
        output = yield self.down, activated
        return x + _normed(self.output_norm, output)


class Block(nn.Module):
    """One layer: `halves` in order, `products` by name in order of execution, `norms` that it has."""

    def __init__(self, spec: LayerSpec) -> None:
        super().__init__()
        self.spec = spec
        self.attention = Attention(spec.attention, spec.index)
        self.mlp = Mlp(spec.mlp)
        attention, mlp = self.attention, self.mlp
        self.halves: tuple[Attention | Mlp, ...] = (attention, mlp)
        self.products = dict(zip(spec.products(), (*attention.products, *mlp.products), strict=True))
        streams = (attention.norm, attention.output_norm, mlp.norm, mlp.output_norm)
        self.norms = [norm for norm in (*streams, attention.q_norm, attention.k_norm) if norm is not None]

    def load(
        self, checkpoint: Checkpoint, packings: Mapping[str, Packing], device: torch.device, dtype: torch.dtype
    ) -> None:
        """Read this layer's tensors."""
        for norm in self.norms:
            norm.load(checkpoint, device, dtype)
        for linear in self.products.values():
            linear.load(checkpoint, packings, device, dtype)

    def forward(self, x: Tensor, context: PassContext) -> Tensor:
        """x [sequences, tokens, hidden] to the same."""
        for half in self.halves:
            x = complete(half.steps(x, context))
        return x
