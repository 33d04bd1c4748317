"""CUDA graphs: capturing launches and replaying them."""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from mycli.runtime.cache.kv_cache import KVCache

Launches = Callable[[], Tensor]  # enqueues launches and returns the tensor that will hold the result
Capture = Callable[[Launches], Launches]


class Step(Protocol):
    def takes(self, sequences: int, tokens: int) -> bool: ...

    def __call__(
        self, tokens: Tensor, lengths: Tensor, tables: tuple[Tensor, Tensor], cache: KVCache, last: bool
    ) -> Tensor: ...


class GraphCapture:
    """Captures launches as CUDA graphs that share one memory pool (torch.cuda.graph_pool_handle).

    Replays follow each other on one stream, so they may share working memory; only results are separate. With a pool
    for each graph, the working memory of a pass would be allocated once for each graph.
    """

    def __init__(self) -> None:
        self._first: torch.cuda.CUDAGraph | None = None  # owns the pool

    def __call__(self, work: Launches) -> Launches:
        """Capture `work` on the current device; it must have run before, so that all its kernels are compiled."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=None if self._first is None else self._first.pool()):
            out = work()
        self._first = self._first or graph

        def replay() -> Tensor:
            graph.replay()
            return out

        return replay
