"""Test the sizes of a number format, and which shapes it fits."""

from dataclasses import replace

import pytest
from gguf import quants

from mycli.runtime.errors import ModelError, UsageError
from mycli.runtime.quantization.scheme import (
    BITS,
    GROUP_SIZES,
    INTEGER_TABLES,
    Codes,
    Packing,
    parse_packing,
    stacked_packing,
)


@pytest.mark.parametrize("group", [*GROUP_SIZES, None])
@pytest.mark.parametrize("bits", BITS)
def test_sizes(bits: int, group: int | None) -> None:
    packing = Packing(bits, group)
    scales = 384 // group if group else 1
    assert packing.groups(384) == scales
    assert packing.bytes(10, 384) == 10 * (384 * bits // 8 + 2 * scales)


def test_a_group_that_does_not_divide_is_refused() -> None:
    with pytest.raises(ModelError, match="128 does not divide 192"):
        Packing(4, 128).groups(192)


@pytest.mark.parametrize("name", ["int4-g128", "int3-g32", "int8-channel", "nf4-g64", "nf4-g32"])
def test_names_are_read_back(name: str) -> None:
    assert parse_packing(name).name == name


def test_the_table_of_normal_quantiles_has_fp32_scales_in_memory() -> None:
    assert parse_packing("nf4").name == "nf4-g64"
    assert parse_packing("nf4-g64").bytes(10, 384) == 10 * (384 // 2 + 4 * 384 // 64)


@pytest.mark.parametrize("name", ["nf4-channel", "nf4-g16", "nf3-g64", "int5-g32", "nf4-g64-offset", ""])
def test_what_quantizing_does_not_write_is_no_scheme(name: str) -> None:
    with pytest.raises(UsageError, match="unknown quantization scheme"):
        parse_packing(name)


Q4_K = Packing(4, 32, "gguf", offsets=True, scale_dtype="float32", byte_scales="super_blocks")
Q6_K = Packing(6, 16, "gguf", scale_dtype="float32", byte_scales="super_blocks")
IQ4_XS = Packing(4, 32, "gguf", codes="iq4", scale_dtype="float32", byte_scales="super_blocks")


@pytest.mark.parametrize(
    ("packings", "stacked"),
    [
        ((Q4_K, Q6_K), Packing(6, 16, offsets=True, scale_dtype="float32")),
        ((IQ4_XS, replace(Q4_K, bits=5)), Packing(8, 32, offsets=True, scale_dtype="float32")),
        ((Packing(4, 128), Packing(8, 64), Packing(4, 128)), Packing(8, 64)),
        ((Packing(4, None), Packing(4, 96)), Packing(4, 96)),
        ((Packing(4, None), Packing(8, None)), Packing(8, None)),
        (
            (replace(Q4_K, bits=2, group_size=16), replace(Q6_K, bits=3)),
            Packing(4, 16, offsets=True, scale_dtype="float32"),
        ),
        ((Packing(4, 128), Packing(8, 64, scale_dtype="float16")), Packing(8, 64, scale_dtype="float32")),
        ((Q4_K, Q4_K), None),
        ((Q4_K, None), None),
        ((Packing(4, 128), Packing(4, 128, codes="nf4")), None),
        ((Packing(4, 128), Packing(4, 128, permuted=True)), None),
    ],
    ids=["Q4_K_M", "IQ4_XS", "widths", "channel", "channels", "Q2_K", "scales", "alike", "dense", "table", "permuted"],
)
def test_several_packings_are_one_of_integers(packings: tuple[Packing | None, ...], stacked: Packing | None) -> None:
    assert stacked_packing(packings) == stacked


@pytest.mark.parametrize(
    ("codes", "values"),
    [
        ("iq4", set(quants.IQ4_NL.kvalues)),
        ("iq3_xxs", {sign * value for value in quants.IQ3_XXS.grid_map for sign in (1, -1)}),
        ("iq3_s", {sign * value for value in quants.IQ3_S.grid_map for sign in (1, -1)}),
        ("iq2", {sign * value for value in quants.IQ2_XXS.grid_map for sign in (1, -1)}),
        ("iq1", {value + shift for value in quants.IQ1_S.grid_map for shift in (0.125, -0.125)}),
    ],
)
def test_tables_have_the_values_of_ggml_in_ascending_order(codes: Codes, values: set[float]) -> None:
    table, unit = INTEGER_TABLES[codes], 0.125 if codes == "iq1" else 1
    assert {entry * unit for entry in table} == values and list(table) == sorted(table)
    assert len(table) in (8, 16), "a code of 3 or of 4 bits"
