"""Arguments of the operations on experts: the weights of a layer's experts and the route of its tokens."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar

import torch
from torch import Tensor

from mycli.runtime.errors import Declined
from mycli.runtime.models.experts_spec import RoutingSpec
from mycli.runtime.quantization.packed_weight import Matmul

_T = TypeVar("_T")


class ExpertWeights(tuple[Matmul | Tensor, ...]):
    """The weights of all experts of a layer in order, packed or dense [N, K], and what a kernel derived from them."""

    _derived: object = None

    def derived(self, derive: Callable[["ExpertWeights"], _T]) -> _T:
        """Return `derive(self)`, computed once; only one kernel may use it."""
        if self._derived is None:
            self._derived = derive(self)
        derived: _T = self._derived  # type: ignore[assignment]  # always from the same function
        return derived


@dataclass(frozen=True)
class Route:
    """Token-expert pairs, sorted by expert and within an expert by token."""

    hit: list[int]  # experts with pairs, in order; on a GPU all experts, because the host does not wait for the route
    starts: Tensor  # int32 [hits + 1]: expert hit[i] has the pairs starts[i] to starts[i + 1]
    tokens: Tensor  # int32 [pairs]
    places: Tensor  # int32 [tokens, top_k]: the pairs of a token, highest score first
    weights: Tensor  # fp32 [tokens, top_k]

    def pair_weights(self) -> Tensor:
        """Return the weight of each pair, fp32 [pairs]."""
        weights = torch.empty_like(self.weights.flatten())
        weights[self.places.flatten().long()] = self.weights.flatten()
        return weights

    def scaled(self, factors: Tensor) -> "Route":
        """Return the route with the weights of each expert multiplied by its factor, fp32 [experts]."""
        # On a GPU all experts are hit: an index from the host would be a copy that no CUDA graph may capture.
        chosen = factors if len(self.hit) == len(factors) else factors[self.hit]
        pairs = chosen.repeat_interleave(self.starts.diff(), output_size=len(self.tokens))
        return replace(self, weights=self.weights * pairs[self.places])

    def part(self, places: Sequence[int]) -> "tuple[Route, Tensor]":
        """Return the route of the experts hit[place], and int64 [n], the indices of its pairs among all.

        `places` and `weights` still describe all pairs.
        """
        bounds = self.starts.tolist()
        counts = self.starts.new_tensor([0, *(bounds[place + 1] - bounds[place] for place in places)])
        pairs = torch.cat([torch.arange(bounds[place], bounds[place + 1]) for place in places])
        part = replace(
            self,
            hit=[self.hit[place] for place in places],
            starts=counts.cumsum(0, dtype=self.starts.dtype),
            tokens=self.tokens[pairs],
        )
        return part, pairs

    @cached_property
    def slices(self) -> dict[int, slice]:
        bounds = self.starts.tolist()
        return {expert: slice(*bounds[index : index + 2]) for index, expert in enumerate(self.hit)}

    def of(self, expert: int) -> Tensor:
        """Return the tokens of an expert, int32 [n]."""
        return self.tokens[self.slices.get(expert, slice(0, 0))]


def decline_routing(choice: RoutingSpec) -> Declined | None:
    """Return why only the reference routes by `choice`, or None."""
    return Declined("routing-kind", {"scoring": choice.scoring}) if choice.scoring == "sparse_mixer" else None


def mask_groups(values: Tensor, choice: RoutingSpec) -> Tensor:
    """Set `values` [tokens, experts] to -inf outside the best groups of experts of each token (DeepSeek-V3)."""
    if choice.groups == 1:
        return values
    grouped = values.view(len(values), choice.groups, -1)
    best = grouped.topk(choice.group_best).values.sum(-1).topk(choice.top_groups).indices
    selected = torch.zeros(grouped.shape[:2], dtype=torch.bool, device=values.device).scatter(1, best, True)
    return grouped.masked_fill(~selected.unsqueeze(2), -torch.inf).view_as(values)
