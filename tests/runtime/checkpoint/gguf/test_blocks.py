"""Test every quantized type against the gguf library or a plain reference, dense and as packed groups."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants
from gguf.constants import GGML_QUANT_SIZES
from torch import Tensor

from mycli.runtime.checkpoint.formats.gguf import read_quantization, tensors
from mycli.runtime.checkpoint.gguf.blocks import dequantize_blocks, pack_rows
from mycli.runtime.checkpoint.gguf.types import QUANTIZED, READABLE_NAMES, TYPES, TYPES_BY_NAME, GgmlType
from mycli.runtime.checkpoint.open_folder import open_model_folder
from mycli.runtime.errors import ModelError
from mycli.runtime.quantization.packed_weight import dequantize
from mycli.runtime.quantization.scale_codes import scale_codes
from mycli.runtime.utils.json_fields import Fields
from tests.support.paths import PICO


# Types of llama.cpp that the gguf library may not decode, with the loops of ggml-quants.c for one block.
def _q1_0(scale: np.float32, data: list[int]) -> list[np.float32]:
    return [scale if data[j // 8] >> j % 8 & 1 else -scale for j in range(128)]


def _q2_0(scale: np.float32, data: list[int]) -> list[np.float32]:
    return [np.float32((data[j // 4] >> j % 4 * 2 & 3) - 1) * scale for j in range(64)]


REFERENCES = {"Q1_0": _q1_0, "Q2_0": _q2_0}
KNOWN = [name for name in READABLE_NAMES if name not in REFERENCES]


def test_types_are_readable_if_quantized_or_of_floats() -> None:
    listed, quantized = {kind.name for kind in TYPES}, {kind.name for kind in QUANTIZED}
    assert listed - {*READABLE_NAMES} == {"I8", "I16", "I32", "I64", "F64"}
    assert {*READABLE_NAMES} - quantized == {"F32", "F16", "BF16"}


def _dequantizable() -> set[str]:
    reached = set()
    for kind in GGMLQuantizationType:
        block, nbytes = GGML_QUANT_SIZES[kind]
        try:
            quants.dequantize(np.zeros((1, nbytes), dtype=np.uint8), kind)
        except NotImplementedError:
            continue
        reached.add(kind.name)
    return reached


def test_every_type_that_the_library_decodes_is_read() -> None:
    assert set(KNOWN) == _dequantizable() - REFERENCES.keys()


def test_sizes_are_the_librarys() -> None:
    for kind in TYPES:
        if kind.name in REFERENCES:
            continue
        assert GGML_QUANT_SIZES[GGMLQuantizationType[kind.name]] == (kind.block, kind.nbytes), kind.name
        assert GGMLQuantizationType[kind.name] == kind.id


def random_blocks(name: str, rows: int, blocks: int, seed: int = 0) -> Tensor:
    """Return random blocks with finite scales of either sign; all other bits are random."""
    kind = TYPES_BY_NAME[name]
    rng = np.random.default_rng(seed)
    data = rng.integers(0, 256, (rows, blocks * kind.nbytes), dtype=np.uint8)
    if name == "TQ2_0":  # three of four levels are used
        view = data.reshape(-1, kind.nbytes)
        fields = rng.integers(0, 3, (len(view), 64, 4), dtype=np.uint8)
        view[:, :64] = (fields << np.array([0, 2, 4, 6], dtype=np.uint8)).sum(-1)
    values = _reference(data, name).reshape(-1, kind.block)
    bad = ~np.isfinite(values).all(axis=1)
    data.reshape(-1, kind.nbytes)[bad] = 0
    return torch.from_numpy(data)


def _reference(data: np.ndarray, name: str) -> np.ndarray:
    with np.errstate(all="ignore"):
        if name in REFERENCES:
            blocks = data.reshape(-1, TYPES_BY_NAME[name].nbytes)
            scales = np.ascontiguousarray(blocks[:, :2]).view(np.float16).astype(np.float32)[:, 0]
            values = [REFERENCES[name](scale, row.tolist()) for scale, row in zip(scales, blocks[:, 2:], strict=True)]
            return np.array(values, dtype=np.float32).reshape(len(data), -1)
        return quants.dequantize(data, GGMLQuantizationType[name])


@pytest.mark.parametrize("name", KNOWN)
def test_values_are_the_librarys_bit_for_bit(name: str) -> None:
    data = torch.from_numpy(
        np.random.default_rng(1).integers(0, 256, (32, 4 * TYPES_BY_NAME[name].nbytes), dtype=np.uint8)
    )
    expected, actual = _reference(data.numpy(), name), dequantize_blocks(data, name).numpy()
    same = (expected.view(np.uint32) == actual.view(np.uint32)) | (np.isnan(expected) & np.isnan(actual))
    assert actual.dtype == np.float32 and same.all()


@pytest.mark.parametrize("name", KNOWN)
def test_a_single_block_is_decoded(name: str) -> None:
    """Its bytes are contiguous wherever they begin."""
    data = random_blocks(name, 2, 1, seed=2)
    assert torch.equal(dequantize_blocks(data[1:], name), dequantize_blocks(data, name)[1:])


@pytest.mark.parametrize("name", REFERENCES)
def test_values_are_those_of_the_reference(name: str) -> None:
    kind = TYPES_BY_NAME[name]
    assert (kind.id, kind.block, kind.nbytes) == {"Q1_0": (41, 128, 18), "Q2_0": (42, 64, 18)}[name]
    data = random_blocks(name, 16, 4, seed=1)
    assert torch.equal(dequantize_blocks(data, name), torch.from_numpy(_reference(data.numpy(), name)))
    one = torch.tensor([0x00, 0x3C, 0b11100100, *[0] * 15], dtype=torch.uint8)[None]  # scale 1.0
    levels = {"Q1_0": [-1, -1, 1, -1, -1, 1, 1, 1], "Q2_0": [-1, 0, 1, 2, -1, -1, -1, -1]}[name]
    assert dequantize_blocks(one, name)[0, :8].tolist() == levels


@pytest.mark.parametrize("kind", QUANTIZED, ids=lambda kind: f"{kind.name}-{kind.packing.name}")
def test_packed_groups_mean_the_same(kind: GgmlType) -> None:
    """The values are exact, or off by one fp32 rounding where a minimum becomes part of the offset."""
    data = random_blocks(kind.name, 24, 8)
    expected, actual = torch.from_numpy(_reference(data.numpy(), kind.name)), pack_rows(data, TYPES_BY_NAME[kind.name])
    values = dequantize(actual)
    packing = actual.packing
    assert actual.scales.shape[1] == packing.groups(actual.in_features)
    if actual.offsets is not None and packing.group_size is not None:
        largest = (actual.offsets.abs() + 16 * actual.scales.abs()).repeat_interleave(packing.group_size, dim=1)
        assert ((values - expected).abs() <= largest * 2.0**-23).all()
        assert (values != expected).float().mean() < 0.7  # most need no rounding
    else:
        assert torch.equal(values, expected)
    assert packing == TYPES_BY_NAME[kind.name].packing and actual.in_features == expected.shape[1]


def test_a_minimum_of_zero_levels_outlives_a_large_scale() -> None:
    """Regression of a `fuzz` finding: the offset held both, and fp32 rounded the minimum away."""
    block = torch.zeros(1, 176, dtype=torch.uint8)
    block[:, :4] = torch.tensor([[-3920.0, 3.2e-5]]).half().view(torch.uint8)
    block[:, 4:16] = 0x3F
    expected = torch.from_numpy(_reference(block.numpy(), "Q5_K"))
    assert expected.abs().min() > 0
    assert torch.equal(dequantize(pack_rows(block, TYPES_BY_NAME["Q5_K"])), expected)


SIXTEEN_BITS = [kind for kind in QUANTIZED if kind.scale_dtype != "float32"]


@pytest.mark.parametrize("kind", SIXTEEN_BITS, ids=lambda kind: kind.name)
def test_scales_of_sixteen_bits_stay_exact(kind: GgmlType) -> None:
    actual = pack_rows(random_blocks(kind.name, 8, 4, seed=2), kind)
    stored = replace(actual, scales=actual.scales.to(getattr(torch, kind.scale_dtype)).float())
    assert torch.equal(dequantize(stored), dequantize(actual))


@pytest.mark.parametrize("kind", [kind for kind in QUANTIZED if kind.codes != "e2m1"], ids=lambda kind: kind.name)
def test_scales_of_super_blocks_are_whole_numbers_of_their_factors(kind: GgmlType) -> None:
    """The memory estimate assumes it: other scales would be stored in full."""
    actual = pack_rows(random_blocks(kind.name, 8, 4, seed=3), kind)
    assert actual.packing.byte_scales == kind.byte_scales
    assert (scale_codes(actual) is None) is (kind.byte_scales is None)


def test_a_level_that_the_type_has_not_is_an_error() -> None:
    data = torch.full((1, 66), 0xFF, dtype=torch.uint8)
    with pytest.raises(ModelError, match="TQ2_0"):
        pack_rows(data, TYPES_BY_NAME["TQ2_0"])


def test_columns_in_another_order_leave_groups_without_their_super_blocks() -> None:
    config = open_model_folder(PICO).config
    queries, down = "model.layers.0.self_attn.q_proj", "model.layers.0.mlp.down_proj"
    section = Fields({"types": {queries: "Q4_K", down: "Q4_K"}, "reordered": [down]}, "config.json")
    packings = read_quantization(section, config, None)
    assert packings[queries] == TYPES_BY_NAME["Q4_K"].packing == replace(packings[down], byte_scales="super_blocks")
    linear = next(linear for linear in config.linears() if linear.name == down)
    ((_, _, types),) = tensors(linear, packings[down], {})
    assert packings[down].byte_scales is None and "Q4_K" in types


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q6_K"])
def test_whole_groups_of_columns_change_places(name: str) -> None:
    kind = TYPES_BY_NAME[name]
    data, size = random_blocks(name, 3, 4), kind.packing.group_size
    assert size is not None
    plain = dequantize(pack_rows(data, kind))
    columns = torch.arange(plain.shape[1]).view(-1, size).flip(0).flatten()
    assert torch.equal(dequantize(pack_rows(data, kind, columns)), plain[:, columns])
    for divided in (columns.roll(size // 2), columns.view(-1, size).flip(1).flatten()):
        with pytest.raises(ModelError, match=f"heads do not end where groups of {size} weights end"):
            pack_rows(data, kind, divided)
