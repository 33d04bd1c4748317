"""Test every family against transformers in fp32 with the same files: whole, in chunks, by token, in paged blocks."""

import json
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import MISSING, fields
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers.models.auto import modeling_auto

from mycli.runtime.cache.batch import Chunk
from mycli.runtime.checkpoint.open_folder import open_model_folder
from mycli.runtime.checkpoint.reader import Checkpoint
from mycli.runtime.checkpoint.restored_weights import joined_linears
from mycli.runtime.device.placement import Placement
from mycli.runtime.engine.loading.loader import load_model
from mycli.runtime.engine.model_runner import ModelRunner
from mycli.runtime.errors import ModelError
from mycli.runtime.memory.cache_shape import CacheShape
from mycli.runtime.models.memory_names import RENAMES
from mycli.runtime.models.multimodal import TextPart
from mycli.runtime.models.multimodal_types import TEXT_PARTS
from mycli.runtime.models.registry import REFUSED, families, parse_config
from mycli.runtime.utils.json_fields import Fields
from tests.support.bailing import publish_ling_1
from tests.support.engines import whole
from tests.support.families import ALIASES, CASES, EMBEDDING, LATER, QUICK, TOKENS, enliven, make
from tests.support.family_parts import SMALL
from tests.support.grids import THOROUGH, chosen
from tests.support.models import CPU

pytestmark = pytest.mark.usefixtures("quick_configs")

WAYS: dict[str, list[int]] = {
    "prefill": [TOKENS],
    "steps-among-chunks": [*[1] * 5, 18, *[1] * 3, TOKENS - 26],
    "blocks-of-8-in-any-order": [17, 1, 1, *[7] * 3],
    "blocks-of-1-in-any-order": [13, 1, *[9] * 2, *[1] * 3, TOKENS - 35],
}
STEPS_ALONE = [1] * TOKENS
if THOROUGH:
    WAYS |= {f"chunks-of-{size}": [size] * -(-TOKENS // size) for size in (7, 23)}
    WAYS |= {"prefill-then-steps": [11] + [1] * (TOKENS - 11), "steps": STEPS_ALONE}
BLOCKS = {"blocks-of-8-in-any-order": 8, "blocks-of-1-in-any-order": 1}


Made = Callable[[str], tuple[transformers.PreTrainedModel, Path]]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    @cache
    def make_once(case: str) -> tuple[transformers.PreTrainedModel, Path]:
        folder = tmp_path_factory.mktemp("family")
        return make(folder, *CASES[case]), folder

    return make_once


# With AVX2 alone, logits of transformers in fp32 are up to 1.6e-4 from those in fp64, ours 2.6e-5. Its experts have no
# fp64.
FP64 = ("mamba", "falcon_mamba", "jamba-no-experts")


@pytest.mark.parametrize("case", chosen(CASES, quick=QUICK), ids=str)
def test_logits_equal_transformers(case: str, made: Made) -> None:
    reference, folder = made(case)
    model = load_model(open_model_folder(folder), Placement(torch.device("cpu"), torch.float32)).model
    tokens = torch.randint(0, SMALL["vocab_size"], (2, TOKENS), generator=torch.Generator().manual_seed(1))
    if case.startswith(FP64):
        reference = deepcopy(reference).double()
    with torch.no_grad():
        expected = reference(tokens).logits.float()
    for way, sizes in WAYS.items():
        if model.config.rope_scaling.kind == "dynamic" and way != "prefill":
            continue  # its frequencies depend on the length so far: the next test goes step by step
        actual = whole(model, tokens, sizes, block_size=BLOCKS.get(way))
        assert (actual - expected).abs().max() <= 2e-5 * expected.abs().max(), way
        assert torch.equal(actual.argmax(-1), expected.argmax(-1)), way


def test_two_streams_are_the_fewest_of_gemma_3n(tmp_path: Path) -> None:
    model_type, changes = CASES["gemma3n-second-of-three-widths-unscaled-biases-untied"]
    reference = make(tmp_path, model_type, {**changes, "altup_num_inputs": 2})
    model = load_model(open_model_folder(tmp_path), Placement(torch.device("cpu"), torch.float32)).model
    tokens = torch.randint(0, SMALL["vocab_size"], (1, TOKENS), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = reference(tokens).logits
    assert (whole(model, tokens) - expected).abs().max() <= 2e-5 * expected.abs().max()


@pytest.mark.parametrize("model_type", RENAMES)
def test_names_of_transformers_in_memory_are_read(model_type: str, made: Made, tmp_path: Path) -> None:
    case = next(name for name, (kind, _) in CASES.items() if kind == model_type)
    reference, _ = made(case)
    reference.save_pretrained(tmp_path, save_original_format=False)
    model = load_model(open_model_folder(tmp_path), Placement(torch.device("cpu"), torch.float32)).model
    tokens = torch.randint(0, SMALL["vocab_size"], (1, TOKENS), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = reference(tokens).logits
    assert (whole(model, tokens) - expected).abs().max() <= 2e-5 * expected.abs().max()


def test_tokens_without_per_layer_inputs_take_the_first_row(tmp_path: Path) -> None:
    """Gemma 3n's tokens of images and sounds; a prompt of token ids may hold them, and so may a reply."""
    model_type, changes = CASES["gemma3n-sparse-shared-kv"]
    reference = make(tmp_path, model_type, {**changes, "vocab_size_per_layer_input": 90})
    model = load_model(open_model_folder(tmp_path), Placement(torch.device("cpu"), torch.float32)).model
    tokens = torch.arange(SMALL["vocab_size"] - TOKENS, SMALL["vocab_size"])[None]
    with torch.no_grad():
        expected = reference(tokens).logits
    assert (whole(model, tokens) - expected).abs().max() <= 2e-5 * expected.abs().max()


def test_dynamic_scaling_step_by_step_equals_transformers(tmp_path: Path) -> None:
    """The keys keep the rotation they were stored with, in transformers' cache and in ours."""
    reference = make(tmp_path, *CASES["llama-rope-dynamic-beyond"])  # its frequencies change with the tokens read
    model = load_model(open_model_folder(tmp_path), Placement(torch.device("cpu"), torch.float32)).model
    tokens = torch.randint(0, SMALL["vocab_size"], (1, TOKENS), generator=torch.Generator().manual_seed(1))
    past, parts = None, []
    with torch.no_grad():
        for position in range(TOKENS):
            out = reference(tokens[:, position : position + 1], past_key_values=past, use_cache=True)
            past = out.past_key_values
            parts.append(out.logits)
    assert (whole(model, tokens, STEPS_ALONE) - torch.cat(parts, dim=1)).abs().max() <= 1e-4


@pytest.mark.parametrize("case", chosen(CASES, quick=CASES.keys() - LATER.keys()), ids=str)
def test_tensors_are_those_of_the_reference(case: str, made: Made) -> None:
    reference, folder = made(case)
    config = open_model_folder(folder).config
    tied = "lm_head.weight" if config.tie_embeddings else None
    with safe_open(folder / "model.safetensors", "pt") as file:  # experts have different names in files
        names = list(file.keys())
        stored = {config.local_name(name): tuple(file.get_slice(name).get_shape()) for name in names}
    ours = dict(config.tensors())
    for tensor in joined_linears(config):
        for part in tensor.parts:
            del ours[part]
        ours[tensor.name] = tensor.shape
    if not config.stacks.keys().isdisjoint(stored):  # all experts are one tensor, which the load test compares
        ours = {name: shape for name, shape in ours.items() if ".experts." not in name}
    expected = {name: shape for name, shape in stored.items() if name != tied and name not in config.stacks}
    assert ours == expected
    assert config.parameters() == sum(tensor.numel() for name, tensor in reference.state_dict().items() if name != tied)


STEPS, BEGUN = 64, 9
# Greedy replies are compared by default for these, for the others with -m slow: windows shorter than the text and a
# logit cap, shared keys and values, parallel attention and MLP.
REPLIES = ("gemma2-mqa-low-caps-untied", "gemma4-ple-shared-kv-double", "cohere2-window7-tied")
# Length-dependent rotary: transformers rotates the first tokens differently from the following ones.
LENGTHS = (
    "llama-rope-dynamic-beyond",
    "phi3-longrope-beyond-tied",
    "phi3-longrope-within-partial",
    "minicpm3-longrope-odd-sizes-biases-untied",
)
# Cached steps of transformers differ from its own prompt pass in some of these cases, by up to .36 of the largest
# logit (bamba-2-groups), so the whole text is recomputed at each step.
UNCACHED = {"bamba", "falcon_h1", "granitemoehybrid", "mamba2", "nemotron_h"}


@pytest.mark.parametrize("case", chosen((case for case in CASES if case not in LENGTHS), quick=REPLIES), ids=str)
def test_greedy_replies_equal_transformers(case: str, tmp_path: Path) -> None:
    """Compare 64 cached steps; the comparison ends where the two best tokens are nearly tied."""
    reference = make(tmp_path, *CASES[case])
    model = load_model(open_model_folder(tmp_path), Placement(torch.device("cpu"), torch.float32)).model
    prompt = torch.randint(4, SMALL["vocab_size"], (1, BEGUN), generator=torch.Generator().manual_seed(2))
    runner = ModelRunner(model)
    cache = runner.make_cache(CacheShape.contiguous(BEGUN + STEPS))
    new, past, text = prompt, None, prompt[:, :0]
    cached = CASES[case][0] not in UNCACHED
    for step in range(STEPS):
        logits = runner.run([Chunk(new[0].tolist(), text.shape[1], (0,), 1)], cache)
        text = torch.cat((text, new), dim=1)
        with torch.no_grad():
            out = reference(new if cached else text, past_key_values=past, use_cache=cached)
        past, expected = out.past_key_values if cached else None, out.logits[:, -1:]
        best, second = expected.topk(2).values[0, 0]
        assert logits.argmax(-1).item() == expected.argmax(-1).item() or best - second < 1e-3, step
        new = expected.argmax(-1)


def test_the_first_version_of_ling_is_deepseek_moe_with_other_names(tmp_path: Path) -> None:
    reference = make(tmp_path, *CASES["deepseek-normalized-tied"])
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(publish_ling_1(tmp_path / "model.safetensors", config)))
    tokens = torch.randint(3, 97, (2, 20), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = reference(tokens).logits
    assert (whole(load_model(open_model_folder(tmp_path), CPU).model, tokens) - expected).abs().max() <= 1e-4


def test_the_head_of_the_first_version_of_ling_is_divided_by_the_norms_of_its_columns(tmp_path: Path) -> None:
    """Copies, whose heads are divided, do not ask for it again."""
    model_type, changes = CASES["deepseek-normalized-tied"]
    reference = make(tmp_path, model_type, {**changes, "tie_word_embeddings": False})
    raw = publish_ling_1(tmp_path / "model.safetensors", json.loads((tmp_path / "config.json").read_text()))
    (tmp_path / "config.json").write_text(json.dumps({**raw, "norm_head": True}))
    head = reference.get_output_embeddings().weight
    head.data = torch.nn.functional.normalize(head.data, dim=0)
    folder = open_model_folder(tmp_path)
    assert folder.raw.values["norm_head"] is False
    checkpoint = folder.checkpoint()
    assert torch.equal(checkpoint.read("lm_head.weight").view(torch.uint8).flatten(), stored(checkpoint))
    tokens = torch.randint(3, 97, (2, 20), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = reference(tokens).logits
    assert (whole(load_model(folder, CPU).model, tokens) - expected).abs().max() <= 2e-5 * expected.abs().max()


def stored(checkpoint: Checkpoint) -> torch.Tensor:
    """Return the bytes of the head as a copy is written from them."""
    return torch.tensor([byte for chunk in checkpoint.chunks("lm_head.weight") for byte in chunk], dtype=torch.uint8)


def test_pythia_as_published(tmp_path: Path) -> None:
    """With the names of older transformers, and with causal masks and frequencies, which are not read."""
    reference = make(tmp_path, *CASES["gpt_neox-parallel"])
    tensors = {
        name.replace("lm_head.", "embed_out."): tensor
        for name, tensor in load_file(tmp_path / "model.safetensors").items()
    }
    for layer in range(SMALL["num_hidden_layers"]):
        name = f"gpt_neox.layers.{layer}.attention"
        tensors |= {f"{name}.bias": torch.ones(1, 1, 8, 8, dtype=torch.bool)}
        tensors |= {f"{name}.masked_bias": torch.tensor(-1e9), f"{name}.rotary_emb.inv_freq": torch.ones(2)}
    save_file(tensors, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    del config["rope_parameters"]
    (tmp_path / "config.json").write_text(json.dumps({**config, "rotary_pct": 0.25, "rotary_emb_base": 10000}))
    model = load_model(open_model_folder(tmp_path), CPU).model
    tokens = torch.randint(3, 97, (1, 20), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = reference(tokens).logits
    assert (whole(model, tokens) - expected).abs().max() <= 2e-5 * expected.abs().max()


def test_gpt2_as_published(tmp_path: Path) -> None:
    """By the class without a head, with causal masks, which are not read, and without a dtype: in fp32."""
    reference = make(tmp_path, *CASES["gpt2-tied"])
    tensors = {
        name.removeprefix("transformer."): tensor for name, tensor in load_file(tmp_path / "model.safetensors").items()
    }
    tensors |= {f"h.{layer}.attn.bias": torch.ones(1, 1, 8, 8) for layer in range(SMALL["num_hidden_layers"])}
    save_file(tensors, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    del config["dtype"]
    (tmp_path / "config.json").write_text(json.dumps({**config, "n_ctx": config["n_positions"]}))
    folder = open_model_folder(tmp_path)
    assert folder.config.dtype == "float32"
    tokens = torch.randint(3, 97, (1, 20), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = reference(tokens).logits
    assert (whole(load_model(folder, CPU).model, tokens) - expected).abs().max() <= 2e-5 * expected.abs().max()


def test_every_family_has_a_case() -> None:
    assert {model_type for model_type, _ in CASES.values()} == set(families()) - EMBEDDING


def test_every_generative_model_of_transformers_runs_or_is_refused_with_a_reason() -> None:
    running = {*families(), *TEXT_PARTS}
    assert not running & REFUSED.keys()
    mappings = (
        modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
    )
    assert not set().union(*mappings) - running - REFUSED.keys()


# Tokens and the limit of the context, and a number that the shapes of tensors have to agree with.
NO_DEFAULTS = {"bos_token_id", "eos_token_id", "max_position_embeddings", "original_max_position_embeddings"}
NO_DEFAULTS |= {"num_key_value_heads", "rope_parameters"}
# Published with code of their own, whose defaults are not those of the class that transformers computes them as.
OTHER_DEFAULTS = {"PanguEmbedded", "bailing_moe", "deepseek", "maincoder", "sarvam_mla", "sarvam_moe", "smallthinker"}
OTHER_DEFAULTS |= {"telechat3"}
ROPE = ("rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor")


def differ(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    try:
        read = [parse_config(Fields(values, "config.json")) for values in (one, other)]
    except ModelError:
        return False
    layers = [config.layer_specs for config in read]
    return layers[0] != layers[1] or any(
        getattr(read[0], field.name) != getattr(read[1], field.name)
        for field in fields(read[0])
        if field.name != "build_layer"
    )


@pytest.mark.parametrize("model_type", sorted(set(families()) - EMBEDDING - OTHER_DEFAULTS))
def test_absent_fields_have_the_defaults_of_transformers(model_type: str) -> None:
    own = type(transformers.AutoConfig.for_model(ALIASES.get(model_type, model_type)))
    changes = {**SMALL, **{kind: changes for kind, changes in CASES.values()}[model_type]}

    def completed(values: Mapping[str, Any]) -> dict[str, Any]:
        text = own(**deepcopy(dict(values))).to_json_string(use_diff=False)
        return {**json.loads(text), "model_type": model_type, "dtype": "float32"}

    written = completed(changes)
    for field in fields(own):
        default = field.default if field.default_factory is MISSING else field.default_factory()
        if field.name in written.keys() - NO_DEFAULTS:
            absent = {key: value for key, value in written.items() if key != field.name}
            assert not differ(absent, {**absent, field.name: default}), field.name
    if "rope_parameters" not in written:
        return
    bare = {key: value for key, value in changes.items() if key not in ROPE}
    written = completed(bare)
    absent = {key: value for key, value in written.items() if key not in ROPE}
    rope = written["rope_parameters"]
    assert not differ(absent, {**absent, "rope_parameters": rope})
    if "rope_theta" in rope:  # theta alone, whose default may be another one
        kind = {"rope_parameters": {"rope_type": "default"}}
        whole_rope = completed({**bare, **kind})["rope_parameters"]
        assert not differ({**absent, **kind}, {**absent, "rope_parameters": whole_rope})


def test_gpt_oss_with_experts_in_16_bits(tmp_path: Path) -> None:
    """Read stacks of transposed weights, which transformers saves without MXFP4."""
    config = transformers.AutoConfig.for_model("gpt_oss", **{**SMALL, **CASES["gpt_oss-window7-gqa4:2"][1]})
    reference = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    enliven(reference)
    reference.save_pretrained(tmp_path)
    folder = open_model_folder(tmp_path)
    assert not folder.packings
    tokens = torch.randint(3, 97, (1, 20), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = reference(tokens).logits
    assert (whole(load_model(folder, CPU).model, tokens) - expected).abs().max() <= 1e-4 * expected.abs().max()


def test_heads_of_baichuan_are_divided_by_the_norms_of_their_rows_once(tmp_path: Path) -> None:
    """Copies, whose heads are divided, say so; heads of the first version, with fewer tokens, are not divided."""
    rows = 5000  # of which no more than 4096 are divided in one step
    model_type, changes = CASES["baichuan-mha"]
    make(tmp_path, model_type, {**changes, "vocab_size": rows})
    folder = open_model_folder(tmp_path)
    assert folder.raw.values["norm_head"] is False
    head = folder.checkpoint().read("lm_head.weight")
    assert torch.allclose(head.norm(dim=1), torch.ones(rows))
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**raw, "norm_head": False}))
    stored_head = open_model_folder(tmp_path).checkpoint().read("lm_head.weight")
    assert not torch.allclose(stored_head.norm(dim=1), torch.ones(rows))
    with pytest.raises(ModelError, match="ALiBi"):
        parse_config(Fields({**raw, "hidden_size": 5120}, "config.json"))
    assert TextPart.from_config(Fields(raw, "config.json")).norm_head == "rows"
    for published in ({"vocab_size": 64000}, {"vocab_size": 64016, "architectures": ["BaiChuanForCausalLM"]}):
        assert TextPart.from_config(Fields({**raw, **published}, "config.json")).norm_head is None
