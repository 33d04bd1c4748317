"""Test that the self-test passes on this installation and detects a wrong kernel."""

import pytest
import torch
from torch import Tensor

from mycli.runtime.diagnostics import selftest as doctor
from mycli.runtime.engine.config import EngineConfig
from mycli.runtime.errors import Declined
from mycli.runtime.kernels.reference import DequantizeKernel
from mycli.runtime.open import open_model
from mycli.runtime.quantization.packed_weight import Matmul, PackedWeight
from mycli.runtime.quantization.scheme import Packing
from mycli.runtime.utils.dtypes import Dtype
from tests.support.paths import PICO

CPU = torch.device("cpu")


class Twisted:
    name = "twisted"

    def decline(
        self, packing: Packing, out_features: int, in_features: int, device: torch.device, dtype: torch.dtype
    ) -> Declined | None:
        return None if packing.bits == 4 else Declined("packing-not-int4-groups", {"packing": packing.name})

    def prepare(self, weight: PackedWeight, dtype: torch.dtype) -> Matmul:
        rolled = PackedWeight(weight.packed, weight.scales.roll(1, 0), weight.packing, weight.in_features)
        return DequantizeKernel().prepare(rolled, dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_every_kernel_agrees_with_its_reference(dtype: torch.dtype) -> None:
    findings = list(doctor.check_kernels(CPU, dtype))
    assert all(finding.ok for finding in findings), [one for one in findings if not one.ok]
    assert [one.packing for one in findings if one.used] == [packing.name for packing in doctor.PACKINGS]


def test_a_wrong_kernel_is_found_and_a_declining_one_is_not_blamed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "kernels", lambda: (Twisted(), DequantizeKernel()))
    found = {(one.packing, one.kernel): one for one in doctor.check_kernels(CPU, torch.float32)}
    wrong, right = found["int4-g128", "twisted"], found["int4-g128", "dequantize"]
    assert (wrong.ok, wrong.used, right.ok, right.used) == (False, True, True, False)
    declined = found["int8-g128", "twisted"]
    assert declined.ok and declined.error is None and declined.declined is not None
    assert found["int8-g128", "dequantize"].used


@pytest.mark.parametrize(
    "found, error",
    [(torch.tensor([1.0, 1.0]), 0.0), (torch.tensor([1.5, 0.5]), 0.5), (torch.tensor([1.0, torch.nan]), float("inf"))],
    ids=["equal", "half", "nan"],
)
def test_relative_error(found: Tensor, error: float) -> None:
    assert doctor.relative_rms(found, torch.ones(2, dtype=torch.float64)) == pytest.approx(error)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_golden_reply(dtype: Dtype) -> None:
    assert doctor.golden_reply(open_model(PICO, EngineConfig("cpu", dtype, context=128))) == doctor.ANSWER


def test_versions_name_python_and_torch() -> None:
    found = doctor.versions()
    assert {"python", "torch"} <= set(found)  # absent when run from a checkout
