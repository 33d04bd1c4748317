"""Test LoRA adapters of quantized models: the packed weights stay, the updates are computed next to them."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor

from mycli.quant.export import ExportRequest, find_export_target
from mycli.quant.progress import silent
from mycli.quant.source_weights import SourceWeights
from mycli.runtime.cache.batch import Chunk
from mycli.runtime.checkpoint.adapter import LowRank
from mycli.runtime.checkpoint.model_folder import ModelFolder
from mycli.runtime.checkpoint.open_folder import open_model_folder
from mycli.runtime.device.placement import Placement
from mycli.runtime.engine.config import EngineConfig
from mycli.runtime.engine.loading.loader import load_model
from mycli.runtime.engine.loading.sizing import requested_plan
from mycli.runtime.engine.passes.captured import decline_capture, decline_waiting
from mycli.runtime.engine.passes.cpu_parts import native_part
from mycli.runtime.errors import Declined, ModelError
from mycli.runtime.hub.resolve import Source
from mycli.runtime.memory.cache_shape import CacheShape
from mycli.runtime.memory.weights import embedding_bytes, weight_bytes
from mycli.runtime.quantization.low_rank import LowRankMatmul
from tests.support.adapters import DOWN, QUERIES, tensors_for, write_adapter
from tests.support.engines import whole
from tests.support.models import CPU, SMALL
from tests.support.native_parts import need_native_code
from tests.support.packed_folder import write_packed
from tests.support.paths import PICO

BF16 = Placement(torch.device("cpu"), torch.bfloat16)
TOKENS = torch.arange(5, 37).view(1, 32)
VALUES = "model.layers.1.self_attn.v_proj"
EXPERT = "model.layers.0.mlp.experts.3.gate_proj"


def gguf(tmp_path: Path) -> Path:
    module, variant = find_export_target("gguf:q4_0")
    file = tmp_path / "pico.gguf"
    request = ExportRequest(Source("pico", PICO), open_model_folder(PICO), file, variant, requantize=True)
    module.export(request, silent)
    return file


def packed(tmp_path: Path) -> Path:
    return write_packed(tmp_path / "packed", json.loads((PICO / "config.json").read_text()), {"": 4})


def mixture(tmp_path: Path) -> Path:
    sizes = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 64, "head_dim": 32}
    fields = {**SMALL, "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], **sizes}
    return write_packed(tmp_path / "mixture", fields, {"": 4})


BASES = {"integers": packed, "gguf-with-rows-in-another-order": gguf}


def changed(base: ModelFolder, adapter: ModelFolder) -> tuple[Tensor, Tensor]:
    """Return logits of a model with an adapter, and of the base with dense sums written in place of its weights."""
    assert adapter.adapter is not None
    changes: Mapping[str, LowRank] = adapter.adapter.added
    checkpoint = adapter.checkpoint()
    plain = load_model(base, CPU).model
    for block in plain.layers():
        for linear in block.products.values():
            # Decoded weights are rounded to bf16: products are those of the exact ones, norms are of the decoded ones.
            weight, decoded = linear(torch.eye(linear.in_features)).T.contiguous(), linear.weight().double()
            sizes = [spec.out_features for spec in linear.specs]
            for spec, part, rounded in zip(linear.specs, weight.split(sizes), decoded.split(sizes), strict=True):
                update = checkpoint.update(f"{spec.name}.weight")
                assert (update is not None) == (f"{spec.name}.weight" in changes)
                if update is not None:
                    product = update.scale * (update.b.double() @ update.a.double())
                    total = part.double() + product
                    if update.norms is not None:
                        total *= (update.norms.double() / (rounded + product).norm(dim=1)).unsqueeze(1)
                    part.copy_(total)
            linear.replace(weight)
        block.freeze()
    return whole(load_model(adapter, CPU).model, TOKENS), whole(plain, TOKENS)


@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
@pytest.mark.parametrize("kind", BASES)
def test_logits_are_those_of_the_sum(tmp_path: Path, kind: str, dora: bool) -> None:
    base = open_model_folder(BASES[kind](tmp_path))
    tensors = tensors_for(PICO, QUERIES, VALUES, DOWN)
    if dora:
        shapes = dict(base.config.tensors())
        for module in (QUERIES, VALUES, DOWN):
            norms = torch.linspace(0.5, 2, shapes[f"{module}.weight"][0])
            tensors[f"base_model.model.{module}.lora_magnitude_vector"] = norms
    folder = write_adapter(tmp_path / "a", tensors, lora_alpha=6, use_dora=dora)
    actual, expected = changed(base, base.with_adapter("tuned", folder))
    assert not expected.allclose(whole(load_model(base, CPU).model, TOKENS), atol=0.1)
    torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
def test_its_dequantized_weight_is_the_one_it_multiplies_by(tmp_path: Path, dora: bool) -> None:
    base = open_model_folder(packed(tmp_path))
    tensors = tensors_for(PICO, VALUES)
    if dora:
        rows = tensors[f"base_model.model.{VALUES}.lora_B.weight"].shape[0]
        tensors[f"base_model.model.{VALUES}.lora_magnitude_vector"] = torch.linspace(0.5, 2, rows)
    folder = write_adapter(tmp_path / "a", tensors, use_dora=dora)
    model = load_model(base.with_adapter("tuned", folder), CPU).model
    linears = [linear for block in model.layers() for linear in block.products.values()]
    (linear,) = (linear for linear in linears if isinstance(linear.matmul, LowRankMatmul))
    weight = linear.weight().float()  # has been rounded to the dtype of its scales, bf16
    product = linear(torch.eye(weight.shape[1])).T
    assert (weight - product).norm() < 2**-8 * product.norm()


def test_a_row_has_the_same_bits_alone_and_among_others(tmp_path: Path) -> None:
    need_native_code()
    folder = open_model_folder(packed(tmp_path))
    runner = load_model(
        folder.with_adapter("tuned", write_adapter(tmp_path / "a", tensors_for(PICO, QUERIES, DOWN))), BF16
    )
    tokens = TOKENS[0].tolist()

    def logits(sizes: list[int]) -> Tensor:
        cache, parts, start = runner.make_cache(CacheShape.contiguous(len(tokens))), [], 0
        for size in sizes:
            parts.append(runner.run([Chunk(tokens[start : start + size], start, (0,), size)], cache).clone())
            start += size
        return torch.cat(parts)

    assert logits([32]).equal(logits([1] * 32)) and logits([32]).equal(logits([7, 1, 20, 4]))


@pytest.mark.parametrize("slots", [None, 3])
def test_packed_experts_take_one(tmp_path: Path, slots: int | None) -> None:
    base = open_model_folder(mixture(tmp_path))
    adapter = base.with_adapter("tuned", write_adapter(tmp_path / "a", tensors_for(base.path, QUERIES, EXPERT)))
    actual, expected = changed(base, adapter)
    assert not expected.allclose(whole(load_model(base, CPU).model, TOKENS), atol=1e-2)
    torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-3)
    streamed = load_model(adapter, CPU, expert_slots=slots)
    for _ in range(2):  # the memory of a slot is used again
        torch.testing.assert_close(whole(streamed.model, TOKENS), expected, rtol=1e-3, atol=1e-3)


def test_its_bytes_are_counted(tmp_path: Path) -> None:
    base = open_model_folder(packed(tmp_path))
    adapter = base.with_adapter("tuned", write_adapter(tmp_path / "a", tensors_for(PICO, QUERIES, DOWN)))
    runners = [load_model(folder, BF16) for folder in (base, adapter)]
    plans = [requested_plan(folder, EngineConfig(), dtype="bfloat16") for folder in (base, adapter)]
    counted = [weight_bytes(plan) + embedding_bytes(plan) for plan in plans]
    assert runners[1].nbytes - runners[0].nbytes == counted[1] - counted[0] > 0


def test_the_native_pass_declines_by_name(tmp_path: Path) -> None:
    need_native_code()
    base = open_model_folder(packed(tmp_path))
    model = load_model(base.with_adapter("t", write_adapter(tmp_path / "a", tensors_for(PICO, DOWN))), BF16).model
    linears = [linear for block in model.layers() for linear in block.products.values()]
    assert sum(isinstance(linear.matmul, LowRankMatmul) for linear in linears) == 1
    declined = [
        part for block in model.layers() for part in map(native_part, block.parts) if isinstance(part, Declined)
    ]
    assert declined == [Declined("adapter")]


def test_captured_passes_decline_adapted_experts_only(tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "a", tensors_for(PICO, QUERIES))
    model = load_model(open_model_folder(packed(tmp_path)).with_adapter("t", adapter), BF16).model
    assert decline_capture(model) is None and decline_waiting(model) is None
    base = open_model_folder(mixture(tmp_path))
    adapter = write_adapter(tmp_path / "b", tensors_for(base.path, EXPERT))
    declined = decline_waiting(load_model(base.with_adapter("t", adapter), BF16).model)
    assert declined == Declined("experts-read-by-host")


def test_it_is_not_written_into_packed_weights(tmp_path: Path) -> None:
    base = open_model_folder(packed(tmp_path))
    folder = base.with_adapter("tuned", write_adapter(tmp_path / "a", tensors_for(PICO, DOWN)))
    with pytest.raises(ModelError, match=r"quantized \(int4-g32\), so no adapter can be merged") as caught:
        SourceWeights(folder)
    assert caught.value.code == "merge-first"
    for target in ("safetensors", "gptq", "mlx", "gguf"):
        module, variant = find_export_target(target)
        with pytest.raises(ModelError, match="no adapter can be merged"):
            module.export(ExportRequest(Source("p", base.path), folder, tmp_path / target, variant), silent)


def test_packed_weights_are_not_replaced(tmp_path: Path) -> None:
    base = open_model_folder(packed(tmp_path))
    shape = dict(base.config.tensors())[f"{DOWN}.weight"]
    adapter = write_adapter(tmp_path / "a", {f"base_model.model.{DOWN}.weight": torch.ones(shape)})
    with pytest.raises(ModelError, match=r"replaces model.layers.1.mlp.down_proj.weight, which is quantized"):
        base.with_adapter("tuned", adapter)
