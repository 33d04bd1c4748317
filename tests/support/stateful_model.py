"""Implements a model whose recurrent state is a sum over all previous tokens, to detect wrong states."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from mycli.runtime.cache.batch import Batch
from mycli.runtime.cache.kv_cache import KVCache
from mycli.runtime.layers.rope import Rope
from mycli.runtime.layers.transformer import HiddenStateHook
from mycli.runtime.models.config import ModelConfig, llama_layer
from mycli.runtime.models.layer_spec import LayerSpec
from mycli.runtime.models.part_spec import LinearSpec
from mycli.runtime.models.recurrent_spec import ConvolutionSpec, ShortConvSpec
from tests.support.prefix_model import CONFIG, Function, PrefixModel

MODULUS = 65521


def declare(config: ModelConfig, index: int) -> LayerSpec:
    """Declare an attention layer, whose cache holds the tokens, and a recurrent layer with a state of two numbers."""
    base, hidden = llama_layer(config, index), config.hidden_size
    if index == 0:
        return base
    convolution = ConvolutionSpec("conv", 2, 2)
    mixer = ShortConvSpec(None, LinearSpec("in", 6, hidden), convolution, LinearSpec("out", hidden, 2))
    return LayerSpec(index, mixer, base.mlp)


def summed(before: tuple[int, int], tokens: list[int]) -> tuple[int, int]:
    """Return the number of tokens, and a number that depends on all of them and their order."""
    count, total = before
    for token in tokens:
        count, total = count + 1, (total * 31 + token + 1) % MODULUS
    return count, total


class StatefulModel(PrefixModel):
    """Extends `PrefixModel`: a pass compares each sequence's state with its cached tokens, and advances it."""

    def __init__(self, function: Function, vocab_size: int, max_context: int = 64) -> None:
        super().__init__(function, vocab_size, max_context, replace(CONFIG, layers=2, build_layer=declare))

    def forward(self, batch: Batch, rope: Rope, cache: KVCache, hook: HiddenStateHook | None = None) -> Tensor:
        (states,) = cache.states.layer(1)
        for chunk in batch.chunks:
            if not chunk.start:
                cache.states.clear(chunk.state)
            text = cache.read(0, chunk.blocks, chunk.length)[0].data[0, 0, : chunk.start, 0].long().tolist()
            place = states[chunk.state, 0]
            assert tuple(place.int().tolist()) == summed((0, 0), text), "the state of another text"
            new = list(chunk.tokens)
            if chunk.drafted:
                cache.states.defer((chunk.state,), partial(_take_on_accepted, place, new, chunk.state))
            else:
                _take_on(place, new, len(new))
        return super().forward(batch, rope, cache, hook)


def _take_on_accepted(place: Tensor, tokens: list[int], slot: int, accepted: Mapping[int, int]) -> None:
    _take_on(place, tokens, accepted.get(slot, 0))


def _take_on(place: Tensor, tokens: list[int], count: int) -> None:
    first, second = place.int().tolist()
    place.copy_(torch.tensor(summed((first, second), tokens[:count]), dtype=place.dtype))
