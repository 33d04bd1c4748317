"""Runs passes in native calls for whole layers, and step by step; both must be bit-identical."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from mycli.runtime.cache.batch import Chunk
from mycli.runtime.cache.kv_cache import KVCache, cache_dtype
from mycli.runtime.checkpoint.open_folder import open_model_folder
from mycli.runtime.device.placement import Placement
from mycli.runtime.engine.loading.loader import load_model
from mycli.runtime.engine.model_runner import ModelRunner
from mycli.runtime.engine.passes import Passes, compile_passes
from mycli.runtime.engine.passes.plain import PlainPass
from mycli.runtime.errors import Declined
from mycli.runtime.kernels.cpu.layer import (
    CAttentionPart,
    CChain,
    CChannelDeltaPart,
    CConvolutionPart,
    CDeltaPart,
    CExpertsPart,
    CLatentPart,
    CMambaPart,
    CMlpPart,
    CParallelMixersPart,
    CParallelPart,
    CPerLayerPart,
    CSelectivePart,
)
from mycli.runtime.kernels.cpu.library import build
from mycli.runtime.kernels.registry import prepare_product
from mycli.runtime.layers.linear import Linear
from mycli.runtime.layers.transformer import Transformer
from mycli.runtime.models.config import KvDtype
from mycli.runtime.quantization.packed_weight import PackedWeight, pack
from mycli.runtime.quantization.scheme import Packing

CONTEXT = 32


BLOCK_SIZE = 8


WIDE = {"hidden_size": 128, "intermediate_size": 96}  # whole vectors in every head and MLP


def plain_passes(model: Transformer) -> Passes:
    return Passes((PlainPass(model),), {})


KINDS: tuple[KvDtype, ...] = ("bf16", "int8", "int4")


# Two sequences in scattered blocks and state slots: partial prefill, one after the other, together, rolled back by one.
PASSES: Sequence[Sequence[Chunk]] = (
    [Chunk(list(range(4, 17)), 0, (3, 1), 13, 2)],
    [Chunk([40], 13, (3, 1), 1, 2), Chunk(list(range(50, 59)), 0, (5, 2), 9)],
    [Chunk([41, 42], 14, (3, 1), 2, 2, drafted=1), Chunk([60], 9, (5, 2), 1, 0, drafted=1)],
    [Chunk([43], 15, (3, 1), 1, 2), Chunk([61], 9, (5, 2), 1)],
)


ACCEPTED = {2: 1, 0: 0}  # accepted draft tokens of the third pass, by state slot


NAMES = {
    CAttentionPart: "attention",
    CMlpPart: "mlp",
    CExpertsPart: "experts",
    CLatentPart: "latent",
    CChannelDeltaPart: "kimi delta",
    CMambaPart: "mamba",
    CParallelPart: "parallel",
    CParallelMixersPart: "attention and mamba",
    CPerLayerPart: "per-layer inputs",
    CSelectivePart: "mamba-1",
    CDeltaPart: "delta",
    CConvolutionPart: "convolution",
}


class OnlyCalled:
    """Wraps a weight that is multiplied only by its own `__call__`."""

    def __init__(self, weight: Tensor) -> None:
        self._weight = weight
        self.nbytes = weight.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        return functional.linear(x, self._weight)

    def dequantize(self) -> Tensor:
        return self._weight


def load_bf16(folder: Path, kv: KvDtype = "bf16") -> ModelRunner:
    return load_model(open_model_folder(folder), Placement(torch.device("cpu"), torch.bfloat16, kv))


def run_passes(model: Transformer, kv: KvDtype, passes: Passes) -> list[Tensor]:
    """Return the logits of `PASSES` and the contents of the cache after them."""
    runner = ModelRunner(model, kv, passes)
    cache = KVCache(runner.config, 6, BLOCK_SIZE, runner.device, cache_dtype(kv, runner.dtype), slots=4)
    runner.rope(CONTEXT)
    logits = []
    for chunks in PASSES:
        logits.append(runner.run(chunks, cache))
        for slot, count in ACCEPTED.items():
            cache.states.commit_drafts(slot, count)
    parts = [part for layer in range(runner.config.layers) for part in cache.all(layer)]
    scales = [part.scales for part in parts if part.scales is not None]
    recurrent = [spec.index for spec in runner.config.layer_specs if spec.recurrent is not None]
    states = [state for layer in recurrent for state in cache.states.layer(layer)]
    return [one.nan_to_num(77) for one in (*logits, *(part.data for part in parts), *scales, *states)]


def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record the kinds of parts that native code runs, in order, with "|" after each call."""
    found: list[str] = []
    plain = CChain.__call__

    def counting(self: CChain, *arguments: Any) -> Tensor:
        found.extend([*(NAMES[type(part)] for part in self.parts), "|"])
        return plain(self, *arguments)

    monkeypatch.setattr(CChain, "__call__", counting)
    return found


def same_as_by_steps(runner: ModelRunner, kv: KvDtype, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Compare the CPU pass of the current weights with the plain pass; return the parts that ran natively."""
    with monkeypatch.context() as patch:
        ran = counted(patch)
        native = run_passes(runner.model, kv, compile_passes(runner.model, kv))
    plain = run_passes(runner.model, kv, plain_passes(runner.model))
    for index, (one, other) in enumerate(zip(native, plain, strict=True)):
        assert torch.equal(one, other), index
    return ran


HEAD = {"head_dim": 32}


def pack_linear(linear: Linear, bits: int, group: int, seed: int = 0) -> None:
    """Replace the weight of a linear with random codes in the packed layout."""
    generator = torch.Generator().manual_seed(seed)
    shape = linear.out_features, linear.in_features
    codes = torch.randint(0, 1 << bits, shape, generator=generator).to(torch.uint8)
    scales = torch.rand(shape[0], shape[1] // group, generator=generator).bfloat16() / (8 << bits)
    weight = PackedWeight(pack(codes, bits), scales, Packing(bits, group), shape[1])
    linear.replace(prepare_product(weight, torch.bfloat16))


def need_native_code() -> None:
    if isinstance(found := build.native(), Declined):
        pytest.skip(f"no native code here: {found}")
