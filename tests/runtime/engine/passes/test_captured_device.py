"""Test that the captured pass of no family waits for the device or copies from the host: either ends a capture.

The meta device stands for the GPU, and what the GPU's kernels return has their shapes.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mycli.runtime.cache.kv_cache import KVCache
from mycli.runtime.checkpoint.open_folder import open_model_folder
from mycli.runtime.device.placement import Placement
from mycli.runtime.engine.loading.loader import load_model
from mycli.runtime.engine.passes.captured import CapturedStep
from mycli.runtime.engine.passes.graphs import StepInput
from mycli.runtime.kernels.paged import KEY_BLOCK
from mycli.runtime.kernels.recurrent import DeltaSizes, ScanSizes
from mycli.runtime.kernels.routed import Route
from mycli.runtime.kernels.triton import experts, latent, paged_attention, recurrent
from mycli.runtime.layers.feed_forward import Experts
from mycli.runtime.layers.rope import Rope
from mycli.runtime.models.experts_spec import RoutingSpec
from tests.runtime.engine.passes.test_captured import FIXED, HEADS, QUICK
from tests.support.families import CASES, make
from tests.support.grids import chosen
from tests.support.native_parts import WIDE

META = torch.device("meta")
EXPERT_SCALES = "gemma4-8top2"
# Latent experts; low-rank queries; groups of experts; factors of experts.
OTHERS = [
    "nemotron_h-groups-latent-experts-odd-sizes-biases-unnormalized",
    "kimi_linear-groups-odd-sizes-low-rank-queries-unnormalized",
    "bailing_hybrid-8top3",
    "deepseek_v3-groups-yarn",
    EXPERT_SCALES,
]


class Copies(TorchDispatchMode):
    """Notes each operation by which numbers of the host reach the device, other than those of a launch."""

    def __init__(self) -> None:
        super().__init__()
        self.found = list[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves((args, kwargs, out)) if isinstance(leaf, Tensor)]
        on_host = [tensor for tensor in tensors if tensor.device != META]
        # A factor that is rounded on the host is a tensor without dimensions there, and then a number.
        copied = "copy" in str(func) and 0 < len(on_host) < len(tensors)
        if copied or any(tensor.ndim for tensor in on_host):
            self.found.append(str(func))
        return out


class Made(TorchFunctionMode):
    """Notes each tensor on the device that is made of a list, of which no operation shows."""

    def __init__(self) -> None:
        super().__init__()
        self.found = list[str]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in (torch.tensor, torch.as_tensor, Tensor.new_tensor) and out.device == META:
            self.found.append(func.__name__)
        return out


def attended(query: Tensor, *rest: object) -> Tensor:
    return query.flatten(1)


def convolved(x: Tensor, weight: Tensor, *rest: object) -> Tensor:
    return x.new_empty(len(x), weight.shape[1])


def read(x: Tensor, *rest: object) -> Tensor:
    sizes = rest[-1]
    assert isinstance(sizes, DeltaSizes | ScanSizes)
    return x.new_empty(len(x), sizes.heads * (sizes.value_dim if isinstance(sizes, DeltaSizes) else sizes.head_dim))


def routed(scores: Tensor, routing: RoutingSpec, correction: Tensor | None = None) -> Route:
    (tokens, count), top_k = scores.shape, routing.top_k
    shapes = (count + 1,), (tokens * top_k,), (tokens, top_k)
    integers = (torch.empty(shape, dtype=torch.int32, device=META) for shape in shapes)
    return Route(list(range(count)), *integers, torch.empty(tokens, top_k, device=META))


def summed(x: Tensor, places: Tensor, weights: Tensor) -> Tensor:
    return x.new_empty(len(places), x.shape[1])


@pytest.fixture(autouse=True)
def on_device(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("triton_attend_paged", "triton_attend_prompt"):
        monkeypatch.setattr(paged_attention, name, attended)
    monkeypatch.setattr(latent, "triton_latent_attention", lambda query, *rest: torch.empty_like(query))
    monkeypatch.setattr(recurrent, "triton_convolve", convolved)
    for name in ("triton_delta_rule", "triton_scan"):
        monkeypatch.setattr(recurrent, name, read)
    monkeypatch.setattr(experts, "triton_route", routed)
    monkeypatch.setattr(experts, "triton_weighted_sum", summed)


def copies(case: str, folder: Path, stored: torch.dtype, patch: pytest.MonkeyPatch) -> list[str]:
    """Return the operations of passes without and with padding that copy from the host."""
    model_type, changes = CASES[case]
    make(folder, model_type, {**WIDE, **changes, **HEADS.get(case, {})})
    model = load_model(open_model_folder(folder), Placement(META, torch.bfloat16)).model
    widths = dict[int, int]()
    for block in model.layers():
        block.freeze()
        for linears in (block.mlp.gate_up, block.mlp.down) if isinstance(block.mlp, Experts) else ():
            widths[id(linears.operands(range(len(linears)))[0])] = linears[0].out_features

    def multiplied(weights: object, x: Tensor, starts: Tensor, tokens: Tensor | None) -> Tensor:
        return x.new_empty(len(x if tokens is None else tokens), widths[id(weights)])

    patch.setattr(experts, "triton_routed_product", multiplied)
    step, rope = CapturedStep(model), Rope(model.config, 2 * KEY_BLOCK, META, torch.bfloat16)
    cache = KVCache(model.config, 6, KEY_BLOCK, META, stored, slots=4)
    copied, made = Copies(), Made()
    for sequences, new, padded in ((4, 1, False), (2, 8, True), (1, 3, False)):
        inputs = StepInput.zeros(sequences, new, 3, META, padded, cache.states.recurrent)
        with torch.no_grad(), copied, made:  # in inference mode an operation hides those that it consists of
            step(inputs, rope, cache, last=padded)
    return [*copied.found, *made.found]


@pytest.mark.parametrize("case", chosen(FIXED, [*QUICK, *OTHERS]))
def test_a_captured_pass_leaves_the_host_alone(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An operation that would wait (`item`, `nonzero`) fails on the meta device."""
    assert copies(case, tmp_path, torch.int8 if "odd" in case else torch.bfloat16, monkeypatch) == []


@pytest.mark.parametrize("kind", ["new", "made", "copied"])
def test_a_copy_from_the_host_shows(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def scaled(route: Route, factors: Tensor) -> Route:
        if kind == "new":
            factors[route.starts.new_tensor(route.hit)]
        elif kind == "made":
            factors[torch.tensor(route.hit, device=META)]
        else:
            factors * torch.tensor(2.0).to(META)
        return route

    monkeypatch.setattr(Route, "scaled", scaled)
    assert copies(EXPERT_SCALES, tmp_path, torch.bfloat16, monkeypatch)
