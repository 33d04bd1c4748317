"""Test LoRA adapters: weights equal W + s B A as in PEFT, or the adapter is refused naming field or tensor."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from mycli.quant.export import ExportRequest, find_export_target
from mycli.quant.progress import silent
from mycli.quant.source_weights import SourceWeights
from mycli.runtime.checkpoint.adapter import Adapter
from mycli.runtime.checkpoint.adapter_config import AdapterConfig, is_adapter
from mycli.runtime.checkpoint.model_folder import ModelFolder
from mycli.runtime.checkpoint.open_folder import open_model_folder
from mycli.runtime.engine.loading.loader import load_model
from mycli.runtime.errors import ModelError
from mycli.runtime.hub.resolve import Source
from mycli.runtime.utils.json_fields import Fields
from tests.attacks.adapter_attacks import ATTACKS
from tests.support.adapters import DOWN, LORA, QUERIES, low_rank, tensors_for, write_adapter
from tests.support.engines import whole
from tests.support.families import CASES, make
from tests.support.models import CPU, random_model
from tests.support.paths import PICO


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_model(tmp_path_factory.mktemp("base") / "model", num_hidden_layers=2)


def read(folder: ModelFolder) -> dict[str, Tensor]:
    checkpoint = folder.checkpoint()
    return {name: checkpoint.read(name) for name, _ in folder.config.tensors()}


def merged(weight: Tensor, tensors: dict[str, Tensor], module: str, scale: float) -> Tensor:
    a, b = (tensors[f"base_model.model.{module}.lora_{part}.weight"].double() for part in "AB")
    return (weight.double() + scale * (b @ a)).to(weight.dtype)


def assert_close(actual: Tensor, expected: Tensor) -> None:
    """Assert equality up to single roundings of fp32 sums near a tie."""
    steps = (actual.view(torch.int16).int() - expected.view(torch.int16).int()).abs()
    assert steps.max() <= 1 and (steps > 0).float().mean() < 1e-3


@pytest.mark.parametrize(
    ("changes", "scales"),
    [
        ({}, {QUERIES: 2.0, DOWN: 2.0}),
        ({"use_rslora": True}, {QUERIES: 4.0, DOWN: 4.0}),
        ({"lora_alpha": -3.5}, {QUERIES: -0.875, DOWN: -0.875}),
        ({"alpha_pattern": {"q_proj": 2}}, {QUERIES: 0.5, DOWN: 2.0}),
        ({"alpha_pattern": {r"^model\.layers\.1\.mlp\.down_proj$": 1, "down_proj": 16}}, {QUERIES: 2.0, DOWN: 0.25}),
        ({"alpha_pattern": {"^down_proj": 16, "layers.1.mlp.down_proj": 4}}, {QUERIES: 2.0, DOWN: 1.0}),
        ({"fan_in_fan_out": True}, {QUERIES: 2.0, DOWN: 2.0}),  # for linears stored as [in, out], which no family uses
    ],
    ids=["plain", "rank-stabilized", "negative", "by-end", "by-whole-name", "whole-name-only", "fan-in-ignored"],
)
def test_weights_are_the_sum(model: Path, tmp_path: Path, changes: dict[str, Any], scales: dict[str, float]) -> None:
    tensors = tensors_for(model, QUERIES, DOWN)
    folder = open_model_folder(model)
    adapted = folder.with_adapter("tuned", write_adapter(tmp_path / "a", tensors, **changes))
    before, after = read(folder), read(adapted)
    for name, weight in before.items():
        scale = scales.get(name.removesuffix(".weight"))
        if scale is None:
            assert after[name].equal(weight), name
        else:
            assert_close(after[name], merged(weight, tensors, name.removesuffix(".weight"), scale))


def difference_from_peft(tmp_path: Path, case: str, **settings: Any) -> float:
    """Return the largest relative difference of logits, with random numbers in everything that an adapter trains."""
    import peft  # takes a second

    tuned = peft.get_peft_model(make(tmp_path / "hf", *CASES[case]), peft.LoraConfig(r=4, lora_alpha=8, **settings))
    generator = torch.Generator().manual_seed(2)
    for parameter in tuned.parameters():
        if parameter.requires_grad:
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    tuned.save_pretrained(tmp_path / "adapter")
    folder = open_model_folder(tmp_path / "hf").with_adapter("tuned", tmp_path / "adapter")
    tokens = torch.randint(3, 97, (1, 20), generator=generator)
    with torch.no_grad():
        expected = tuned.eval()(tokens).logits
    actual = whole(load_model(folder, CPU).model, tokens)
    return float((actual - expected).abs().max() / expected.abs().max())


def test_updates_of_conv1d_are_those_of_peft(tmp_path: Path) -> None:
    """GPT-2 stores [in, out]; the matrix of c_proj is square, so that its shape does not show the transpose."""
    names = ["c_attn", "c_fc", "attn.c_proj"]
    assert difference_from_peft(tmp_path, "gpt2-tied", target_modules=names, fan_in_fan_out=True) <= 2e-6
    square = "base_model.model.transformer.h.0.attn.c_proj"
    tensors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    write_adapter(tmp_path / "whole", {**tensors, f"{square}.weight": torch.zeros(64, 64)})
    with pytest.raises(ModelError, match="model has no such weight"):
        open_model_folder(tmp_path / "hf").with_adapter("tuned", tmp_path / "whole")


@pytest.mark.parametrize("biases", ["lora_only", "all"])
def test_trained_biases_are_those_of_peft(tmp_path: Path, biases: str) -> None:
    assert difference_from_peft(tmp_path, "qwen2-biases", target_modules=["q_proj"], bias=biases) <= 1e-5


def test_ranks_differ_by_module(model: Path, tmp_path: Path) -> None:
    tensors = tensors_for(model, QUERIES, DOWN, ranks={DOWN: 2})
    folder = write_adapter(tmp_path / "a", tensors, rank_pattern={"mlp.down_proj": 2})
    actual = open_model_folder(model).with_adapter("tuned", folder).checkpoint().read(f"{DOWN}.weight")
    assert_close(actual, merged(load_file(model / "model.safetensors")[f"{DOWN}.weight"], tensors, DOWN, 4.0))


def test_parts_of_a_weight_are_the_whole(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    adapter = write_adapter(tmp_path / "a", tensors_for(model, DOWN))
    expected = read(open_model_folder(model).with_adapter("tuned", adapter))
    monkeypatch.setattr("mycli.runtime.checkpoint.reader._MERGED_VALUES", 1000)  # five rows of 192
    actual = read(open_model_folder(model).with_adapter("tuned", adapter))
    assert all(actual[name].equal(weight) for name, weight in expected.items())


def rescaled(weight: Tensor, tensors: dict[str, Tensor], module: str, scale: float) -> Tensor:
    total = merged(weight.double(), tensors, module, scale)
    norms = tensors[f"base_model.model.{module}.lora_magnitude_vector"].double()
    return (norms / total.norm(dim=1) * total.T).T.to(weight.dtype)


def with_norms(tensors: dict[str, Tensor], *modules: str) -> dict[str, Tensor]:
    norms = torch.rand(128, generator=torch.Generator().manual_seed(9)) + 0.5
    return {**tensors, **{f"base_model.model.{module}.lora_magnitude_vector": norms.clone() for module in modules}}


def test_dora_scales_the_rows_of_the_sum(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mycli.runtime.checkpoint.reader._MERGED_VALUES", 1000)  # five rows of 192
    tensors = with_norms(tensors_for(model, QUERIES, DOWN), QUERIES, DOWN)
    adapted = open_model_folder(model).with_adapter("tuned", write_adapter(tmp_path / "a", tensors, use_dora=True))
    before, after = read(open_model_folder(model)), read(adapted)
    for module in (QUERIES, DOWN):
        name = f"{module}.weight"
        assert_close(after[name], rescaled(before[name], tensors, module, 2.0))


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_an_adapter_of_mlx_is_that_of_peft(model: Path, tmp_path: Path, kind: str) -> None:
    """mlx-lm stores the transposes of A and B, the norms as `m`, and the scale instead of alpha."""
    tensors = tensors_for(model, QUERIES, DOWN)
    theirs = {}
    for module in (QUERIES, DOWN):
        for part in "AB":
            matrix = tensors[f"base_model.model.{module}.lora_{part}.weight"]
            theirs[f"{module}.lora_{part.lower()}"] = matrix.T.contiguous()
    if kind == "dora":
        tensors = with_norms(tensors, QUERIES, DOWN)
        theirs |= {f"{m}.m": tensors[f"base_model.model.{m}.lora_magnitude_vector"] for m in (QUERIES, DOWN)}
    (tmp_path / "mlx").mkdir()
    save_file(theirs, tmp_path / "mlx" / "adapters.safetensors")
    config = {"fine_tune_type": kind, "model": "org/base", "num_layers": 16}
    config["lora_parameters"] = {"rank": 4, "scale": 2.0, "dropout": 0.0, "keys": ["self_attn.q_proj"]}
    (tmp_path / "mlx" / "adapter_config.json").write_text(json.dumps(config))
    peft = write_adapter(tmp_path / "peft", tensors, use_dora=kind == "dora")
    actual = open_model_folder(model).with_adapter("tuned", tmp_path / "mlx")
    expected = read(open_model_folder(model).with_adapter("tuned", peft))
    assert is_adapter(tmp_path / "mlx")
    assert actual.adapter is not None and actual.adapter.config.base == "org/base"
    assert all(path.is_file() for path in actual.adapter.source_files())
    assert not expected[f"{QUERIES}.weight"].equal(read(open_model_folder(model))[f"{QUERIES}.weight"])
    assert all(weight.equal(expected[name]) for name, weight in read(actual).items())


@pytest.mark.parametrize(
    ("name", "shape", "changes", "message"),
    [
        ("model.layers.0.mlp.switch_mlp.up_proj.lora_a", (8, 4, 128), {}, r"switch_mlp.up_proj.lora_a: not part"),
        ("model.norm.weight", (128,), {}, r"model.norm.weight: not part"),
        (f"{QUERIES}.lora_a", (128, 4), {}, rf"{QUERIES} has lora_B missing"),
        (f"{QUERIES}.lora_a", (128, 4), {"fine_tune_type": "full"}, r"fine_tune_type is full"),
    ],
    ids=["experts", "whole", "half", "full"],
)
def test_other_adapters_of_mlx_are_refused(
    model: Path, tmp_path: Path, name: str, shape: tuple[int, ...], changes: dict[str, Any], message: str
) -> None:
    save_file({name: torch.ones(shape)}, tmp_path / "adapters.safetensors")
    config = {"lora_parameters": {"rank": 4, "scale": 2.0}, **changes}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=message):
        open_model_folder(model).with_adapter("tuned", tmp_path)


def test_modules_stored_whole_stand_instead(model: Path, tmp_path: Path) -> None:
    norm, head = torch.full((128,), 1.5), torch.full((4096, 128), 0.25)
    tensors = {"base_model.model.model.norm.weight": norm, "base_model.model.lm_head.weight": head}
    adapted = open_model_folder(model).with_adapter("tuned", write_adapter(tmp_path / "a", tensors))
    actual = read(adapted)
    assert actual["model.norm.weight"].equal(norm.bfloat16()) and actual["lm_head.weight"].equal(head.bfloat16())


def test_a_head_that_is_the_embedding_is_not_changed_alone(tmp_path: Path) -> None:
    tensors = low_rank("lm_head", (4096, 256))
    with pytest.raises(ModelError, match="changes lm_head, but the model ties its embeddings"):
        open_model_folder(PICO).with_adapter("tuned", write_adapter(tmp_path / "a", tensors))
    table = {"base_model.model.model.embed_tokens.weight": torch.ones(4096, 256)}
    with pytest.raises(ModelError, match="changes model.embed_tokens, but the model ties its embeddings"):
        open_model_folder(PICO).with_adapter("tuned", write_adapter(tmp_path / "b", table))


def test_linears_stored_as_one_take_an_adapter_of_the_one_and_no_other(tmp_path: Path) -> None:
    fused = random_model(tmp_path / "phi", model_type="phi3", architectures=["Phi3ForCausalLM"], num_hidden_layers=1)
    qkv = "model.layers.0.self_attn.qkv_proj"
    tensors = tensors_for(fused, qkv)
    actual = open_model_folder(fused).with_adapter("tuned", write_adapter(tmp_path / "a", tensors))
    base = load_file(fused / "model.safetensors")[f"{qkv}.weight"]
    assert_close(actual.checkpoint().read(f"{qkv}.weight"), merged(base, tensors, qkv, 2.0))
    with pytest.raises(ModelError, match=r"q_proj.weight: the model has no such weight"):
        open_model_folder(fused).with_adapter("tuned", write_adapter(tmp_path / "b", low_rank(QUERIES, (128, 128))))


def test_names_are_those_of_the_folder_and_what_is_not_text_is_told(model: Path, tmp_path: Path) -> None:
    def rename(stored: str) -> str | None:
        prefix = "model.language_model."
        return "model." + stored.removeprefix(prefix) if stored.startswith(prefix) else None

    inside = low_rank(QUERIES.replace("model.", "model.language_model."), (128, 128))
    seeing = low_rank("model.vision_tower.blocks.0.fc1", (64, 32))
    folder = write_adapter(tmp_path / "a", {**inside, **seeing})
    actual = Adapter.open("tuned", folder, open_model_folder(model).config, rename)
    assert list(actual.added) == [f"{QUERIES}.weight"]
    assert set(actual.unused) == {"model.vision_tower.blocks.0.fc1"}


def test_rows_that_a_gguf_file_keeps_in_another_order_are_changed_in_theirs(tmp_path: Path) -> None:
    tensors = low_rank(QUERIES, (256, 256))
    adapter = write_adapter(tmp_path / "a", tensors)
    module, variant = find_export_target("gguf")
    file = tmp_path / "pico.gguf"
    module.export(ExportRequest(Source("pico", PICO), open_model_folder(PICO), file, variant), silent)
    actual = open_model_folder(file).with_adapter("tuned", adapter).checkpoint().read(f"{QUERIES}.weight")
    base = load_file(PICO / "model.safetensors")[f"{QUERIES}.weight"]
    assert_close(actual, merged(base, tensors, QUERIES, 2.0))


def test_replies_and_quantization_see_the_same_weights(model: Path, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "a", tensors_for(model, QUERIES, DOWN))
    folder = open_model_folder(model).with_adapter("tuned", adapter)
    tokens = torch.arange(16).view(1, 16)
    actual = whole(load_model(folder, CPU).model, tokens)
    plain = load_model(open_model_folder(model), CPU).model
    assert not whole(plain, tokens).allclose(actual, atol=1e-2)
    source = SourceWeights(folder)
    for block in plain.layers():
        for linear in block.products.values():
            linear.replace(torch.cat([source.read(f"{spec.name}.weight") for spec in linear.specs]).float())
    assert whole(plain, tokens).equal(actual)


def test_a_changed_weight_is_in_the_bytes_that_are_copied(model: Path, tmp_path: Path) -> None:
    folder = open_model_folder(model).with_adapter("tuned", write_adapter(tmp_path / "a", tensors_for(model, DOWN)))
    checkpoint = folder.checkpoint()
    for name in (f"{DOWN}.weight", f"{QUERIES}.weight"):
        assert b"".join(checkpoint.chunks(name)) == checkpoint.read(name).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("name", ATTACKS)
def test_hostile_adapters_are_refused_by_field_or_tensor(model: Path, tmp_path: Path, name: str) -> None:
    changes, change, pattern = ATTACKS[name]
    tensors = tensors_for(model, QUERIES, DOWN)
    change(tensors)
    folder = write_adapter(tmp_path / "a", tensors, **changes)
    with pytest.raises(ModelError, match=pattern):
        read(open_model_folder(model).with_adapter("tuned", folder))


@pytest.mark.parametrize(
    ("file", "problem"),
    [
        ("adapter_model.bin", "its weights are a pickle"),
        ("x", "No such"),
    ],
)
def test_other_layouts_are_named(model: Path, tmp_path: Path, file: str, problem: str) -> None:
    folder = write_adapter(tmp_path / "a", {})
    (folder / "adapter_model.safetensors").rename(folder / file)
    with pytest.raises(ModelError, match=problem):
        open_model_folder(model).with_adapter("tuned", folder)


def test_a_folder_of_both_is_a_model(model: Path, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "a", {})
    assert is_adapter(folder) and not is_adapter(model)
    (folder / "config.json").write_text("{}")
    assert is_adapter(folder)
    (folder / "model.safetensors").touch()
    assert not is_adapter(folder)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"target_modules": ["q_proj", "v_proj"]},
        {"target_modules": "all-linear", "use_rslora": True, "rank_pattern": {"layers.1.mlp.down_proj": 3}},
        {"target_modules": ["down_proj"], "alpha_pattern": {"^model.layers.2.mlp.down_proj": 3, "mlp.down_proj": 5}},
        {"target_modules": ["o_proj"], "modules_to_save": ["norm"], "fan_in_fan_out": True},
        {"target_modules": ["q_proj", "down_proj"], "use_dora": True},
    ],
    ids=["two", "all-rank-stabilized", "alphas", "norm-saved", "dora"],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_weights_and_logits_are_those_that_peft_merges(
    tmp_path: Path, settings: dict[str, Any], dtype: torch.dtype
) -> None:
    import peft
    import transformers

    def original() -> Any:
        return transformers.AutoModelForCausalLM.from_pretrained(PICO, dtype=dtype)

    torch.manual_seed(0)
    trained = peft.get_peft_model(original(), peft.LoraConfig(r=8, lora_alpha=16, **settings))
    for name, parameter in trained.named_parameters():
        if "lora_" in name or "modules_to_save" in name:
            parameter.data += torch.randn_like(parameter) * 0.05
    trained.save_pretrained(tmp_path / "a")
    original().save_pretrained(tmp_path / "base")
    theirs = peft.PeftModel.from_pretrained(original(), tmp_path / "a").merge_and_unload()
    folder = open_model_folder(tmp_path / "base").with_adapter("tuned", tmp_path / "a")
    expected = theirs.state_dict()
    for name, weight in read(folder).items():
        step = torch.finfo(dtype).eps * expected[name].float().abs().clamp_min(2.0**-10)
        assert ((weight.float() - expected[name].float()).abs() <= step).all(), name
    tokens = torch.arange(5, 37).view(1, 32)
    logits = theirs.float()(tokens).logits
    torch.testing.assert_close(whole(load_model(folder, CPU).model, tokens), logits, rtol=2e-3, atol=2e-3)


def test_a_config_without_ranks_of_its_own_has_one_scale() -> None:
    config = AdapterConfig.parse(Fields(dict(LORA), "adapter_config.json"))
    assert config.scale(QUERIES) == config.scale(DOWN) == 2.0


@pytest.mark.parametrize(
    "modules", [["lm_head"], ["embed_tokens"], ["q_proj", "embed_tokens", "lm_head"]], ids="-".join
)
def test_embedding_and_head_have_updates_as_peft_saves_them(model: Path, tmp_path: Path, modules: list[str]) -> None:
    """PEFT names an embedding's matrices otherwise, transposed, and saves the weights below them."""
    import peft
    import transformers

    base = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    trained = peft.get_peft_model(base, peft.LoraConfig(r=4, lora_alpha=6, target_modules=modules))
    torch.manual_seed(0)
    for name, parameter in trained.named_parameters():
        if "lora_" in name:
            parameter.data += torch.randn_like(parameter) * 0.1
    trained.save_pretrained(tmp_path / "a")
    assert any(".base_layer." in name for name in load_file(tmp_path / "a" / "adapter_model.safetensors"))
    tokens = torch.arange(5, 37).view(1, 32)
    with torch.no_grad():
        expected, plain = trained(tokens).logits, trained.get_base_model()
        with trained.disable_adapter():
            plain = trained(tokens).logits
    adapted = open_model_folder(model).with_adapter("tuned", tmp_path / "a")
    actual = whole(load_model(adapted, CPU).model, tokens)
    assert (expected - plain).norm() > 10 * (actual - expected).norm()
    changed = {f"model.{name}.weight" if name == "embed_tokens" else f"{name}.weight" for name in modules[-2:]}
    merged_weights = trained.merge_and_unload().state_dict()
    before, after = read(open_model_folder(model)), read(adapted)
    for name in changed & after.keys():
        assert not after[name].equal(before[name])
        assert_close(after[name], merged_weights[name].bfloat16())
