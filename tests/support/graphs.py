"""What stands in for a CUDA graph on the CPU."""

from torch import Tensor

from mycli.runtime.engine.passes.graphs import Launches


def recording(work: Launches) -> Launches:
    """As a graph would: runs once when captured, and replays write to the same place."""
    out = work().clone()

    def again() -> Tensor:
        return out.copy_(work())

    return again
