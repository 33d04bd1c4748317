"""Mixture of experts on a GPU: routing, one launch per product over all experts, and the weighted sum."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from threading import Lock

import torch
from torch import Tensor

from mycli.runtime.device.placement import decline_packed
from mycli.runtime.errors import Declined, summarize_error
from mycli.runtime.kernels import reference
from mycli.runtime.kernels.routed import ExpertWeights, Route, decline_routing
from mycli.runtime.kernels.triton.product.dense import DenseProduct, decline_dense
from mycli.runtime.kernels.triton.product.matmul import RoutedRows, TritonMatmul, check_contiguous, chip_of
from mycli.runtime.kernels.triton.product.tiles import Chip, max_packed_rows
from mycli.runtime.kernels.triton.toolchain import missing_tool
from mycli.runtime.models.experts_spec import RoutingSpec
from mycli.runtime.quantization.packed_weight import Matmul

# The number of launches does not depend on the routing, and the host waits for none. Imports Triton only when called.

_LINE = 16  # bytes: unit of weight addresses, and the width of a load
_PAIRS = 1024  # (token, expert) pairs per iteration of `place_kernel`
_NOT_TRITON = Declined("not-triton-layout")
_NOT_ALIKE = Declined("experts-not-alike-in-triton-layout")
_NOT_CUDA = Declined("cuda-rows-without-gradient")


# Distance of each tensor from the first one, int64, in units of 16 bytes.
def _places(tensors: Sequence[Tensor]) -> Tensor:
    distances = [tensor.data_ptr() - tensors[0].data_ptr() for tensor in tensors]
    if any(distance % _LINE for distance in distances):
        raise ValueError("expert weights are not aligned to 16 bytes")
    return torch.tensor([distance // _LINE for distance in distances], device=tensors[0].device)


@dataclass(frozen=True, eq=False)
class ExpertTable:
    """Weights of experts of one shape, packed alike or in 16 bits, and their addresses as in `RoutedRows`."""

    weights: tuple[TritonMatmul, ...] | tuple[DenseProduct, ...]
    codes: Tensor
    scales: Tensor | None
    offsets: Tensor | None

    @classmethod
    def from_weights(cls, weights: Sequence[Matmul | Tensor | None]) -> "ExpertTable | Declined":
        """Return the table without copying a weight, or why the experts cannot share a launch."""
        matmuls = [weight for weight in weights if isinstance(weight, TritonMatmul)]
        if len(matmuls) == len(weights):
            return cls.from_products(matmuls)
        dense = [weight for weight in weights if isinstance(weight, Tensor) and weight.device.type == "cuda"]
        if len(dense) < len(weights):
            return _NOT_ALIKE
        declined = next((declined for weight in dense if (declined := decline_dense(weight)) is not None), None)
        return declined or cls.from_products([DenseProduct(weight, chip_of(weight.device)) for weight in dense])

    @classmethod
    def from_products(cls, products: Sequence[TritonMatmul] | Sequence[DenseProduct]) -> "ExpertTable | Declined":
        """Return the table of products, or why they cannot share a launch."""
        if len({product.shape_key for product in products}) != 1:
            return _NOT_ALIKE
        dense = [product for product in products if isinstance(product, DenseProduct)]
        if dense:
            return cls(tuple(dense), _places([product.weight for product in dense]), None, None)
        matmuls = [product for product in products if isinstance(product, TritonMatmul)]
        offsets = [matmul.offsets for matmul in matmuls if matmul.offsets is not None]
        codes, scales = _places([matmul.codes for matmul in matmuls]), _places([matmul.scales for matmul in matmuls])
        return cls(tuple(matmuls), codes, scales, _places(offsets) if offsets else None)

    def rows(self, starts: Tensor, tokens: Tensor | None, count: int) -> RoutedRows:
        """Return the arguments of a product of `count` rows by these experts."""
        return RoutedRows(len(self.weights), self.codes, self.scales, self.offsets, starts, tokens, count)


def grouped_product(table: ExpertTable, x: Tensor, starts: Tensor, tokens: Tensor | None) -> Tensor:
    """Compute `reference.routed_product` in two launches, or three where K is split."""
    check_contiguous(starts, tokens)
    first, count = table.weights[0], x.shape[0] if tokens is None else tokens.shape[0]
    if count == 0:
        return x.new_empty((0, first.n))
    tile = first.tile(-(-count // len(table.weights)))  # for the mean number of rows per expert
    return first.multiply(first.prepare(x, tile), x.dtype, table.rows(starts, tokens, count))


def route_tokens(scores: Tensor, routing: RoutingSpec, correction: Tensor | None = None, pdl: bool = False) -> Route:
    """Compute `reference.route` in two launches; among equal scores the first expert or group is higher.

    `hit` are all experts. pdl: the launches may begin before the one that computes the scores ends (`triton.pdl`).
    """
    from triton import next_power_of_2

    from mycli.runtime.kernels.triton.routing import choose_kernel, place_kernel

    (tokens, experts), top_k = scores.shape, routing.top_k
    if scores.stride(1) != 1 or not 0 < top_k <= experts:
        raise ValueError(f"top_k {top_k} of scores {tuple(scores.shape)} with strides {scores.stride()}")

    def int32_empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=scores.device)

    chosen, places = int32_empty(tokens, top_k), int32_empty(tokens, top_k)
    pairs, starts = int32_empty(tokens * top_k), int32_empty(experts + 1)
    weights = torch.empty((tokens, top_k), device=scores.device)
    choose_kernel[(tokens,)](
        *(scores, correction, chosen, weights, scores.stride(0), experts, top_k, routing.epsilon, routing.scale),
        *(routing.softcap, routing.top_groups),
        EXPERTS=next_power_of_2(experts),
        GROUPS=routing.groups,
        BEST=routing.group_best,
        NORMALIZED=routing.normalize,
        SIGMOID=routing.scoring != "softmax",
        OF_SCORES=routing.scoring == "sigmoid_of_corrected",
        CAPPED=routing.softcap != 0,
        PDL=pdl,
        launch_pdl=pdl,
    )
    block = min(_PAIRS, max(32, next_power_of_2(tokens * top_k)))
    count = tokens * top_k
    place_kernel[(experts,)](chosen, starts, pairs, places, count, top_k, BLOCK=block, PDL=pdl, launch_pdl=pdl)
    return Route(list(range(experts)), starts, pairs, places, weights)


def sum_weighted(x: Tensor, places: Tensor, weights: Tensor) -> Tensor:
    """Compute `reference.weighted_sum` in one launch."""
    from triton import next_power_of_2

    from mycli.runtime.kernels.triton.routing import weighted_sum_kernel

    check_contiguous(x, places, weights)
    (tokens, top_k), size = places.shape, x.shape[1]
    y = x.new_empty((tokens, size))
    block = min(1024, max(32, next_power_of_2(size)))
    weighted_sum_kernel[(tokens, -(-size // block))](x, places, weights, y, size, top_k, BLOCK=block)
    return y


def triton_route(scores: Tensor, routing: RoutingSpec, correction: Tensor | None = None) -> Route | Declined:
    """Compute `route_tokens` on a GPU."""
    if (declined := decline_routing(routing)) is not None:
        return declined
    return _decline(scores) or route_tokens(scores.contiguous(), routing, correction)


def triton_routed_product(
    weights: Sequence[Matmul | Tensor], x: Tensor, starts: Tensor, tokens: Tensor | None
) -> Tensor | Declined:
    """Compute `grouped_product` if experts have few rows each; for many rows a dense product is faster."""
    first = weights[0]
    dense = isinstance(first, Tensor) and first.dtype == x.dtype
    if not dense and not isinstance(first, TritonMatmul):
        return _NOT_TRITON
    if dense and (declined := _decline(x) or _checked(x.device, _dense_trouble)) is not None:
        return declined
    table = (
        weights.derived(ExpertTable.from_weights)
        if isinstance(weights, ExpertWeights)
        else ExpertTable.from_weights(weights)
    )
    if isinstance(table, Declined):
        return table
    pairs = x.shape[0] if tokens is None else tokens.shape[0]
    if pairs > max_packed_rows(table.weights[0].chip) * len(weights):
        return Declined("too-many-rows-per-expert", {"pairs": pairs, "experts": len(weights)})
    return grouped_product(table, x.contiguous() if dense else x, starts, tokens)


def triton_weighted_sum(x: Tensor, places: Tensor, weights: Tensor) -> Tensor | Declined:
    """Compute `sum_weighted` on a GPU."""
    return _decline(x) or sum_weighted(x.contiguous(), places.contiguous(), weights.contiguous())


def _decline(x: Tensor) -> Declined | None:
    if x.device.type != "cuda" or x.requires_grad or x.shape[0] == 0:
        return _NOT_CUDA
    return _checked(x.device, _route_trouble)


_CHECK_LOCK = Lock()  # layers are loaded by several threads


def _checked(device: torch.device, check: Callable[[torch.device], Declined | None]) -> Declined | None:
    with _CHECK_LOCK:
        return check(device)


@cache  # compiling takes a second, and the answer does not change
def _route_trouble(device: torch.device) -> Declined | None:
    if torch.version.hip is not None:
        return Declined("untested-on-amd")
    if find_spec("triton") is None:
        return Declined("triton-not-installed")
    return decline_packed(device) or _trouble(lambda: small_route_agrees(device))


@cache
def _dense_trouble(device: torch.device) -> Declined | None:
    return _trouble(lambda: small_product_agrees(device, chip_of(device)))


def _trouble(agrees: Callable[[], bool]) -> Declined | None:
    try:
        return None if agrees() else Declined("routing-check-failed")
    except Exception as trouble:  # noqa: BLE001  (reason: compilers and drivers raise all kinds)
        return missing_tool() or Declined("kernel-raises", {"error": summarize_error(trouble)})


def small_route_agrees(device: torch.device) -> bool:
    """Return whether a small routing and weighted sum equal the reference."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.stack([torch.randperm(9, generator=generator) for _ in range(5)]).float()
    x = torch.randn(10, 40, generator=generator)
    routing = RoutingSpec(2, normalize=True)
    expected = reference.route(scores, routing)
    route = route_tokens(scores.to(device), routing)
    total = sum_weighted(x.to(device), route.places, route.weights).cpu()
    same = torch.equal(route.places.cpu(), expected.places) and torch.equal(route.tokens.cpu(), expected.tokens)
    return same and torch.allclose(total, reference.weighted_sum(x, expected.places, expected.weights), atol=1e-5)


def small_product_agrees(device: torch.device, chip: Chip) -> bool:
    """Return whether a small product of experts in 16 bits equals the reference."""
    generator = torch.Generator().manual_seed(0)
    x, *weights = (torch.randn(rows, 96, generator=generator).bfloat16() for rows in (7, 40, 40, 40))
    starts = torch.tensor([0, 3, 3, 7], dtype=torch.int32)
    expected = torch.cat((x[:3].float() @ weights[0].float().T, x[3:].float() @ weights[2].float().T))
    table = ExpertTable.from_products([DenseProduct(weight.to(device), chip) for weight in weights])
    assert not isinstance(table, Declined)
    product = grouped_product(table, x.to(device), starts.to(device), None).cpu().float()
    return torch.allclose(product, expected, rtol=2**-6, atol=2**-6)
