"""Which tokens go to which experts, and what these multiply by, as operations on experts read it.

Knows neither kernels nor layers.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar

import torch
from torch import Tensor

from mycli.runtime.models.experts_spec import RoutingSpec
from mycli.runtime.quantization.packed_weight import Matmul

_T = TypeVar("_T")


class ExpertWeights(tuple[Matmul | Tensor, ...]):
    """What all experts of a layer multiply by, in their order: packed, or dense [N, K].

    Kept from pass to pass, and with it what a kernel makes of them.
    """

    _made: object = None

    def made(self, how: Callable[["ExpertWeights"], _T]) -> _T:
        """What `how` makes of them, made once; there is one kernel that asks."""
        if self._made is None:
            self._made = how(self)
        made: _T = self._made  # type: ignore[assignment]  # by the same function
        return made


@dataclass(frozen=True)
class Route:
    """Pairs of a token and one of its experts, sorted by expert, and within an expert by token.

    hit: the experts that have pairs, in order, or that may have some: on a GPU all, since the host does not wait to
    know; starts: int32 [hits + 1], expert hit[i] has the pairs from starts[i] to
    starts[i + 1]; tokens: int32 [pairs], the token of each; places: int32 [tokens, top_k], where the pairs of a token
    stand, its highest score first; weights: fp32 [tokens, top_k], of what they give.
    """

    hit: list[int]
    starts: Tensor
    tokens: Tensor
    places: Tensor
    weights: Tensor

    def scaled(self, factors: Tensor) -> "Route":
        """The same with the weights of each expert times its own of `factors` fp32 [experts]."""
        experts = self.starts.new_tensor(self.hit).repeat_interleave(self.starts.diff(), output_size=len(self.tokens))
        return replace(self, weights=self.weights * factors[experts][self.places])

    def part(self, places: Sequence[int]) -> "tuple[Route, Tensor]":
        """The pairs of the experts hit[place] alone, and int64 [n] where they stand among all pairs.

        What the tokens make of them is still that of all: `places` and `weights` are.
        """
        bounds = self.starts.tolist()
        counts = self.starts.new_tensor([0, *(bounds[place + 1] - bounds[place] for place in places)])
        pairs = torch.cat([torch.arange(bounds[place], bounds[place + 1]) for place in places])
        own = replace(
            self,
            hit=[self.hit[place] for place in places],
            starts=counts.cumsum(0, dtype=self.starts.dtype),
            tokens=self.tokens[pairs],
        )
        return own, pairs

    @cached_property
    def slices(self) -> dict[int, slice]:
        """The pairs of each expert that has some."""
        bounds = self.starts.tolist()
        return {expert: slice(*bounds[index : index + 2]) for index, expert in enumerate(self.hit)}

    def of(self, expert: int) -> Tensor:
        """int32 [n]: the tokens of an expert, maybe none."""
        return self.tokens[self.slices.get(expert, slice(0, 0))]


def in_groups(values: Tensor, choice: RoutingSpec) -> Tensor:
    """`values` [tokens, experts], those of groups that take no part being less than any."""
    if choice.groups == 1:
        return values
    grouped = values.view(len(values), choice.groups, -1)
    best = grouped.topk(2).values.sum(-1).topk(choice.top_groups).indices
    takes_part = torch.zeros(grouped.shape[:2], dtype=torch.bool, device=values.device).scatter(1, best, True)
    return grouped.masked_fill(~takes_part.unsqueeze(2), -torch.inf).view_as(values)
