"""`mycli doctor`: what this machine is, whether every kernel is right here, and how fast memory can be read."""

from typing import TYPE_CHECKING, Any

from mycli.cli.command import Call, command
from mycli.cli.flags import options
from mycli.cli.load import announce_build
from mycli.cli.reasons import reason
from mycli.runtime.checkpoint.open_folder import open_model_folder
from mycli.runtime.device.bandwidth import datasheet
from mycli.runtime.device.nvml import gpus
from mycli.runtime.device.probe import cpu_name
from mycli.runtime.device.system import cpu, memory
from mycli.runtime.engine.config import EngineConfig
from mycli.runtime.errors import Declined, GateError, ResourceError
from mycli.runtime.hub.resolve import resolve
from mycli.runtime.hub.store import state_dir
from mycli.runtime.open import open_model
from mycli.runtime.utils.units import human_bytes

if TYPE_CHECKING:  # torch takes seconds to import, and --help must not wait for it
    from mycli.runtime.device.placement import Placement
    from mycli.runtime.diagnostics.selftest import KernelFinding

EXAMPLES = ("mycli doctor", "mycli doctor --device cpu --json")
# What kernels look for, as the kernel of Linux names it.
CPU_FEATURES = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "avx_vnni", "amx_int8", "asimd", "asimddp", "bf16")


def _facts() -> list[tuple[str, str]]:
    from mycli.runtime.diagnostics.selftest import versions

    processor, main = cpu(), memory()
    features = " ".join(name for name in CPU_FEATURES if name in processor.flags)
    rows = [("versions", ", ".join(f"{name} {version}" for name, version in versions().items()))]
    rows.append(("CPU", f"{cpu_name()}, {processor.cores} cores, {features}"))
    bound = "" if main.limit == "machine" else f" (limit of {main.limit})"
    rows.append(("memory", f"{human_bytes(main.available)} free of {human_bytes(main.total)}{bound}"))
    try:
        found = gpus()
    except ResourceError as error:  # what is broken is what doctor is for
        return [*rows, ("GPU", error.message)]
    for gpu in found:
        capability = ".".join(map(str, gpu.capability))
        free = f"{human_bytes(gpu.free)} free of {human_bytes(gpu.total)}"
        text = f"{gpu.name}, compute {capability}, {free}, driver {gpu.driver}"
        rows.append((f"cuda:{gpu.index}", text))
    return rows


def _path(placement: "Placement") -> list[tuple[str, str]]:
    """On the CPU: whether replies use our own code, and which instructions of it."""
    from mycli.runtime.kernels.cpu.library import isa
    from mycli.runtime.kernels.cpu.library.build import native

    if placement.device.type != "cpu":
        return []
    library = native()
    if isinstance(library, Declined):
        slower = "torch's 4-bit operator and dense copies are used, which is slower"
        return [("CPU kernel", f"not available: {reason(library)}; {slower}")]
    flags = cpu().flags
    best, requested = isa.best_set(flags), isa.requested_set(flags)
    if requested:
        why = f"as {isa.VARIABLE} asks" + (f"; this machine has {best}" if requested != best else "")
    elif library.isa == best:
        why = "the best that this machine has"
    else:
        why = f"the compiler or the system keeps it from {best}"
    origin = "prebuilt" if library.compiled is None else f"compiled on this machine: {reason(library.compiled)}"
    return [("CPU kernel", f"native, {library.isa}: {why}; {origin}")]


def _why(one: "KernelFinding") -> str:
    return "" if one.declined is None else reason(one.declined)


def _kernel_row(one: "KernelFinding") -> list[str]:
    if one.error is None:
        return [one.packing, one.kernel, "declined", _why(one)]
    verdict = ("used" if one.used else "correct") if one.ok else "WRONG"
    return [one.packing, one.kernel, verdict, f"relative error {one.error:.1e}"]


def _as_json(
    facts: list[tuple[str, str]], placement: "Placement", bandwidth: float, found: "list[KernelFinding]", reply: str
) -> dict[str, Any]:
    kernels = [
        {"packing": f.packing, "kernel": f.kernel, "used": f.used, "error": f.error, "declined": _why(f), "ok": f.ok}
        for f in found
    ]
    return {
        "facts": dict(facts),
        "device": str(placement.device),
        "dtype": str(placement.dtype).removeprefix("torch."),
        "path": dict(_path(placement)),
        "bandwidth_gb_per_second": bandwidth,
        "kernels": kernels,
        "reply": reply,
    }


@command
def doctor(call: Call, device: options.Device = "auto", threads: options.Threads = None) -> None:
    """Check that everything works on this machine.

    Versions, kernels, memory bandwidth and a reply that is known. Exits with 6 if something is wrong.
    """
    facts = _facts()
    if not call.out.json_mode:
        call.out.card("this machine", facts)
    from mycli.runtime.diagnostics.selftest import ANSWER, QUESTION, check_kernels, golden_reply
    from mycli.runtime.diagnostics.throughput import measure_device

    pico = open_model_folder(resolve("pico", offline=True).folder)
    placement = EngineConfig(device=device).place(pico.config)
    for note in (*placement.notes, *placement.details):
        call.out.note(note)
    announce_build(call, placement)
    measure_device(placement.device, state_dir())
    found = list(check_kernels(placement.device, placement.dtype))
    with open_model("pico", EngineConfig(device=device, context=128), offline=True) as opened:
        reply = golden_reply(opened)
    name, bandwidth = measure_device(placement.device, state_dir())  # the better of two: a busy moment makes it less
    if not call.out.answered(_as_json(facts, placement, bandwidth, found, reply)):
        sheet = datasheet(name)
        share = f", {bandwidth / sheet:.0%} of the data sheet's {sheet:g}" if sheet else ""
        rows = [
            ("runs on", f"{placement.device}, {placement.dtype}"),
            *_path(placement),
            ("bandwidth", f"{bandwidth:.1f} GB/s{share}"),
        ]
        call.out.card("the device", [*rows, (QUESTION, reply)])
        call.out.table(["packing", "kernel", "verdict", "why"], [_kernel_row(one) for one in found])
    problems = [f"{one.kernel} is wrong on {one.packing}" for one in found if not one.ok]
    if reply != ANSWER:
        problems.append(f"pico answers {reply[:80]!r} instead of {ANSWER!r}")
    if problems:
        raise GateError("; ".join(problems), "do not trust replies from this installation; please report it")
