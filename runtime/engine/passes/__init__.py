"""Ways of running a loaded model. Each is a `Pass`, compiled once after loading; `compile_passes` lists them.

A further way is one file here and one entry in `COMPILERS`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from mycli.runtime.engine.passes.base import OnDecline, Pass, PassInput
from mycli.runtime.engine.passes.plain import compile_plain_pass
from mycli.runtime.errors import Declined
from mycli.runtime.layers.transformer import Transformer
from mycli.runtime.models.config import KvDtype


@dataclass
class Passes:
    """The passes of one model, fastest first; the last takes all logits. `declined`: why others were not compiled.

    makes_tokens: whether a pass samples tokens itself; samples: whether one does so with a temperature.
    """

    passes: tuple[Pass, ...]
    declined: Mapping[str, Declined]

    def __post_init__(self) -> None:
        self.makes_tokens = len(self.passes) > 1
        self.samples = any(candidate.samples for candidate in self.passes)

    def choose(self, work: PassInput) -> Pass | None:
        """Return the first pass that takes `work`; None for tokens that only the host can sample."""
        for candidate in self.passes:
            if candidate.takes(work) is None:
                return candidate
        return None


# Returns a pass of a loaded model, or why it has none; reports later why the pass stopped being used.
CompilePass = Callable[[Transformer, KvDtype, OnDecline], Pass | Declined]


@dataclass(frozen=True)
class Compiler:
    """The compiler of a pass for one type of device; `load` imports it, which models on other devices never do.

    fallback: used only if no pass before it was compiled: its pass takes the same work, slower.
    """

    device: Literal["cpu", "cuda"]
    load: Callable[[], CompilePass]
    fallback: bool = False

    def compile(self, model: Transformer, kv: KvDtype, report: OnDecline) -> Pass | Declined:
        if model.device.type == self.device:
            return self.load()(model, kv, report)
        if self.device == "cpu":
            return Declined("not-on-cpu", {"device": str(model.device)})
        return Declined("not-on-cuda", {"device": str(model.device)})


def _cuda() -> CompilePass:
    from mycli.runtime.engine.passes.compile_cuda import compile_cuda_pass

    return compile_cuda_pass


def _captured() -> CompilePass:
    from mycli.runtime.engine.passes.compile_cuda import compile_captured_pass

    return compile_captured_pass


def _prompts() -> CompilePass:
    from mycli.runtime.engine.passes.compile_cuda import compile_prompt_pass

    return compile_prompt_pass


def _cpu() -> CompilePass:
    from mycli.runtime.engine.passes.cpu import compile_cpu_pass

    return compile_cpu_pass


# Fastest first.
COMPILERS: Mapping[str, Compiler] = {
    "cuda": Compiler("cuda", _cuda),
    "captured": Compiler("cuda", _captured, fallback=True),
    "prompts": Compiler("cuda", _prompts),
    "cpu": Compiler("cpu", _cpu),
}


def compile_passes(
    model: Transformer,
    kv: KvDtype = "auto",
    report: OnDecline = lambda declined: None,
    compilers: Mapping[str, Compiler] = COMPILERS,
) -> Passes:
    """Compile every way of running `model` with caches of kind `kv`; its weights must not change afterwards.

    report: receives why a pass of this device was not compiled, and later why one stopped being used, each cause once.
    """
    compiled: list[Pass] = []
    reported: list[Declined] = []

    def report_once(cause: Declined) -> None:
        if cause not in reported:
            reported.append(cause)
            report(cause)

    declined: dict[str, Declined] = {}
    for block in model.layers():
        block.freeze()
    for name, compiler in compilers.items():
        if compiler.fallback and compiled:
            continue
        result = compiler.compile(model, kv, report_once)
        if isinstance(result, Declined):
            declined[name] = result
        else:
            compiled.append(result)
    return Passes((*compiled, compile_plain_pass(model, kv, report_once)), declined)
