"""Chooses the device and dtype in which a model runs, with a note on every choice that the user did not make."""

import warnings
from dataclasses import dataclass

import torch

from mycli.runtime.device.system import memory
from mycli.runtime.errors import Declined, ResourceError, UsageError
from mycli.runtime.models.config import KvDtype, ModelConfig
from mycli.runtime.quantization.activations import Activations
from mycli.runtime.utils.dtypes import BY_NAME, BY_SAFETENSORS_NAME, FLOATS, Dtype, DtypeInfo, PromptCopy
from mycli.runtime.utils.units import pluralize

OLDEST_PACKED = 8, 0  # lowest compute capability of the kernels for packed weights
OLDEST_FP8 = 8, 9  # lowest compute capability that multiplies 8-bit floats


def torch_dtype(name: str) -> torch.dtype:
    """Return torch's dtype by its name in config.json or in a safetensors header."""
    dtype: torch.dtype = getattr(torch, (BY_SAFETENSORS_NAME.get(name) or BY_NAME[name]).name)
    return dtype


def dtype_info(dtype: torch.dtype) -> DtypeInfo:
    """Return the names of a torch dtype. Raises KeyError if model files have no such dtype."""
    return BY_NAME[dtype_name(dtype)]


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def decline_dtype(dtype: torch.dtype) -> Declined:
    """Return the reason of a kernel or pass that does not compute with activations of `dtype`."""
    return Declined("activation-dtype", {"dtype": dtype_name(dtype)})


@dataclass(frozen=True)
class Placement:
    """The device, the dtype of activations and of the KV cache, and notes on the choices made."""

    device: torch.device
    dtype: torch.dtype
    notes: tuple[str, ...] = ()
    kv: KvDtype = "auto"
    prompt_copy: PromptCopy = "none"  # of packed weights, for passes of many rows
    details: tuple[str, ...] = ()  # notes of less interest, such as why a machine without a GPU uses the CPU
    activations: Activations = "auto"  # bits of the integers that CPU kernels round bf16 activations to
    portable: bool = False  # whether results have the same bits on every CPU
    unpacked: Declined | None = None  # why packed weights are stored in `dtype`; None: kernels multiply them packed

    @property
    def dtype_name(self) -> Dtype:
        return next(name for name in FLOATS.values() if torch_dtype(name) == self.dtype)


def _cuda_problem() -> str | None:
    if torch.version.cuda is None and torch.version.hip is None:
        return "this build of torch has no CUDA"
    with warnings.catch_warnings(record=True) as caught:  # for example about a driver that is too old
        warnings.simplefilter("always")
        available = torch.cuda.is_available()
    if not available:
        return "no CUDA device is visible to torch" + (f" ({caught[0].message})" if caught else "")
    return None


def _code_problem(index: int) -> str | None:
    # Machine code runs on chips of its major capability from its minor one on, PTX on all later chips.
    codes = [arch.rstrip("af").partition("_") for arch in torch.cuda.get_arch_list()]
    binaries = [divmod(int(number), 10) for kind, _, number in codes if kind == "sm"]
    ptx = [divmod(int(number), 10) for kind, _, number in codes if kind == "compute"]
    chip = torch.cuda.get_device_capability(index)
    runs = any(code[0] == chip[0] and code <= chip for code in binaries) or any(code <= chip for code in ptx)
    if runs or not binaries:  # AMD's have other names
        return None
    oldest, newest = ("{}{}".format(*code) for code in (min(binaries), max(binaries)))
    known = f"sm_{oldest} and newer" if chip < min(binaries) else f"sm_{oldest} to sm_{newest}"
    return "this build of torch has no code for sm_{}{}, only for {}".format(*chip, known)


def _has_gpu() -> bool:
    # Independent of whether torch can use it.
    from mycli.runtime.device.nvml import gpus

    try:
        return bool(gpus())
    except ResourceError:  # a driver is installed but does not answer
        return True


def _choose_device(request: str) -> tuple[torch.device, tuple[str, ...]]:
    # The device, and the reason if "auto" falls back to the CPU.
    if request == "cpu":
        return torch.device("cpu"), ()
    problem = _cuda_problem()
    if request == "auto":
        problem = problem or _code_problem(torch.cuda.current_device())
        if problem is None:
            return torch.device("cuda", torch.cuda.current_device()), ()
        return torch.device("cpu"), (f"running on the CPU: {problem}",)
    name, _, index = request.partition(":")
    if name != "cuda" or (index and not index.isdecimal()):
        raise UsageError(f"unknown device {request!r}", "choose auto, cpu, cuda or cuda:N")
    if problem is None and int(index or 0) >= torch.cuda.device_count():
        raise ResourceError(
            f"device {request} not found: {pluralize(torch.cuda.device_count(), 'GPU')} visible", "the first is cuda:0"
        )
    if problem := problem or _code_problem(int(index or torch.cuda.current_device())):
        raise ResourceError(f"device {request}: {problem}", code="use-cpu-or-install-cuda")
    return torch.device("cuda", int(index or torch.cuda.current_device())), ()


def place(
    config: ModelConfig,
    device: str = "auto",
    dtype: Dtype | None = None,
    kv: KvDtype = "auto",
    *,
    prompt_copy: PromptCopy = "none",
    activations: Activations = "auto",
    portable: bool = False,
) -> Placement:
    """Choose device and dtype for `config`; `dtype` None is the model's own if the device runs it well.

    Raises UsageError for an unknown device, ResourceError for a missing one: an explicit "cuda" never falls back.
    """
    chosen, reasons = _choose_device(device)
    notes, details = (reasons, ()) if reasons and _has_gpu() else ((), reasons)
    precision = torch_dtype(dtype or config.dtype)
    _check_prompt_copy(prompt_copy, chosen, precision)
    if portable and chosen.type != "cpu":
        raise UsageError(f"portable bits are computed on the CPU only, not on {chosen}", code="portable-on-cpu")
    if portable and precision == torch.float32:
        raise UsageError("portable bits need activations in bfloat16, not float32", code="portable-in-bf16")
    if dtype is None and chosen.type == "cpu" and precision == torch.float16:
        precision, notes = torch.bfloat16, (*notes, "float16 is slow on the CPU: activations are bfloat16")
    unpacked = decline_packed(chosen)
    # GPUs without kernels for packed weights have no bfloat16 either.
    if dtype is None and unpacked is not None and precision == torch.bfloat16:
        precision, notes = torch.float16, (*notes, "this GPU has no bfloat16: activations are float16")
    use_device(chosen)
    return Placement(chosen, precision, notes, kv, prompt_copy, details, activations, portable, unpacked)


def _check_prompt_copy(kind: PromptCopy, device: torch.device, dtype: torch.dtype) -> None:
    if kind != "none" and device.type == "cpu":
        raise UsageError("copies of packed weights for prompts are stored on GPUs only", code="leave-out-prompt-copy")
    if kind != "fp8":
        return
    if dtype != torch.bfloat16:
        message = f"8-bit products return bfloat16, and activations are {dtype_name(dtype)}"
        raise UsageError(message, code="other-prompt-copy")
    if not multiplies_fp8(device):
        needed = "{}.{}".format(*OLDEST_FP8)
        raise ResourceError(f"8-bit products need compute capability {needed}", code="other-prompt-copy")


def multiplies_fp8(device: torch.device) -> bool:
    """Return whether torch multiplies 8-bit floats on `device`: on every CPU, but only newer GPUs."""
    return device.type == "cpu" or torch.cuda.get_device_capability(device) >= OLDEST_FP8


def decline_packed(device: torch.device) -> Declined | None:
    """Return why packed weights are unpacked at load on `device`; None if its kernels multiply them packed."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) >= OLDEST_PACKED:
        return None
    major, minor = torch.cuda.get_device_capability(device)
    needed = "{}.{}".format(*OLDEST_PACKED)
    return Declined("compute-capability", {"needed": needed, "found": f"{major}.{minor}"})


def use_device(device: torch.device) -> None:
    """Make a CUDA device the current one of this thread, on which Triton launches and graphs are captured.

    Every thread that runs a model must call this: a new thread's current device is 0.
    """
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)


def free_memory(device: torch.device) -> int:
    """Return the bytes that this process may still allocate on `device`."""
    if device.type != "cuda":
        return memory().available
    free, total = torch.cuda.mem_get_info(device)
    # Of memory that a GPU shares with the CPU (DGX Spark, Jetson), CUDA takes the page cache for used.
    return min(memory().available, total) if torch.cuda.get_device_properties(device).is_integrated else free
