"""Test device placement on simulated machines by patching torch."""

import warnings
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mycli.runtime.checkpoint.open_folder import open_model_folder
from mycli.runtime.device import nvml, placement
from mycli.runtime.device.nvml import Gpu
from mycli.runtime.device.placement import free_memory, place, use_device
from mycli.runtime.device.system import Memory
from mycli.runtime.errors import Declined, ExitCode, ResourceError, UsageError
from tests.support.paths import PICO

CONFIG = open_model_folder(PICO).config


def machine(
    monkeypatch: pytest.MonkeyPatch,
    *,
    cuda: bool = True,
    driver: bool = True,
    capability: tuple[int, int] = (9, 0),
    others: tuple[tuple[int, int], ...] = (),
    codes: tuple[str, ...] = ("sm_75", "sm_80", "sm_90a", "compute_120"),
    log: list[torch.device] | None = None,
) -> None:
    """Simulate a machine with a GPU of `capability`; `cuda`: torch is built with it, `driver`: it is new enough.

    others: capabilities of more GPUs; codes: the chips that torch is compiled for.
    log: receives each device that is made current.
    """
    shown = Gpu(0, "GPU", 80 << 30, 80 << 30, capability, "580.1")
    monkeypatch.setattr(nvml, "gpus", lambda: [shown])

    def available() -> bool:
        if not driver:
            warnings.warn("CUDA initialization: The NVIDIA driver on your system is too old", stacklevel=2)
        return driver

    monkeypatch.setattr(torch.version, "cuda", "13.0" if cuda else None)
    monkeypatch.setattr(torch.cuda, "is_available", available)
    chips = (capability, *others)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(chips))
    monkeypatch.setattr(torch.cuda, "set_device", [].append if log is None else log.append)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: list(codes))

    def capability_of(device: torch.device | int = 0) -> tuple[int, int]:
        return chips[device if isinstance(device, int) else device.index or 0]

    monkeypatch.setattr(torch.cuda, "get_device_capability", capability_of)


FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "F13-no-cuda-in-torch": ({"cuda": False}, "no CUDA"),
    "F13-old-driver": ({"driver": False}, "driver on your system is too old"),
    "F13-old-gpu": ({"capability": (6, 1)}, "no code for sm_61, only for sm_75 and newer"),
    "F13-new-gpu": (
        {"capability": (12, 0), "codes": ("sm_50", "sm_80", "sm_90")},
        "no code for sm_120, only for sm_50 to sm_90",
    ),
    "F13-gpu-between": (
        {"capability": (8, 0), "codes": ("sm_75", "sm_90")},
        "no code for sm_80, only for sm_75 to sm_90",
    ),
}


@pytest.mark.parametrize("fault, reason", FAULTS.values(), ids=FAULTS)
def test_falls_back_with_a_notice_unless_cuda_was_asked_for(
    monkeypatch: pytest.MonkeyPatch, fault: dict[str, Any], reason: str
) -> None:
    machine(monkeypatch, **fault)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch's own warning is suppressed, so there is only one message
        found = place(CONFIG)
    assert found.device.type == "cpu" and len(found.notes) == 1
    assert found.notes[0].startswith("running on the CPU: ") and reason in found.notes[0]
    for request in ("cuda", "cuda:0"):
        with pytest.raises(ResourceError, match=reason) as caught:
            place(CONFIG, request)
        assert caught.value.exit_code == ExitCode.RESOURCES
    assert place(CONFIG, "cpu").notes == (), "asked for: nothing to announce"


def test_a_machine_without_a_gpu_is_not_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that a missing GPU is reported only in `details`, and a driver that does not answer in `notes`."""
    machine(monkeypatch, cuda=False)
    monkeypatch.setattr(nvml, "gpus", list)
    found = place(replace(CONFIG, dtype="float16"))
    assert [note for note in found.notes if "CUDA" in note] == [] and len(found.notes) == 1
    assert found.details == ("running on the CPU: this build of torch has no CUDA",)

    def broken() -> list[Gpu]:
        raise ResourceError("the NVIDIA driver does not answer")

    monkeypatch.setattr(nvml, "gpus", broken)
    assert "no CUDA" in place(CONFIG).notes[0]


def test_a_gpu_is_used_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch)
    found = place(CONFIG)
    assert (found.device, found.dtype, found.notes) == (torch.device("cuda", 0), torch.bfloat16, ())
    with pytest.raises(ResourceError, match="1 GPU visible"):
        place(CONFIG, "cuda:1")


def test_a_shadow_is_for_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="stored on GPUs only"):
        place(CONFIG, "cpu", prompt_copy="16bit")
    machine(monkeypatch)
    assert place(CONFIG, prompt_copy="16bit").prompt_copy == "16bit" and place(CONFIG).prompt_copy == "none"


def test_portable_bits_are_for_cpus_in_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    found = place(CONFIG, "cpu", dtype="bfloat16", portable=True)
    assert found.portable and not place(CONFIG, "cpu").portable
    with pytest.raises(UsageError, match="need activations in bfloat16") as error:
        place(CONFIG, "cpu", dtype="float32", portable=True)
    assert error.value.code == "portable-in-bf16"
    machine(monkeypatch)
    with pytest.raises(UsageError, match="on the CPU only, not on cuda:0") as error:
        place(CONFIG, portable=True)
    assert error.value.code == "portable-on-cpu"


def test_8_bit_prompts_need_a_chip_with_such_products(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, capability=(8, 6))
    with pytest.raises(ResourceError, match=r"capability 8\.9"):
        place(CONFIG, prompt_copy="fp8")
    machine(monkeypatch, capability=(8, 9))
    assert place(CONFIG, prompt_copy="fp8").prompt_copy == "fp8"
    with pytest.raises(UsageError, match="activations are float16"):
        place(CONFIG, dtype="float16", prompt_copy="fp8")


@pytest.mark.parametrize("fault", ["F14-no-bf16"])
def test_fp16_where_the_gpu_has_no_bf16(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    machine(monkeypatch, capability=(7, 5))
    found = place(CONFIG)
    assert found.device.type == "cuda" and found.dtype == torch.float16
    assert "no bfloat16" in found.notes[0] and "float16" in found.notes[0]
    assert place(CONFIG, dtype="float32").notes == ()
    machine(monkeypatch, capability=(8, 0))
    assert place(CONFIG).dtype == torch.bfloat16


def test_float16_becomes_bf16_on_the_cpu_with_a_notice() -> None:
    found = place(replace(CONFIG, dtype="float16"), "cpu", kv="int8")
    assert found.dtype == torch.bfloat16 and "slow" in found.notes[0] and found.kv == "int8"


@pytest.mark.parametrize("name", ["gpu", "cuda:x", "CPU"])
def test_what_is_no_device_is_a_usage_error(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    machine(monkeypatch)
    with pytest.raises(UsageError, match="unknown device"):
        place(CONFIG, name)


def test_the_chosen_device_is_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The current device receives kernel launches and CUDA graphs, wherever the tensors are."""
    log: list[torch.device] = []
    machine(monkeypatch, others=((9, 0),), log=log)
    assert place(CONFIG, "cuda:1").device == torch.device("cuda", 1)
    assert log == [torch.device("cuda", 1)]
    place(CONFIG, "cpu")
    use_device(torch.device("cuda"))  # torch refuses to make a device without an index the current one
    assert len(log) == 1


def test_an_old_gpu_has_packed_weights_unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, capability=(7, 5))
    assert place(CONFIG).unpacked == Declined("compute-capability", {"needed": "8.0", "found": "7.5"})
    machine(monkeypatch, capability=(8, 0))
    assert place(CONFIG).unpacked is None and place(CONFIG, "cpu").unpacked is None


def test_torch_must_have_code_for_the_gpu_that_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, others=((6, 1), (12, 1)))
    for request in ("auto", "cuda", "cuda:0", "cuda:2"):
        assert place(CONFIG, request).device.type == "cuda"
    with pytest.raises(ResourceError, match="device cuda:1: this build of torch has no code for sm_61"):
        place(CONFIG, "cuda:1")
    machine(monkeypatch, capability=(6, 1), others=((8, 9),))
    assert place(CONFIG, "cuda:1").device == torch.device("cuda", 1)
    assert place(CONFIG).device.type == "cpu"


@pytest.mark.parametrize(("shared", "available", "free"), [(False, 100, 2), (True, 100, 100), (True, 200, 120)])
def test_the_page_cache_is_free_where_a_gpu_shares_main_memory(
    shared: bool, available: int, free: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placement, "memory", lambda: Memory(200, available, "machine"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2, 120))
    properties = SimpleNamespace(is_integrated=shared)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    assert free_memory(torch.device("cuda", 0)) == free
