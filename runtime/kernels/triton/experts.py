"""Experts on a GPU: routing, the products of all experts in one launch each, and the sum, by Triton kernels.

How many launches there are does not depend on how many experts the tokens go to, and the host waits for none of them.
The products are those of `triton.product.gemm`, with its arithmetic. Importing this file imports no Triton. Each
operation returns the reason where this code does not do it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from threading import Lock

import torch
from torch import Tensor

from mycli.runtime.device.placement import decline_packed
from mycli.runtime.errors import Declined, summarize_error
from mycli.runtime.kernels import reference
from mycli.runtime.kernels.routed import ExpertWeights, Route
from mycli.runtime.kernels.triton.product.matmul import RoutedRows, TritonMatmul, check_contiguous
from mycli.runtime.kernels.triton.product.tiles import most_packed_rows
from mycli.runtime.models.experts_spec import RoutingSpec
from mycli.runtime.quantization.packed_weight import Matmul

_LINE = 16  # bytes: what places of weights are counted in, and kernels load at once
_PAIRS = 1024  # that a program looks at together
_GROUPS = Declined("no-expert-groups")
_NOT_TRITON = Declined("not-triton-layout")
_NOT_CUDA = Declined("cuda-rows-without-gradient")


def _power(count: int) -> int:
    """The least power of two that is at least `count`."""
    return 1 << (count - 1).bit_length()


def _places(tensors: Sequence[Tensor]) -> Tensor:
    """How far each lies behind the first, int64, in units of 16 bytes."""
    behind = [tensor.data_ptr() - tensors[0].data_ptr() for tensor in tensors]
    if any(distance % _LINE for distance in behind):
        raise ValueError("weights that do not begin at multiples of 16 bytes")
    return torch.tensor([distance // _LINE for distance in behind], device=tensors[0].device)


@dataclass(frozen=True, eq=False)
class ExpertTable:
    """Weights of experts, which are alike, and where they lie: int64 [experts], see `Routed`."""

    weights: tuple[TritonMatmul, ...]
    codes: Tensor
    scales: Tensor
    offsets: Tensor | None

    @classmethod
    def of(cls, weights: Sequence[Matmul | Tensor | None]) -> "ExpertTable | Declined":
        """None is copied. The reason where experts are not alike."""
        found = [weight for weight in weights if isinstance(weight, TritonMatmul)]
        if len(found) < len(weights) or len({one.form for one in found}) > 1:
            return Declined("experts-not-alike-in-triton-layout")
        offsets = [one.offsets for one in found if one.offsets is not None]
        codes, scales = _places([one.codes for one in found]), _places([one.scales for one in found])
        return cls(tuple(found), codes, scales, _places(offsets) if offsets else None)

    def rows(self, starts: Tensor, tokens: Tensor | None, count: int) -> RoutedRows:
        """The `count` rows of a product by these experts; see `RoutedRows`."""
        return RoutedRows(len(self.weights), self.codes, self.scales, self.offsets, starts, tokens, count)


def grouped_product(table: ExpertTable, x: Tensor, starts: Tensor, tokens: Tensor | None) -> Tensor:
    """As `reference.routed_product`: two launches, or three where K is split, whatever the route."""
    check_contiguous(starts, tokens)
    first, count = table.weights[0], x.shape[0] if tokens is None else tokens.shape[0]
    if count == 0:
        return x.new_empty((0, first.n))
    tile = first.tile(-(-count // len(table.weights)))  # of an expert's rows, were all to have as many
    return first.multiply(first.prepare(x, tile), x.dtype, table.rows(starts, tokens, count))


def route_tokens(scores: Tensor, choice: RoutingSpec, correction: Tensor | None = None, pdl: bool = False) -> Route:
    """As `reference.route` without groups, of equal values the first is higher; `hit` are all experts. Two launches.

    pdl: these may begin before what makes the scores has ended (`triton.pdl`).
    """
    from mycli.runtime.kernels.triton.routing import choose_kernel, place_kernel

    (tokens, experts), top_k = scores.shape, choice.top_k
    if scores.stride(1) != 1 or not 0 < top_k <= experts:
        raise ValueError(f"{top_k} of scores {tuple(scores.shape)} with strides {scores.stride()}")

    def whole(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=scores.device)

    chosen, places = whole(tokens, top_k), whole(tokens, top_k)
    pairs, starts = whole(tokens * top_k), whole(experts + 1)
    weights = torch.empty((tokens, top_k), device=scores.device)
    choose_kernel[(tokens,)](
        *(scores, correction, chosen, weights, scores.stride(0), experts, top_k, choice.epsilon, choice.scale),
        EXPERTS=_power(experts),
        NORMALIZED=choice.normalize,
        SIGMOID=choice.scoring == "sigmoid",
        PDL=pdl,
        launch_pdl=pdl,
    )
    block = min(_PAIRS, max(32, _power(tokens * top_k)))
    count = tokens * top_k
    place_kernel[(experts,)](chosen, starts, pairs, places, count, top_k, BLOCK=block, PDL=pdl, launch_pdl=pdl)
    return Route(list(range(experts)), starts, pairs, places, weights)


def sum_weighted(x: Tensor, places: Tensor, weights: Tensor) -> Tensor:
    """As `reference.weighted_sum`, in one launch."""
    from mycli.runtime.kernels.triton.routing import weighted_sum_kernel

    check_contiguous(x, places, weights)
    (tokens, top_k), size = places.shape, x.shape[1]
    y = x.new_empty((tokens, size))
    block = min(1024, max(32, _power(size)))
    weighted_sum_kernel[(tokens, -(-size // block))](x, places, weights, y, size, top_k, BLOCK=block)
    return y


def triton_route(scores: Tensor, choice: RoutingSpec, correction: Tensor | None = None) -> Route | Declined:
    """`route_tokens` on a GPU."""
    if choice.groups > 1:
        return _GROUPS
    return _why_not(scores) or route_tokens(scores.contiguous(), choice, correction)


def triton_routed_product(
    weights: Sequence[Matmul | Tensor], x: Tensor, starts: Tensor, tokens: Tensor | None
) -> Tensor | Declined:
    """`grouped_product` where experts have few rows each; of many, unpacking the weight pays."""
    if not isinstance(weights[0], TritonMatmul):
        return _NOT_TRITON
    pairs = x.shape[0] if tokens is None else tokens.shape[0]
    if pairs > most_packed_rows(weights[0].chip) * len(weights):
        return Declined("too-many-rows-per-expert", {"pairs": pairs, "experts": len(weights)})
    table = weights.derived(ExpertTable.of) if isinstance(weights, ExpertWeights) else ExpertTable.of(weights)
    return table if isinstance(table, Declined) else grouped_product(table, x, starts, tokens)


def triton_weighted_sum(x: Tensor, places: Tensor, weights: Tensor) -> Tensor | Declined:
    """`sum_weighted` on a GPU."""
    return _why_not(x) or sum_weighted(x.contiguous(), places.contiguous(), weights.contiguous())


def _why_not(x: Tensor) -> Declined | None:
    """Why kernels that need no packed weight are not launched on `x`; None where they are."""
    if x.device.type != "cuda" or x.requires_grad or x.shape[0] == 0:
        return _NOT_CUDA
    with _ONE_AT_A_TIME:
        return _checked(x.device)


_ONE_AT_A_TIME = Lock()  # of the checks


@cache  # compiling takes a second, and the answer does not change
def _checked(device: torch.device) -> Declined | None:
    if torch.version.hip is not None:
        return Declined("untested-on-amd")
    if find_spec("triton") is None:
        return Declined("triton-not-installed")
    if (old_gpu := decline_packed(device)) is not None:
        return old_gpu
    try:
        return None if small_route_agrees(device) else Declined("routing-check-failed")
    except Exception as trouble:  # noqa: BLE001  (reason: compilers and drivers raise all kinds)
        return Declined("kernel-raises", {"error": summarize_error(trouble)})


def small_route_agrees(device: torch.device) -> bool:
    """Whether a small route, and a sum along it, are the plain ones."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.stack([torch.randperm(9, generator=generator) for _ in range(5)]).float()
    x = torch.randn(10, 40, generator=generator)
    choice = RoutingSpec(2, normalize=True)
    wanted = reference.route(scores, choice)
    found = route_tokens(scores.to(device), choice)
    made = sum_weighted(x.to(device), found.places, found.weights).cpu()
    same = torch.equal(found.places.cpu(), wanted.places) and torch.equal(found.tokens.cpu(), wanted.tokens)
    return same and torch.allclose(made, reference.weighted_sum(x, wanted.places, wanted.weights), atol=1e-5)
