"""Test the header parser against hostile bytes (A1 to A18) and against the safetensors library."""

import math
import tracemalloc
from typing import Any

import pytest
import safetensors
from hypothesis import given, settings
from hypothesis import strategies as st

from mycli.cli.remedies import remedy
from mycli.runtime.checkpoint import formats
from mycli.runtime.checkpoint.safetensors_header import (
    MAX_HEADER,
    TensorEntry,
    header_bytes,
    make_header,
    parse_header,
)
from mycli.runtime.errors import ModelError
from mycli.runtime.memory.fit import PackingScheme
from mycli.runtime.quantization.scheme import Packing
from mycli.runtime.utils.dtypes import BY_SAFETENSORS_NAME
from mycli.runtime.utils.sanitize import one_line
from tests.attacks.safetensors_attacks import ATTACKS, file, raw, simple, tensor
from tests.support.published import published


@pytest.mark.parametrize("case", ATTACKS)
def test_header_rejected(case: str) -> None:
    make, problem = ATTACKS[case]
    data = make()
    with pytest.raises(ModelError, match=problem) as caught:
        parse_header(data, len(data), "model.safetensors")
    message = caught.value.message
    assert message.startswith("model.safetensors:")
    assert one_line(message, 1000) == message, "a hostile name reached the message unescaped"
    assert len(message) < 400
    assert remedy(caught.value)


def test_valid_file_is_read() -> None:
    data = simple(
        a=("F32", (2,), bytes(8)), b=("BF16", (2, 1), bytes(4)), empty=("I8", (0, 7), b""), scalar=("I64", (), bytes(8))
    )
    entries = parse_header(data, len(data), "x.safetensors")
    start = len(data) - 20
    assert {name: (e.dtype, e.shape, e.offset, e.nbytes) for name, e in entries.items()} == {
        "a": ("F32", (2,), start, 8),
        "b": ("BF16", (2, 1), start + 8, 4),
        "empty": ("I8", (0, 7), start + 12, 0),
        "scalar": ("I64", (), start + 12, 8),
    }
    assert {e.file for e in entries.values()} == {"x.safetensors"}


def test_the_smallest_file_has_no_tensors() -> None:
    data = (2).to_bytes(8, "little") + b"{}"
    assert header_bytes(data[:9], len(data), "x") == len(data) == 10 and parse_header(data, len(data), "x") == {}


def test_order_of_header_does_not_matter() -> None:
    data = file({"b": tensor(8, 16), "a": tensor(0, 8)}, bytes(16))
    assert list(parse_header(data, len(data), "x")) == ["b", "a"]


def test_padding_and_metadata_pass() -> None:
    data = raw(b'{"__metadata__":{"format":"pt"}}      ')
    assert parse_header(data, len(data), "x") == {}


def test_prefix_of_a_remote_file() -> None:
    data = simple(a=("F32", (2,), bytes(8)))
    needed = header_bytes(data[:9], len(data), "x")
    assert needed == len(data) - 8
    assert parse_header(data[:needed], len(data), "x") == parse_header(data, len(data), "x")
    with pytest.raises(ValueError, match="needed"):
        parse_header(data[: needed - 1], len(data), "x")


@pytest.mark.parametrize("case", ["A3-length-2^63", "A13-too-many-values", "A14-deep-lists"])
def test_rejection_takes_little_memory(case: str) -> None:
    data = ATTACKS[case][0]()
    tracemalloc.start()
    try:
        with pytest.raises(ModelError):
            parse_header(data, len(data), "x")
        assert tracemalloc.get_traced_memory()[1] < 4 * len(data) + (1 << 20)
    finally:
        tracemalloc.stop()


def test_more_tensors_than_layers_of_experts_have_are_read() -> None:
    header, entries = make_header([(f"t{index}", "I8", (0,)) for index in range(94 * 128 * 3 * 3)], "x")
    assert parse_header(header, len(header), "x") == entries


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Qwen3-235B-A22B", "Qwen3-Next-80B-A3B"])
def test_the_header_of_packed_experts_is_read(name: str) -> None:
    """The file holds all packed experts of a large model: codes, scales and shape per expert linear."""
    config = published(name)
    packings = PackingScheme(Packing(4, 128)).packings(config)
    expected = formats.expected_tensors(config, packings, {})
    header, entries = make_header([(name, types[0], shape) for name, shape, types in expected], "x")
    assert len(entries) > 100_000 and len(header) < MAX_HEADER
    assert parse_header(header, max(entry.offset + entry.nbytes for entry in entries.values()), "x") == entries


PLANS = st.dictionaries(
    st.text(st.characters(min_codepoint=0x21, max_codepoint=0x2FF, exclude_categories=["Cc", "Cs"]), min_size=1).filter(
        lambda name: name != "__metadata__" and "../" not in name and "..\\" not in name
    ),
    st.tuples(st.sampled_from(sorted(BY_SAFETENSORS_NAME)), st.lists(st.integers(0, 4), max_size=4)),
    max_size=8,
)


@settings(max_examples=50, deadline=None)
@given(PLANS)
def test_made_header_is_read_by_us_and_by_the_library(plan: dict[str, tuple[str, list[int]]]) -> None:
    header, entries = make_header([(name, dtype, tuple(shape)) for name, (dtype, shape) in plan.items()], "f")
    size = max((entry.offset + entry.nbytes for entry in entries.values()), default=len(header))
    data = header.ljust(size, b"\1")
    assert parse_header(data, size, "f") == entries
    assert {e.name: (e.dtype, list(e.shape)) for e in entries.values()} == plan
    theirs = dict(safetensors.deserialize(data))
    assert {name: (value["dtype"], value["shape"]) for name, value in theirs.items()} == plan
    assert all(entry.offset % BY_SAFETENSORS_NAME[entry.dtype].nbytes == 0 for entry in entries.values())


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=40), st.integers(0, 120), st.integers(0, 255))
def test_no_damage_escapes_as_another_exception(noise: bytes, position: int, byte: int) -> None:
    """Check that any bytes raise ModelError or parse as in the safetensors library."""
    good = bytearray(simple(a=("F32", (2,), bytes(8)), b=("U8", (3,), b"abc")))
    good[position % len(good)] = byte
    for data in (bytes(good), noise, bytes(good) + noise):
        try:
            entries = parse_header(data, len(data), "f")
        except ModelError:
            continue
        assert {name for name, _ in safetensors.deserialize(data)} == set(entries)


def _parts(shape: tuple[int, ...], names: int, **options: Any) -> list[tuple[tuple[int, ...], int, bool, Any]]:
    entry = TensorEntry("all", "BF16", shape, "f", 64, 2 * math.prod(shape))
    parts = entry.split([f"part{index}" for index in range(names)], **options)
    assert [part.name for part in parts] == [f"part{index}" for index in range(names)]
    return [(part.shape, part.offset, part.transposed, part.columns) for part in parts]


def test_a_stacked_tensor_is_split() -> None:
    rows = [((3, 5), 64, False, None), ((3, 5), 94, False, None)]
    assert _parts((2, 3, 5), 2) == _parts((2, 3, 5), 2, part=(3, 5)) == rows
    assert _parts((6, 1, 5), 2) == rows
    assert _parts((2, 5, 3), 2, transposed=True) == [((3, 5), 64, True, None), ((3, 5), 94, True, None)]
    # Of the shape of a transpose, but said to be transposed: no columns are looked for.
    assert _parts((2, 5, 3), 2, transposed=True, part=(3, 5)) == _parts((2, 5, 3), 2, transposed=True)
    assert _parts((2, 5, 3), 2, part=(3, 5)) == [((3, 5), 64, True, (0, 3)), ((3, 5), 94, True, (0, 3))]
    halves = [((3, 5), 64, True, (0, 6)), ((3, 5), 64, True, (3, 6)), ((3, 5), 124, True, (0, 6))]
    assert _parts((2, 5, 6), 4, part=(3, 5)) == [*halves, ((3, 5), 124, True, (3, 6))]


def test_a_tensor_of_another_shape_stays_whole() -> None:
    entry = TensorEntry("all", "BF16", (3, 5, 4), "f", 64, 120)
    assert entry.split(["a", "b"], part=(3, 5)) == entry.split(["a", "b"], transposed=True) == [entry]
