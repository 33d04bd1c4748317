"""`mycli doctor`: the hardware, a check of every kernel against its reference, and the memory bandwidth."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

from mycli.cli.command import Call, command
from mycli.cli.flags import options
from mycli.cli.flags.records import FULL_LENGTH, MAX_SEQUENCES
from mycli.cli.load import announce_build, due_record, warm_up_engine
from mycli.cli.output import Column
from mycli.cli.reasons import activation_text, pass_rows, passes_json, reason
from mycli.cli.reports import upgrade_guard
from mycli.cli.text.progress import CpuContention
from mycli.runtime.checkpoint.open_folder import open_model_folder
from mycli.runtime.device.bandwidth import datasheet
from mycli.runtime.device.nvml import gpus
from mycli.runtime.device.probe import cpu_name
from mycli.runtime.device.system import cpu, memory
from mycli.runtime.engine.config import EngineConfig
from mycli.runtime.errors import Declined, GateError, ResourceError, UsageError
from mycli.runtime.hub.resolve import resolve
from mycli.runtime.hub.store import state_dir
from mycli.runtime.open import open_model
from mycli.runtime.utils.units import human_bytes, pluralize

if TYPE_CHECKING:  # torch takes seconds to import, and --help must not wait for it
    from mycli.runtime.device.placement import Placement
    from mycli.runtime.diagnostics.selftest import KernelFinding
    from mycli.runtime.engine.loading.loader import LoadedModel
    from mycli.runtime.engine.pass_choices import PassChoice
    from mycli.runtime.quantization.activations import ActivationChoice

EXAMPLES = (
    "mycli doctor",
    "mycli doctor pico -v",
    "mycli doctor pico --warm",
    "mycli doctor pico --save && mycli doctor pico --compare",
    "mycli doctor --device cpu --json",
)
# CPU features that kernels use, by their names in /proc/cpuinfo.
CPU_FEATURES = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "avx_vnni", "amx_int8", "asimd", "asimddp", "bf16")


def _facts() -> list[tuple[str, str]]:
    from mycli.runtime.diagnostics.selftest import versions

    processor, main = cpu(), memory()
    features = " ".join(name for name in CPU_FEATURES if name in processor.flags)
    rows = [("versions", ", ".join(f"{name} {version}" for name, version in versions().items()))]
    share = "" if processor.quota is None else f" (a limit of {processor.quota:g} CPUs of time)"
    rows.append(("CPU", f"{cpu_name()}, {pluralize(processor.cores, 'core')}{share}, {features}"))
    bound = "" if main.limit == "machine" else f" (limit of {main.limit})"
    rows.append(("memory", f"{human_bytes(main.available)} free of {human_bytes(main.total)}{bound}"))
    try:
        visible = gpus()
    except ResourceError as error:  # a broken driver is a result of doctor, not the end of it
        return [*rows, ("GPU", error.message)]
    for gpu in visible:
        capability = ".".join(map(str, gpu.capability))
        free = f"{human_bytes(gpu.free)} free of {human_bytes(gpu.total)}"
        text = f"{gpu.name}, compute {capability}, {free}, driver {gpu.driver}"
        rows.append((f"cuda:{gpu.index}", text))
    return rows


def _path(placement: "Placement") -> list[tuple[str, str]]:
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
        why = f"set by {isa.VARIABLE}" + (f"; this machine supports {best}" if requested != best else "")
    elif library.isa == best:
        why = "the best for this machine"
    else:
        why = f"{best} is not supported by the compiler or the system"
    origin = "prebuilt" if library.compiled is None else f"compiled on this machine: {reason(library.compiled)}"
    return [("CPU kernel", f"native, {library.isa}: {why}; {origin}")]


def _bandwidth_text(now: float, best: float, sheet: float | None) -> str:
    share = f", {now / sheet:.0%} of the data sheet's {sheet:g}" if sheet else ""
    earlier = f"; {best:.1f} at best, which estimate uses" if best > now else ""
    return f"{now:.1f} GB/s now{share}{earlier}"


def _show_kernels(call: Call, kernels: Sequence[dict[str, Any]]) -> None:
    shown = [kernel for kernel in kernels if call.out.verbose or kernel["error"] is not None]
    call.out.table(shown, _KERNEL_COLUMNS)
    if declined := len(kernels) - len(shown):
        call.out.note(f"({pluralize(declined, 'kernel')} that decline a packing are listed with -v)")


def _warm_text(passes: int) -> str:
    return f"kernels of {passes} passes compiled and kept" if passes else "nothing to compile on this device"


def _portable(loaded: "LoadedModel") -> dict[str, Any]:
    from mycli.runtime.engine.loading.portable import decline_model, differing_parts

    runner = loaded.runner
    vectors = loaded.embedder is not None or loaded.cross_encoder is not None
    declined = decline_model(runner.model, runner.passes, vectors)
    return {"declined": None if declined is None else reason(declined), "differing": differing_parts(runner.model)}


def _portable_text(portable: dict[str, Any]) -> str:
    """Return whether the bits are the same on every CPU, with the option and without it, and why not."""
    if portable["declined"] is not None:
        return f"not available: {portable['declined']}"
    if not portable["differing"]:
        return "the same on every CPU with --portable-bits, and on those without AMX also without it"
    first, count = portable["differing"][0], pluralize(len(portable["differing"]), "product")
    return f"the same on every CPU with --portable-bits; without it {count} differ, such as {first}"


def _verdict(kernel: dict[str, Any]) -> str:
    if kernel["error"] is None:
        return "declined"
    return ("used" if kernel["used"] else "correct") if kernel["ok"] else "WRONG"


_PASS_COLUMNS = (
    Column("work", "work"),
    Column("runs by", "chosen"),
    Column("passes that decline", "why"),
)
_KERNEL_COLUMNS = (
    Column("packing", "packing"),
    Column("kernel", "kernel"),
    Column("verdict", _verdict),
    Column("why", lambda k: k["declined"] if k["error"] is None else f"relative error {k['error']:.1e}"),
)


@dataclass(frozen=True)
class _Kernels:
    """Results of the kernels and a reply whose text is known."""

    findings: "Sequence[KernelFinding]"
    reply: str

    def as_json(self) -> dict[str, Any]:
        kernels = [
            {
                "packing": finding.packing,
                "kernel": finding.kernel,
                "used": finding.used,
                "error": finding.error,
                "declined": "" if finding.declined is None else reason(finding.declined),
                "ok": finding.ok,
            }
            for finding in self.findings
        ]
        return {"kernels": kernels, "reply": self.reply}

    def problems(self) -> list[str]:
        from mycli.runtime.diagnostics.selftest import ANSWER

        wrong = [f"{finding.kernel} is wrong on {finding.packing}" for finding in self.findings if not finding.ok]
        return wrong + ([] if self.reply == ANSWER else [f"pico answers {self.reply[:80]!r} instead of {ANSWER!r}"])


@dataclass(frozen=True)
class _ModelRun:
    """The passes that run a model, and its comparison with saved replies."""

    choices: "Sequence[PassChoice]"
    portable: dict[str, Any]
    activations: "ActivationChoice | None"
    warm_passes: int | None
    golden: dict[str, Any] | None
    worse: Sequence[str]

    def as_json(self) -> dict[str, Any]:
        return {
            "passes": passes_json(self.choices),
            "portable_bits": self.portable,
            "activation_bits": None if self.activations is None else self.activations.bits,
            **({} if self.golden is None else {"golden": self.golden}),
            **({} if self.warm_passes is None else {"warm_passes": self.warm_passes}),
        }

    def rows(self) -> list[tuple[str, str]]:
        return [
            *([] if self.activations is None else [("activations", activation_text(self.activations))]),
            ("portable bits", _portable_text(self.portable)),
            *([] if self.warm_passes is None else [("warm-up", _warm_text(self.warm_passes))]),
        ]


@command
def doctor(
    call: Call,
    model: Annotated[
        str, options.argument("MODEL", "Also say which passes run this model.", options.complete_model)
    ] = "pico",
    save: Annotated[
        bool, options.flag("--save", "Save replies of the model and 20 s of its speed, to compare after an update.")
    ] = False,
    compare: Annotated[
        bool,
        options.flag("--compare", "Compare replies and speed with what was saved; exit with 6 if they are worse."),
    ] = False,
    warm: Annotated[
        bool, options.flag("--warm", "Compile the GPU kernels that a server of the model needs, and keep them.")
    ] = False,
    device: options.Device = "auto",
    threads: options.Threads = None,
) -> None:
    """Check that everything works on this machine, and show how it runs a model.

    Prints versions and hardware, checks every kernel and a known reply, and measures the memory bandwidth. A pass is a
    way of running a model: for each kind of work, the last table names the fastest pass that supports the model, and
    why faster ones do not. Exits with 6 if something is wrong.

    --save keeps replies and speed of a model; the first check after an update, and --compare, say whether it is faster
    or slower and whether replies have the same bits.

    --warm compiles GPU kernels as the start of a server does; Triton keeps them in ~/.triton/cache, or in
    $TRITON_CACHE_DIR. A CPU needs no compiling.
    """
    if save and compare:
        raise UsageError("--save and --compare exclude each other", "compare first, then save")
    facts, contention = _facts(), CpuContention()
    if not call.out.json_mode:
        call.out.card("this machine", facts)
    from mycli.runtime.diagnostics.selftest import QUESTION
    from mycli.runtime.diagnostics.throughput import current_bandwidth, record_device

    pico = open_model_folder(resolve("pico", offline=True).folder)
    placement = EngineConfig(device=device).place(pico.config)
    for note in (*placement.notes, *placement.details):
        call.out.note(note)
    announce_build(call, placement)
    before = current_bandwidth(placement.device)
    # What --save and --warm leave behind is wanted without the printed result too.
    checked = _check_kernels(placement, device, (lambda: None) if save or warm else call.out.require_reader)
    ran = _check_model(call, model, device, save=save, compare=compare, warm=warm)
    # Measured twice, and the better result counts: another program may disturb one measurement.
    bandwidth = max(before, current_bandwidth(placement.device))
    name, best = record_device(placement.device, state_dir(), bandwidth)
    answer = {
        "facts": dict(facts),
        "device": str(placement.device),
        "dtype": placement.dtype_name,
        "path": dict(_path(placement)),
        "bandwidth_gb_per_second": bandwidth,
        "best_bandwidth_gb_per_second": best,
        **checked.as_json(),
        **ran.as_json(),
    }
    if not call.out.answered(answer):
        rows = [
            ("runs on", f"{placement.device}, {placement.dtype}"),
            *_path(placement),
            *ran.rows(),
            ("bandwidth", _bandwidth_text(bandwidth, best, datasheet(name))),
        ]
        call.out.card("the device", [*rows, (QUESTION, checked.reply)])
        _show_kernels(call, answer["kernels"])
        call.out.table([vars(row) for row in pass_rows(ran.choices, call.out.verbose)], _PASS_COLUMNS)
    if disturbance := contention.note():
        call.out.note(f"({disturbance}; the measured bandwidth may be too low)")
    if problems := checked.problems():
        raise GateError("; ".join(problems), "do not use replies of this installation, and report this")
    if ran.worse:
        hint = f"repeat it on an idle machine; to accept it: mycli doctor {model} --save"
        raise GateError("; ".join(ran.worse), hint)


def _check_kernels(placement: "Placement", device: str, between: Callable[[], None]) -> _Kernels:
    from mycli.runtime.diagnostics.selftest import check_kernels, golden_reply

    findings = []
    for finding in check_kernels(placement.device, placement.dtype):
        between()
        findings.append(finding)
    with open_model("pico", EngineConfig(device=device, context=128), offline=True) as opened:
        return _Kernels(findings, golden_reply(opened))


def _check_model(call: Call, model: str, device: str, *, save: bool, compare: bool, warm: bool) -> _ModelRun:
    from mycli.runtime.engine.pass_choices import pass_choices

    golden, worse, warmed = None, list[str](), None
    # As a server: passes of several sequences have kernels of their own.
    config = EngineConfig(device=device)
    if warm:
        config = replace(config, sequences=FULL_LENGTH, running=MAX_SEQUENCES)
    with open_model(model, config, offline=call.offline) as opened:
        if warm:
            warmed = warm_up_engine(call, opened)
        runner = opened.model.runner
        choices, portable = pass_choices(runner), _portable(opened.model)
        if save:
            golden = upgrade_guard.save_record(call, opened)
        elif compare or due_record(opened) is not None:
            golden, worse = upgrade_guard.compare_saved(call, opened)
    return _ModelRun(choices, portable, runner.activations, warmed, golden, worse)
