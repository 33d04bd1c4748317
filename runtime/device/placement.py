"""Where and in which precision a model runs; every choice is returned with its reason, so that it can be announced."""

import warnings
from dataclasses import dataclass

import torch

from mycli.runtime.device.nvml import gpus
from mycli.runtime.device.system import memory
from mycli.runtime.errors import Declined, ResourceError, UsageError
from mycli.runtime.models.config import KvDtype, ModelConfig
from mycli.runtime.utils.dtypes import BY_NAME, BY_SAFETENSORS_NAME, FLOATS, Dtype, DtypeInfo
from mycli.runtime.utils.units import pluralize

OLDEST_PACKED = 8, 0  # compute capability


def torch_dtype(name: str) -> torch.dtype:
    """The dtype of torch for a name of `runtime.utils.dtypes`, as config.json or as a safetensors header spells it."""
    dtype: torch.dtype = getattr(torch, (BY_SAFETENSORS_NAME.get(name) or BY_NAME[name]).name)
    return dtype


def dtype_info(dtype: torch.dtype) -> DtypeInfo:
    """The names of a dtype of torch. Raises KeyError for one that no model file holds."""
    return BY_NAME[str(dtype).removeprefix("torch.")]


@dataclass(frozen=True)
class Placement:
    """A device, the dtype of activations, notes on every choice that a person did not make, and the cache's kind.

    `dense_prefill_copy`: packed weights of the blocks are also kept in `dtype`, for prompts. `unpacked`: why they are
    kept in `dtype` alone, None where kernels multiply them as they are. `details` explain what goes without saying: why
    the CPU is used where there is no GPU.
    """

    device: torch.device
    dtype: torch.dtype
    notes: tuple[str, ...] = ()
    kv: KvDtype = "auto"
    dense_prefill_copy: bool = False
    details: tuple[str, ...] = ()
    unpacked: Declined | None = None

    @property
    def dtype_name(self) -> Dtype:
        """`dtype` as config.json spells it."""
        return next(name for name in FLOATS.values() if torch_dtype(name) == self.dtype)


def _cuda_problem() -> str | None:
    """Why CUDA cannot be used, None where it can."""
    if torch.version.cuda is None and torch.version.hip is None:
        return "this build of torch has no CUDA"
    with warnings.catch_warnings(record=True) as told:  # of a driver that is too old, for one
        warnings.simplefilter("always")
        available = torch.cuda.is_available()
    if not available:
        return "no CUDA device is visible to torch" + (f" ({told[0].message})" if told else "")
    oldest = min((int(arch[3:].rstrip("af")) for arch in torch.cuda.get_arch_list() if arch[:3] == "sm_"), default=0)
    major, minor = torch.cuda.get_device_capability()
    if 10 * major + minor < oldest:
        return f"this build of torch has no code for sm_{major}{minor}, only from sm_{oldest} on"
    return None


def _has_gpu() -> bool:
    """Whether this machine shows a GPU to this process, whatever torch can do with it."""
    try:
        return bool(gpus())
    except ResourceError:  # a driver is there and does not answer
        return True


def _choose_device(request: str) -> tuple[torch.device, tuple[str, ...]]:
    """The device, and where "auto" falls back to the CPU the reason."""
    if request == "cpu":
        return torch.device("cpu"), ()
    problem = _cuda_problem()
    if request == "auto":
        if problem is None:
            return torch.device("cuda", torch.cuda.current_device()), ()
        return torch.device("cpu"), (f"running on the CPU: {problem}",)
    name, _, index = request.partition(":")
    if name != "cuda" or (index and not index.isdecimal()):
        raise UsageError(f"device {request}: not a device", "use auto, cpu, cuda or cuda:N")
    if problem:
        raise ResourceError(f"device {request}: {problem}", code="use-cpu-or-install-cuda")
    if int(index or 0) >= torch.cuda.device_count():
        raise ResourceError(f"device {request}: {pluralize(torch.cuda.device_count(), 'GPU')} visible", "count from 0")
    return torch.device("cuda", int(index or torch.cuda.current_device())), ()


def place(
    config: ModelConfig,
    device: str = "auto",
    dtype: Dtype | None = None,
    kv: KvDtype = "auto",
    *,
    dense_prefill_copy: bool = False,
) -> Placement:
    """Choose for `config`; `dtype` None follows the model where the device is good at it.

    Raises UsageError for a device that is none, ResourceError for one that is not there: an explicit "cuda" never falls
    back.
    """
    chosen, reasons = _choose_device(device)
    notes, details = (reasons, ()) if reasons and _has_gpu() else ((), reasons)
    if dense_prefill_copy and chosen.type == "cpu":
        raise UsageError("a 16-bit copy of packed weights is kept on GPUs only", code="leave-out-shadow")
    wanted = torch_dtype(dtype or config.dtype)
    if dtype is None and chosen.type == "cpu" and wanted == torch.float16:
        wanted, notes = torch.bfloat16, (*notes, "float16 is slow on the CPU: activations are bfloat16")
    old = decline_packed(chosen) is not None  # the first with bfloat16 are also the first with those kernels
    if dtype is None and old and wanted == torch.bfloat16:
        wanted, notes = torch.float16, (*notes, "this GPU has no bfloat16: activations are float16")
    use_device(chosen)
    return Placement(chosen, wanted, notes, kv, dense_prefill_copy, details, decline_packed(chosen))


def decline_packed(device: torch.device) -> Declined | None:
    """Return why packed weights are unpacked at load on `device`; None if its kernels multiply them packed."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) >= OLDEST_PACKED:
        return None
    major, minor = torch.cuda.get_device_capability(device)
    needed = "{}.{}".format(*OLDEST_PACKED)
    return Declined("compute-capability", {"needed": needed, "found": f"{major}.{minor}"})


def use_device(device: torch.device) -> None:
    """Make a CUDA device the current one of this thread, where Triton launches and graphs are captured.

    Each thread has its own, device 0 at first: whoever runs a model on a thread calls this before.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)


def free_memory(device: torch.device) -> int:
    """Bytes that this process may still take on `device`, whatever others hold."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else memory().available
