"""A stand-in for a CUDA graph on the CPU."""

from torch import Tensor

from mycli.runtime.engine.passes.graphs import Launches


def recording(work: Launches) -> Launches:
    """Imitate a CUDA graph: nothing runs at capture, and all replays write to the same buffers."""
    out: list[Tensor] = []

    def again() -> Tensor:
        made = work()
        if not out:
            out.append(made.clone())
        return out[0].copy_(made)

    return again
