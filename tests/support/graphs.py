"""A stand-in for a CUDA graph on the CPU, and a pass that is trusted at once."""

from torch import Tensor

from mycli.runtime.engine.passes.cuda import CudaPass
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


class UncomparedPass(CudaPass):
    """A `CudaPass` whose first passes are not compared with the plain pass."""

    def trusts(self, shape: tuple[int, int, bool]) -> bool:
        return self._failed is None and shape not in self._refused
