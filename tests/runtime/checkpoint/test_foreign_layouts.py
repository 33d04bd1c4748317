"""Test other projects' layouts: the weights read equal those of the original library, bit for bit.

`tests/support/foreign_layouts.py` holds files written and read by those libraries; compressed-tensors is installed
and called directly.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from safetensors.torch import save_file
from torch import Tensor

from mycli.runtime.checkpoint import formats
from mycli.runtime.checkpoint.manifest import Manifest
from mycli.runtime.checkpoint.reader import Checkpoint
from mycli.runtime.kernels.registry import prepare_product
from mycli.runtime.models.part_spec import LinearSpec
from mycli.runtime.models.registry import parse_config
from mycli.runtime.quantization.packed_weight import PackedWeight, dequantize
from mycli.runtime.quantization.scale_codes import scale_codes
from mycli.runtime.quantization.scheme import Packing
from mycli.runtime.utils.json_fields import Fields
from tests.support.foreign_layouts import COLUMNS, LINEAR, ROWS, Case, digest, integers, stored, weights

CPU = torch.device("cpu")


def opened(folder: Path, case: Case) -> tuple[Checkpoint, LinearSpec, Packing]:
    """Read the only linear of a case and check that exactly the tensors of its layout are used."""
    tensors = {f"{LINEAR}.{part}": tensor.contiguous() for part, tensor in case.tensors.items()}
    save_file(tensors, folder / "model.safetensors")
    manifest, raw = Manifest.open(folder), Fields(case.config, "config.json")
    config = parse_config(raw)
    packings = formats.read_quantization(raw, config, manifest.tensors)
    (linear,) = (spec for spec in formats.quantizable(config) if spec.name in packings)
    layout = formats.load(packings[LINEAR].layout)
    promised = {
        name: (shape, kinds) for name, shape, kinds in layout.tensors(linear, packings[LINEAR], manifest.tensors)
    }
    for name, entry in manifest.tensors.items():
        if not name.endswith(layout.IGNORED):
            shape, kinds = promised.pop(name)
            assert entry.shape == shape and entry.dtype in kinds, name
    assert not promised
    layout.check(linear, packings[LINEAR], manifest)
    return Checkpoint(manifest), linear, packings[LINEAR]


def read(folder: Path, case: Case) -> tuple[PackedWeight, Tensor]:
    checkpoint, linear, packing = opened(folder, case)
    weight = formats.read_weight(checkpoint, [linear], packing, CPU)
    dense = formats.read_dense(checkpoint, linear, {LINEAR: packing}, CPU)
    scale_bytes = {"bfloat16": 2, "float16": 2, "float32": 4}[case.dtype]
    assert (scale_codes(weight) is None) is (packing.byte_scales is None), "what estimates count is what is held"
    whole = replace(packing, byte_scales=None).bytes(*dense.shape, scale_bytes)
    assert whole == replace(weight, factors=None).nbytes, "the same for scales that are not bytes"
    return weight, dense


FOREIGN = {
    f"{layout}-{name}": case
    for layout in ("gptq", "awq", "fp8", "mlx", "bitsandbytes")
    for name, case in stored(layout).items()
}


@pytest.mark.parametrize("name", FOREIGN)
def test_the_weights_are_those_of_the_maker(name: str, tmp_path: Path) -> None:
    case = FOREIGN[name]
    weight, dense = read(tmp_path, case)
    dtype = getattr(torch, case.digest.split()[0])
    if case.weight is None:
        assert digest(dense.to(dtype)) == case.digest
    else:
        last_place = dense.abs().max().item() * 2**-23
        assert torch.allclose(dense, case.weight, rtol=0, atol=2 * last_place)
    require_product(weight, 3)


def require_product(weight: PackedWeight, rows: int) -> None:
    """Compare a product with the exact one within the error of 16-bit activations.

    Kernels multiply by weights that are not rounded to the stored dtype. Each activation is off by at most 2^-16 of the
    largest in its row, and fp32 sums by less. No CPU kernel supports 7 bits: those weights are decoded and so rounded
    to the stored dtype.
    """
    x = torch.randn(rows, weight.in_features, generator=torch.Generator().manual_seed(rows))
    decoded = weight.packing.codes == "int" and weight.packing.bits == 7
    exact = dequantize(weight if decoded else replace(weight, scales=weight.scales.float())).double()
    actual, expected = prepare_product(weight, torch.float32)(x).double(), x.double() @ exact.t()
    bound = 2.0**-15 * x.abs().amax(1, keepdim=True).double() * exact.abs().sum(1)
    assert ((actual - expected).abs() <= bound).all()


def compressed() -> Iterator[tuple[str, tuple[str, dict, dict[str, Tensor]]]]:
    weight = weights(1)

    def scales(*shape: int) -> Tensor:
        return (weights(2, *shape).abs() + 0.1).bfloat16() / 16

    for bits in range(2, 9):
        for group in (16, 32, 64, 128, None):
            size = group or COLUMNS
            arguments = {"num_bits": bits, "strategy": "group" if group else "channel", "group_size": group}
            parts = {"weight": weight, "weight_scale": scales(ROWS, COLUMNS // size)}
            yield f"pack-int{bits}-g{group}", ("pack-quantized", arguments, parts)
            zeros = integers(bits, 1 << bits, ROWS, COLUMNS // size).to(torch.int8) - (1 << bits - 1)
            parts = {**parts, "weight_zero_point": zeros.to(torch.int8)}
            yield f"pack-int{bits}-g{group}-zeros", ("pack-quantized", {**arguments, "symmetric": False}, parts)
    shapes = {"tensor": (1,), "channel": (ROWS, 1), "group": (ROWS, 4)}
    for kind, layout in (("int", "int-quantized"), ("float", "float-quantized")):
        for strategy, shape in shapes.items():
            arguments = {"num_bits": 8, "type": kind, "strategy": strategy}
            if strategy == "group":
                arguments["group_size"] = 32
            flat = scales(1, 1).view(1) if strategy == "tensor" else scales(*shape)
            parts = {"weight": weight, "weight_scale": flat}
            yield f"{layout}-{strategy}", (layout, arguments, parts)
            if kind == "int":
                parts = {**parts, "weight_zero_point": integers(3, 200, *shape).sub(100).to(torch.int8)}
                yield f"{layout}-{strategy}-zeros", (layout, {**arguments, "symmetric": False}, parts)
    for side in (16, 32, 128):
        blocks = scales(-(-ROWS // side), -(-COLUMNS // side))
        arguments = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [side, side]}
        yield f"float-block{side}", ("float-quantized", arguments, {"weight": weight, "weight_scale": blocks})
    arguments = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
    parts = {
        "weight": weight,
        "weight_scale": scales(ROWS, 8).float() * 100,
        "weight_global_scale": torch.tensor([37.5]),
    }
    yield "nvfp4", ("nvfp4-pack-quantized", {**arguments, "scale_dtype": "torch.float8_e4m3fn"}, parts)
    powers = torch.exp2(integers(4, 9, ROWS, 4).float() - 6).bfloat16()
    arguments = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}
    yield "mxfp4", ("mxfp4-pack-quantized", arguments, {"weight": weight, "weight_scale": powers})
    yield "mxfp8", ("mxfp8-quantized", {**arguments, "num_bits": 8}, {"weight": weight, "weight_scale": powers})


COMPRESSED = dict(compressed())


def compressed_case(name: str) -> Case:
    layout, arguments, parts = COMPRESSED[name]
    scheme = QuantizationScheme(targets=[LINEAR], weights=QuantizationArgs(**arguments), format=layout)
    compressor = BaseCompressor.get_value_from_registry(layout)
    tensors = compressor.compress({key: part.clone() for key, part in parts.items()}, scheme)
    expected = compressor.decompress({key: part.clone() for key, part in tensors.items()}, scheme)["weight"]
    group = {
        "targets": [LINEAR],
        "weights": scheme.weights.model_dump(mode="json"),
        "input_activations": {"num_bits": 8},
    }
    section = {"quant_method": "compressed-tensors", "format": layout, "ignore": [], "config_groups": {"a": group}}
    return Case({"quantization_config": section}, tensors, expected)


@pytest.mark.parametrize("name", COMPRESSED)
def test_the_weights_are_those_of_compressed_tensors(name: str, tmp_path: Path) -> None:
    case = compressed_case(name)
    assert case.weight is not None
    _, dense = read(tmp_path, case)
    assert torch.equal(dense.to(case.weight.dtype), case.weight)


@pytest.mark.parametrize("bits", [3, 5, 6, 7])
def test_words_of_whole_codes(bits: int, tmp_path: Path) -> None:
    """Read the format of compressed-tensors up to 0.17: floor(32 / bits) codes per word, row ends padded."""
    codes, scales = integers(bits, 1 << bits, ROWS, COLUMNS), torch.rand(ROWS, 4).bfloat16()
    per = 32 // bits
    words = torch.zeros(ROWS, -(-COLUMNS // per), dtype=torch.int64)
    for column in range(COLUMNS):
        words[:, column // per] |= codes[:, column].long() << bits * (column % per)
    words = (words - ((words >> 31) << 32)).to(torch.int32)
    weights = {"num_bits": bits, "strategy": "group", "group_size": 32}
    section = {"quant_method": "compressed-tensors", "config_groups": {"a": {"targets": [LINEAR], "weights": weights}}}
    tensors = {"weight_packed": words, "weight_scale": scales, "weight_shape": torch.tensor([ROWS, COLUMNS])}
    _, dense = read(tmp_path, Case({"quantization_config": section}, tensors, None))
    expected = (codes.view(ROWS, 4, 32).bfloat16() - (1 << bits - 1)) * scales.unsqueeze(-1)
    assert torch.equal(dense, expected.view(ROWS, COLUMNS))


@pytest.mark.parametrize("zeros", [False, True], ids=["symmetric", "zeros"])
@pytest.mark.parametrize(("bits", "size"), [(4, 32), (4, 64), (8, 32), (8, 64)], ids=str)
def test_compressed_tensors_in_an_order(bits: int, size: int, zeros: bool, tmp_path: Path) -> None:
    """Read `weight_g_idx`, the group of each input, from compressed-tensors up to 0.19, for 4 and 8 bits."""
    levels, groups = 1 << bits, COLUMNS // size
    codes, scales = integers(1, levels, ROWS, COLUMNS), torch.rand(ROWS, groups).bfloat16()
    points = integers(2, levels, ROWS, groups) if zeros else torch.full((ROWS, groups), levels // 2, dtype=torch.int32)
    index = (torch.randperm(COLUMNS, generator=torch.Generator().manual_seed(0)) // size).int()
    weights = {"num_bits": bits, "strategy": "group", "group_size": size, "actorder": "group", "symmetric": not zeros}
    section = {"quant_method": "compressed-tensors", "config_groups": {"a": {"targets": [LINEAR], "weights": weights}}}
    tensors = {
        "weight_packed": formats_pack(codes, bits),
        "weight_scale": scales,
        "weight_shape": torch.tensor([ROWS, COLUMNS]),
        "weight_g_idx": index,
    }
    if zeros:
        tensors["weight_zero_point"] = formats_pack(points.t().contiguous(), bits).t().contiguous()
    weight, dense = read(tmp_path, Case({"quantization_config": section}, tensors, None))
    expected = torch.empty(ROWS, COLUMNS, dtype=torch.bfloat16)
    for column in range(COLUMNS):
        group = int(index[column])
        expected[:, column] = (codes[:, column] - points[:, group]).bfloat16() * scales[:, group]
    assert torch.equal(dense, expected)
    require_product(weight, 2)


def formats_pack(codes: Tensor, bits: int) -> Tensor:
    """Pack codes of 4 or 8 bits into full words."""
    parts = codes.to(torch.int64).view(codes.shape[0], -1, 32 // bits)
    words = sum(parts[:, :, place] << bits * place for place in range(32 // bits))
    assert isinstance(words, Tensor)
    return (words - ((words >> 31) << 32)).to(torch.int32)


@pytest.mark.parametrize("version", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_zero_points_of_zero(bits: int, version: str, tmp_path: Path) -> None:
    """GPTQModel subtracts one from every zero point of version 1; in a whole word, one of 0 borrows from the next."""
    codes, zeros = integers(bits, 1 << bits, ROWS, COLUMNS), integers(1, 1 << bits, 4, ROWS)
    zeros[:, 5:9] = 0
    scales = (weights(2, 4, ROWS).abs() + 0.1).half()

    def words(values: Tensor) -> Tensor:
        """Place codes of a row one after the other in 32-bit words; 32 of 3 bits fill three."""
        row = [sum(value << bits * place for place, value in enumerate(part)) for part in values.tolist()]
        stored = [[number >> shift & 0xFFFFFFFF for shift in range(0, bits * values.shape[1], 32)] for number in row]
        return (torch.tensor(stored) ^ 1 << 31).sub(1 << 31).to(torch.int32)

    stored = words(zeros)
    if version == "gptq":
        ones = sum(1 << shift for shift in range(0, 32, bits))
        stored = words((zeros - 1) % 8) if bits == 3 else stored - ones
    section = {"quant_method": "gptq", "checkpoint_format": version, "bits": bits, "group_size": 32, "sym": False}
    tensors = {"qweight": words(codes).t().contiguous(), "qzeros": stored, "scales": scales}
    _, dense = read(tmp_path, Case({"quantization_config": section}, tensors, None, "float16"))
    expected = (codes - zeros.t().repeat_interleave(32, 1)) * scales.t().repeat_interleave(32, 1).float()
    assert torch.equal(dense, expected.half())


@pytest.mark.parametrize(("version", "zero"), [("gptq", 7), ("gptq_v2", 8)])
def test_symmetric_codes_of_gptq_are_signed_in_both_versions(version: str, zero: int, tmp_path: Path) -> None:
    codes, scales = integers(1, 16, ROWS, COLUMNS), (weights(2, 4, ROWS).abs() + 0.1).half()
    section = {"quant_method": "gptq", "checkpoint_format": version, "bits": 4, "group_size": 32, "sym": True}
    tensors = {
        "qweight": formats_pack(codes, 4).t().contiguous(),
        "qzeros": formats_pack(torch.full((4, ROWS), zero), 4),
        "scales": scales,
    }
    _, dense = read(tmp_path, Case({"quantization_config": section}, tensors, None, "float16"))
    assert torch.equal(dense, ((codes - 8) * scales.t().repeat_interleave(32, 1).float()).half())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_codes_of_bitsandbytes_stored_as_floats(dtype: torch.dtype, tmp_path: Path) -> None:
    """`bnb_4bit_quant_storage`, which FSDP needs: the bytes are those of uint8, and may be NaN as floats."""
    case = stored("bitsandbytes")["nf4-g64-nested"]
    codes = case.tensors["weight"].clone()
    codes[:8] = 255
    dense = []
    for name, weight in (("bytes", codes), ("floats", codes.flatten().view(dtype).view(-1, 1))):
        (tmp_path / name).mkdir()
        dense.append(read(tmp_path / name, replace(case, tensors={**case.tensors, "weight": weight}))[1])
    assert torch.equal(*dense)


@pytest.mark.parametrize(("name", "changed"), [("gptq-int4-g32", "sym"), ("gptq-int4-g32-ordered", "desc_act")])
def test_a_rule_of_gptqmodel_changes_single_modules(name: str, changed: str, tmp_path: Path) -> None:
    """`dynamic` gives modules settings of their own, by the first rule that matches."""
    case = stored("gptq")[name]
    settings = case.section["quantization_config"]
    rules = {
        r"-:.*\.up_proj": {},
        rf"+:.*\.{LINEAR.rpartition('.')[2]}": {changed: settings[changed]},
        r".*\.mlp\..*": {changed: not settings[changed]},
    }
    section = {**settings, changed: not settings[changed], "dynamic": rules}
    _, dense = read(tmp_path, replace(case, section={"quantization_config": section}))
    assert digest(dense) == case.digest
