"""A stand-in for a CUDA graph on the CPU."""

from torch import Tensor

from mycli.runtime.engine.passes.graphs import Launches


def recording(work: Launches) -> Launches:
    """Imitate a CUDA graph: run once at capture; replays write to the same buffers."""
    out = work().clone()

    def again() -> Tensor:
        return out.copy_(work())

    return again
