"""Test the GGUF header parser: it reads what the library writes, and errors name the fault in hostile files."""

import io
import os
import struct
import tracemalloc
from array import array
from pathlib import Path

import gguf as library
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mycli.runtime.checkpoint.gguf.files import join_headers
from mycli.runtime.checkpoint.gguf.header import GgufHeader, GgufModel, parse_gguf_header
from mycli.runtime.checkpoint.gguf.writer import GgufWriter, Unwritten, make_gguf_header
from mycli.runtime.checkpoint.gguf_parts import is_gguf, part_names
from mycli.runtime.errors import ModelError, UsageError
from mycli.runtime.utils.json_fields import Fields
from tests.attacks import gguf_attacks as attacks


def parse(data: bytes) -> GgufHeader:
    def read(offset: int, count: int) -> bytes:
        assert 0 <= offset <= len(data) and count > 0  # never reads past the end
        return data[offset : offset + count]

    return parse_gguf_header(read, len(data), "x.gguf")


def test_what_the_library_writes_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    writer = library.GGUFWriter(path, "llama")
    for add, name, value in (
        (writer.add_uint8, "u8", 7),
        (writer.add_int8, "i8", -7),
        (writer.add_uint64, "u64", 1 << 63),
        (writer.add_int64, "i64", -(1 << 62)),
        (writer.add_float32, "f32", 0.5),
        (writer.add_float64, "f64", 0.1),
        (writer.add_bool, "yes", True),
        (writer.add_string, "text", "größer ▁ 🙂"),
        (writer.add_array, "texts", ["a", "", "ü"]),
        (writer.add_array, "numbers", [1, -2, 3]),
        (writer.add_array, "reals", [0.5, -1.0]),
    ):
        add(name, value)
    writer.add_tensor("plain", np.arange(12, dtype=np.float32).reshape(3, 4))
    writer.add_tensor("half", np.ones((5, 3), dtype=np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    data = path.read_bytes()
    header = parse(data)
    values = header.metadata.values
    assert {name: values[name] for name in ("u8", "i8", "u64", "i64", "f32", "f64", "yes", "text", "texts")} == {
        **{"u8": 7, "i8": -7, "u64": 1 << 63, "i64": -(1 << 62), "f32": 0.5, "f64": 0.1, "yes": True},
        **{"text": "größer ▁ 🙂", "texts": ["a", "", "ü"]},
    }
    assert list(values["numbers"]) == [1, -2, 3] and list(values["reals"]) == [0.5, -1.0]
    plain = header.tensors["plain"]
    assert (plain.dtype, plain.shape, header.tensors["half"].dtype) == ("F32", (3, 4), "F16")
    assert np.array_equal(np.frombuffer(data, np.float32, 12, plain.offset), np.arange(12))


def test_what_we_write_the_library_reads(tmp_path: Path) -> None:
    values = {"general.architecture": "llama", "n": 3, "x": 0.5, "yes": True, "texts": ["a", "ü"], "ids": [1, -2]}
    blocks = np.arange(36, dtype=np.uint8)
    with GgufWriter(tmp_path / "a.gguf", values, [("one", "F32", (2, 3)), ("two", "Q4_0", (2, 32))]) as writer:
        writer.write("two", blocks.data)
        writer.write("one", np.arange(4, dtype=np.float32).data)
        writer.write("one", np.arange(4, 6, dtype=np.float32).data, 16)
        assert not (tmp_path / "a.gguf").exists()
        writer.finish()
    reader = library.GGUFReader(tmp_path / "a.gguf")
    read = {field.name: field.contents() for field in reader.fields.values()}
    assert {name: read[name] for name in values} == values
    first, second = reader.tensors
    assert np.array_equal(first.data, np.arange(6, dtype=np.float32).reshape(2, 3))
    assert second.tensor_type.name == "Q4_0" and np.array_equal(second.data.ravel(), blocks)
    assert list(tmp_path.iterdir()) == [tmp_path / "a.gguf"]  # no lock and no partial file


@pytest.mark.parametrize("values", [1, 8, 9])
def test_a_file_has_its_size_from_the_start(values: int, tmp_path: Path) -> None:
    """Its space is reserved, bytes that are not written are zero, and the end is padded as the library pads it."""
    tensor = np.zeros(values, dtype=np.float32)
    with GgufWriter(tmp_path / "a.gguf", {}, [("one", "F32", (values,))]) as writer:
        assert writer.partial.stat().st_size == writer.nbytes
        writer.leave_zero("one")
        writer.finish()
    theirs = library.GGUFWriter(tmp_path / "b.gguf", "llama")
    theirs.add_tensor("one", tensor)
    for write in (theirs.write_header_to_file, theirs.write_kv_data_to_file, theirs.write_tensors_to_file):
        write()
    theirs.close()
    read = [library.GGUFReader(tmp_path / name).tensors[0] for name in ("a.gguf", "b.gguf")]
    assert np.array_equal(read[0].data, tensor)
    sizes = [(tmp_path / name).stat().st_size for name in ("a.gguf", "b.gguf")]
    assert sizes[0] - read[0].data_offset == sizes[1] - read[1].data_offset


def test_a_write_that_the_system_cuts_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux writes at most 2 GiB in one call."""
    write, tensor = os.pwrite, np.arange(5, dtype=np.float32)
    monkeypatch.setattr("os.pwrite", lambda file, data, offset: write(file, data[:7], offset))
    with GgufWriter(tmp_path / "a.gguf", {"general.architecture": "llama"}, [("one", "F32", (5,))]) as writer:
        writer.write("one", tensor.data)
        writer.finish()
    assert np.array_equal(library.GGUFReader(tmp_path / "a.gguf").tensors[0].data, tensor)


def test_a_file_that_is_not_finished_never_appears(tmp_path: Path) -> None:
    with GgufWriter(tmp_path / "a.gguf", {}, [("one", "F32", (2,))]) as writer, pytest.raises(ValueError):
        writer.finish()
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "a.gguf").write_bytes(b"mine")
    with pytest.raises(UsageError, match="exists already"), GgufWriter(tmp_path / "a.gguf", {}, []):
        pass
    assert (tmp_path / "a.gguf").read_bytes() == b"mine"


def test_partial_files_of_a_killed_run_are_removed_and_no_others(tmp_path: Path) -> None:
    left, *others = (tmp_path / name for name in (".a.gguf.01ab.partial", ".b.gguf.01ab.partial", ".a.gguf.notes"))
    for path in (left, *others):
        path.touch()
    with GgufWriter(tmp_path / "a.gguf", {}, []):
        assert not left.exists() and (tmp_path / ".a.gguf.lock").exists()
    assert set(tmp_path.iterdir()) == set(others)


@pytest.mark.parametrize("name", attacks.ATTACKS)
def test_an_attack_is_an_error_that_says_what_is_wrong(name: str) -> None:
    make, message = attacks.ATTACKS[name]
    data = make()
    tracemalloc.start()
    try:
        with pytest.raises(ModelError, match=message):
            parse(data)
        assert tracemalloc.get_traced_memory()[1] < 4 * len(data) + (1 << 21)  # sizes in the file are not trusted
    finally:
        tracemalloc.stop()


def test_a_valid_file_of_the_attacks_own_making() -> None:
    header = parse(attacks.gguf((attacks.NAME,), (attacks.ONE, attacks.info(b"b", offset=32)), bytes(64)))
    assert list(header.tensors) == ["a", "b"] and header.metadata.values == {"general.name": "x"}


_PIECES = st.sampled_from(
    [
        attacks.NAME,
        attacks.key(b"n", attacks.U32, struct.pack("<I", 7)),
        attacks.key(b"l", attacks.ARRAY, attacks.array(attacks.STRING, 2, attacks.text(b"a") + attacks.text(b"b"))),
        attacks.key(b"f", attacks.ARRAY, attacks.array(attacks.F32, 3, bytes(12))),
    ]
)


@st.composite
def _damaged(draw: st.DrawFn) -> bytes:
    keys = tuple({piece[8:9]: piece for piece in draw(st.lists(_PIECES, max_size=4))}.values())
    tensors = (attacks.ONE, attacks.info(b"b", (32, 2), 2, 32))
    data = bytearray(attacks.gguf(keys, tensors, bytes(96)))
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, max(len(data) - 1, 0)))
        change = draw(st.sampled_from(["set", "word", "cut", "double", "end"]))
        if change == "set":
            data[at : at + 1] = bytes([draw(st.integers(0, 255))])
        elif change == "word":
            data[at : at + 8] = struct.pack(
                "<Q", draw(st.sampled_from([0, 1, 31, 1 << 31, 1 << 32, 1 << 63, 2**64 - 1]))
            )
        elif change == "cut":
            del data[at : at + draw(st.integers(1, 16))]
        elif change == "double":
            data[at:at] = data[at : at + draw(st.integers(1, 16))]
        else:
            del data[max(1, at) :]
    return bytes(data)


def _parses_or_says_why(data: bytes) -> None:
    try:
        header = parse(data)
    except ModelError as error:
        assert error.message
        return
    for entry in header.tensors.values():
        assert entry.offset > 0 and entry.offset + entry.nbytes <= len(data)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(_damaged())
def test_damaged_files_are_read_or_refused(data: bytes) -> None:
    _parses_or_says_why(data)


@pytest.mark.slow
@settings(max_examples=100_000, deadline=None, suppress_health_check=list(HealthCheck))
@given(_damaged())
def test_many_damaged_files_are_read_or_refused(data: bytes) -> None:
    _parses_or_says_why(data)


def _part(index: int, count: int, total: int, name: str) -> GgufHeader:
    data, _ = make_gguf_header(
        {"split.no": index, "split.count": count, "split.tensors.count": total}, [(name, "F32", (8,))], "x"
    )
    return parse(data + bytes(32))


def test_parts_are_one_model() -> None:
    assert list(join_headers([_part(0, 2, 2, "a"), _part(1, 2, 2, "b")]).tensors) == ["a", "b"]
    assert part_names("m-00001-of-00003.gguf") == [f"m-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    assert part_names("m.gguf") == ["m.gguf"]


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([(0, 2, 2, "a")], "one of 2 parts"),
        ([(0, 2, 2, "a"), (0, 2, 2, "b")], "split.no"),
        ([(0, 2, 2, "a"), (1, 2, 2, "a")], "both in"),
        ([(0, 2, 3, "a"), (1, 2, 3, "b")], "split.tensors.count"),
    ],
)
def test_parts_that_are_not_of_one_model(parts: list[tuple[int, int, int, str]], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        join_headers([_part(*part) for part in parts])


@pytest.mark.parametrize("name", ["m-00002-of-00003.gguf", "m-00000-of-00003.gguf", "m-00001-of-09999.gguf"])
def test_names_of_parts_that_no_model_begins_with(name: str) -> None:
    with pytest.raises(ModelError):
        part_names(name)


@pytest.mark.parametrize(
    ("name", "known"),
    [("m.gguf", True), (f"sha256-{'0a' * 32}", True), ("sha256-0a", False), ("model.safetensors", False)],
)
def test_a_gguf_file_is_known_by_its_ending_or_as_a_blob_of_ollama(name: str, known: bool) -> None:
    assert is_gguf(Path("models") / name) is known


def test_arrays_are_numbers_not_objects() -> None:
    """The alternative, lists of Python floats, would take thirty times the memory for a vocabulary's scores."""
    data = attacks.gguf((attacks.key(b"f", attacks.ARRAY, attacks.array(attacks.F32, 1000, bytes(4000))),))
    assert isinstance(parse(data).metadata.values["f"], array)


@pytest.mark.parametrize("missing", [1, 5, 31])
def test_a_file_that_ends_early_lacks_the_bytes_of_a_tensor(missing: int) -> None:
    tensors = attacks.info(b"a", (16,)), attacks.info(b"b", (16,), offset=64)
    with pytest.raises(ModelError, match=f"truncated: {missing} bytes of b are missing"):
        parse(attacks.gguf((attacks.NAME,), tensors, bytes(128 - missing)))
    assert parse(attacks.gguf((attacks.NAME,), tensors, bytes(128))).tensors.keys() == {"a", "b"}


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"", "x.gguf: truncated: the header of 24 bytes, but 0 are left"),
        (b"0", "x.gguf: not a GGUF file"),
        (b"0123456789", "x.gguf: not a GGUF file"),
        (b"GG", "x.gguf: truncated: the header of 24 bytes, but 2 are left"),
        (b"GGUF" + bytes(6), "x.gguf: truncated: the header of 24 bytes, but 10 are left"),
    ],
    ids=["empty", "byte", "text", "half-magic", "magic"],
)
def test_a_short_file_is_truncated_only_if_it_begins_as_gguf(data: bytes, problem: str) -> None:
    with pytest.raises(ModelError) as caught:
        parse(data)
    assert caught.value.message.startswith(problem)


def test_a_reader_that_ends_early_is_an_error() -> None:
    data = attacks.gguf((attacks.NAME,), (attacks.ONE,))
    stream = io.BytesIO(data[:40])
    with pytest.raises(ModelError, match="truncated"):
        parse_gguf_header(lambda offset, count: stream.read(count), len(data), "x.gguf")


def test_arrays_of_every_kind_are_read_by_the_library(tmp_path: Path) -> None:
    values = {"reals": [0.5, -1.0], "mixed": [1, 2.5], "flags": [True, False], "none": [], "ids": [True, 3]}
    written = {**values, "general.architecture": "llama", "importance": Unwritten(3)}
    with GgufWriter(tmp_path / "a.gguf", written, [("one", "F32", (2,))]) as writer:
        writer.write("importance", np.arange(3, dtype=np.float32).data)
        with pytest.raises(ValueError, match="one has 8 bytes, not 12"):
            writer.write("one", np.zeros(2, dtype=np.float32).data, 4)
        writer.write("one", np.ones(2, dtype=np.float32).data)
        writer.finish()
    read = {name: field.contents() for name, field in library.GGUFReader(tmp_path / "a.gguf").fields.items()}
    assert {name: read[name] for name in values if name != "none"} == {
        **{"reals": [0.5, -1.0], "mixed": [1.0, 2.5], "flags": [True, False], "ids": [1.0, 3.0]}
    }
    assert read["importance"] == [0.0, 1.0, 2.0]
    header = parse((tmp_path / "a.gguf").read_bytes())
    assert header.metadata.values["none"] == [] and header.arrays["importance"].shape == (3,)


@pytest.mark.parametrize("alignment", [1, 8, 64])
def test_tensors_lie_at_multiples_of_the_alignment(alignment: int) -> None:
    keys = (attacks.key(b"general.alignment", attacks.U32, struct.pack("<I", alignment)),)
    second = -(-48 // alignment) * alignment
    tensors = attacks.info(b"a", (12,)), attacks.info(b"b", (12,), offset=second)
    header = attacks.gguf(keys, tensors, b"")
    data = header + bytes(-len(header) % alignment + second + 48)
    places = {name: entry.offset for name, entry in parse(data).tensors.items()}
    assert places["a"] % alignment == 0 and places["b"] - places["a"] == second


def _model(**values: object) -> GgufModel:
    keys = {f"llama.{name}": value for name, value in values.items()}
    return GgufModel(Fields({"general.architecture": "llama", **keys}, "x.gguf"), {}, lambda name: [])


def test_values_of_layers_are_whole_numbers_one_for_each() -> None:
    model = _model(one=3, list=[1, 0, 7], numbers=array("i", [4, 5]), flags=[True, False], most=[(1 << 31) - 1])
    assert model.layer_values("one") == [3] and model.layer_values("list", 3) == [1, 0, 7]
    assert model.layer_values("list", 2) == [1, 0] and model.layer_values("numbers") == [4, 5]
    assert model.layer_values("flags", 2) == [True, False] and model.layer_values("most") == [(1 << 31) - 1]
    wrong = _model(short=[1, 2], negative=[1, -1], large=[1 << 31], real=[0.5], text="3", empty=[])
    for name in ("short", "negative", "large", "real", "text", "empty", "missing"):
        with pytest.raises(ModelError, match="not a list with one whole number for each layer"):
            wrong.layer_values(name, 3 if name == "short" else None)


def test_a_list_is_a_number_if_all_layers_agree() -> None:
    model = _model(one=3, same=[5, 5, 5], numbers=array("i", [7, 7]), other=[5, 6])
    assert [model.integer(name) for name in ("one", "same", "numbers")] == [3, 5, 7]
    assert model.integer("missing", 9) == 9
    with pytest.raises(ModelError, match="differs from layer to layer"):
        model.integer("other")
    with pytest.raises(ModelError):
        model.integer("same", low=6)
