"""One Triton kernel with its compilation arguments, compiled without a GPU."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


@dataclass(frozen=True)
class Build:
    """The kernel and its compilation arguments. `weights`: number per iteration of its main loop, 0 if none.

    types: of each argument that is not in `constants`; for a named tuple, a tuple of types and constants.
    """

    name: str
    kernel: Any
    types: Mapping[str, Any]
    constants: Mapping[str, Any]
    warps: int = 4
    stages: int = 3
    weights: int = 0
    unaligned: tuple[str, ...] = ()  # integers that need not be multiples of 16

    def compile(self, target: GPUTarget) -> Any:
        """Compile the kernel; needs no GPU."""
        constants: dict[Any, Any] = dict(self.constants)
        aligned: dict[tuple[int, ...], list[list[Any]]] = {}

        def type_of(path: tuple[int, ...], name: str, given: Any) -> Any:
            if isinstance(given, tuple):
                fields = given._asdict().items()  # type: ignore[attr-defined]  # they are named tuples
                return type(given)(*(type_of((*path, i), *field) for i, field in enumerate(fields)))
            if not isinstance(given, str):
                constants[path] = given
                return "constexpr"
            if given != "constexpr" and name not in self.unaligned:
                aligned[path] = [["tt.divisibility", 16]]
            return given

        names = [argument.name for argument in self.kernel.params]
        signature = {name: type_of((i,), name, self.types.get(name, "constexpr")) for i, name in enumerate(names)}
        source = ASTSource(fn=self.kernel, signature=signature, constexprs=constants, attrs=aligned)
        return triton.compile(source, target=target, options={"num_warps": self.warps, "num_stages": self.stages})
