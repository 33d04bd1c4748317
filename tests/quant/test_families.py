"""Test quantizing each kind of layer: calibration observes the inputs of transformers' modules."""

import itertools
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from safetensors.torch import load_file, save_file
from torch import Tensor

from mycli.quant.calibration.hessian import ObservedBlock, product_input
from mycli.quant.export import ExportRequest, find_export_target
from mycli.quant.layer_streaming import StreamedModel
from mycli.quant.pipeline import quantize
from mycli.quant.planning.plan import plan_quantization
from mycli.quant.planning.target import OutputTarget
from mycli.quant.recipe import Recipe
from mycli.quant.solving.linear_solver import TOO_FEW_TOKENS
from mycli.runtime.checkpoint.open_folder import open_model_folder
from mycli.runtime.checkpoint.restored_weights import joined_linears
from mycli.runtime.engine.loading.loader import load_model
from mycli.runtime.hub.model_info import read_model_info
from mycli.runtime.hub.resolve import Source
from tests.support import quantizing
from tests.support.engines import whole
from tests.support.families import (
    ALIASES,
    CASES,
    LATER,
    class_of,
    experts_of,
    grouped,
    linears_of,
    make,
    packed_weights,
    separated,
    weights_of,
)
from tests.support.grids import chosen
from tests.support.models import CPU
from tests.support.paths import PICO
from tests.support.prediction import make_with_head
from tests.support.quantizing import UNMEASURED

pytestmark = pytest.mark.usefixtures("short_calibration_text", "quick_configs")

TOKENS = 24
NAMED = (
    "llama-gqa4:2-hd16",
    "mistral-window7",
    "qwen2-biases",
    "qwen3-qk-norm-hd32",
    "olmo2-gqa4:2",
    "phi3-gqa4:2",
    "phi3-longrope-beyond-tied",
    "gemma2-mqa-low-caps-untied",
    "gemma3-window7-tied",
    "gemma3n-sparse-shared-kv",
    "gemma4-ple-shared-kv-double",
    "gemma4-keys-are-values-untied",
    "gemma4_unified-tied",
    "smollm3-untied-window",
    "olmo3-window7",
    "ministral3-beyond",
    "granite-tied-biases",
    "glm4-half-turned",
    "seed_oss-biases",
    "exaone4-window7",
    "cohere2-untied-biases",
    "hunyuan-alpha",
    "ernie4_5-untied-biases",
    "arcee-tied-biases",
    "cwm-window7",
    "qwen3_moe-8top2",
    "qwen3_moe-every-other-normalized-tied",
    "mixtral-4top2",
    "olmoe-clip-normalized-gqa-tied",
    "qwen2_moe-shared",
    "granitemoe-8top2",
    "gemma4-8top2",
    "qwen3_5-delta",
    "qwen3_5_moe-8top3",
    "qwen3_next-8top3",
    "lfm2-untied-biases",
    "deepseek_v2-yarn",
    "deepseek_v3-groups-yarn",
    "glm4_moe_lite-8top3",
    "minicpm3-tied",
    "youtu-tied",
    "mistral4-beyond",
    "granitemoehybrid-8top3",
    "bamba-2-groups",
    "kimi_linear-8top3",
    "bailing_hybrid-8top3",
)
# For a family without a case above, its last case; gpt_oss's experts are not quantized again.
LAST = {model_type: case for case, (model_type, _) in CASES.items()}
# transformers lacks them: they are other families by another name.
KINDS = (
    *NAMED,
    *(LAST[each] for each in sorted(LAST.keys() - {"gpt_oss", *ALIASES, *(CASES[case][0] for case in NAMED)})),
)
EARLY_ROUTER = "smallthinker-layouts-softmax-tied"  # an alias too, whose calibration is its own
# These run end to end by default, the others with -m slow: norms everywhere, one norm for two parts, a scale of scores
# and multipliers, no gate. Unusual norms are tested with AWQ, which folds scales into them.
COPIED = (
    ("olmo2-gqa4:2", "awq", 8),
    ("gemma4-ple-shared-kv-double", "awq", 8),
    ("phi3-gqa4:2", "gptq", 4),
    ("gemma3-window7-tied", "awq", 8),
    ("granite-tied-biases", "awq", 8),
    ("cohere2-untied-biases", "awq", 8),
    ("arcee-tied-biases", "gptq", 8),
    ("qwen3_moe-8top2", "gptq", 4),
    ("qwen3_5-delta", "awq", 4),
    ("deepseek_v3-groups-yarn", "awq", 8),
    ("bamba-2-groups", "gptq", 8),
)
# Random models of a few inputs do not quantize well: the allowed error relative to the logits' norm, by bits.
LOST = {8: 0.1, 4: 0.9}
# Calibration treats these like llama, qwen3_moe, qwen3_next and the others: with -m slow.
ALIKE = {"mistral-window7", "qwen2-biases", "granitemoe-8top2", "qwen3_5_moe-8top3", *LATER} - {
    "phi-head-norms-mha-relu2",
    "llama4-every-other-top2-biases-tied",  # weighs the inputs of experts
}
# transformers stores the experts of a layer of these as one tensor, and does not read copies with separate experts.
STACKED = (
    "granitemoe-8top2",
    "gemma4-8top2",
    "qwen3_5_moe-8top3",
    "granitemoehybrid-8top3",
    "mistral4-beyond",
    "granitemoeshared-none-tied-biases",
    "granitemoe_swa-thetas-tied-biases",
    "llama4-every-other-top2-biases-tied",
    # transformers converts their tensors' names, but not those of packed ones.
    "phimoe-window7-tied-biases",
    "kimi_linear-8top3",
    "bailing_hybrid-8top3",
    "olmo_hybrid-positive-tied-biases",
    "nemotron_h-groups-latent-experts-odd-sizes-biases-unnormalized",
    # transformers reads weights of linears outside their modules.
    "mamba2-odd-sizes-biases-tied",
    "mamba-odd-sizes-biases-untied",
    "falcon_mamba-odd-sizes-biases-untied",
    "falcon-7b",
    # transformers has queries, keys and values in one tensor.
    "gpt_neox-parallel",
    # transformers has the transposes of weights.
    "gpt2-tied",
    # transformers fails while it initializes them.
    "gpt_bigcode-tied",
    "nanochat-tied-biases-low-cap",
)


def random_model(folder: Path, case: str, **changes: Any) -> transformers.PreTrainedModel:
    model_type, own = CASES[case]
    vocabulary = {key: 4096 for key in ("vocab_size", "vocab_size_per_layer_input") if key in {"vocab_size", *own}}
    reference = make(folder, model_type, {**own, **vocabulary, **changes})
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(PICO / name, folder / name)
    return reference


def hooked_inputs(
    reference: transformers.PreTrainedModel, tokens: Tensor, names: dict[str, dict[int, tuple[str, ...]]]
) -> dict[str, Tensor]:
    """Return the input of each linear of transformers' model by name: [windows, tokens, K], or [n, K] of an expert.

    Experts are one module there: the tokens routed to each are gathered in token order, as in its code. The experts are
    named by `names`.
    """
    found: dict[str, Tensor] = {}

    def observe(name: str, module: torch.nn.Module, given: tuple[Tensor, ...]) -> None:
        if len(given) == 1:  # llama4: all tokens for each expert, weighted, zero for tokens that are not routed to it
            for expert, linears in names[name.split(".")[2]].items():
                rows = given[0].view(len(module.gate_up_proj), -1, given[0].shape[-1])[expert]
                rows = rows[rows.any(-1)]
                gate, up = (rows @ module.gate_up_proj[expert]).chunk(2, dim=-1)
                found.update(zip(linears, (rows, module.act_fn(gate) * up), strict=True))
            return
        x, chosen, _ = given
        for expert, linears in names[name.split(".")[2]].items():
            rows = x[(chosen == expert).any(-1)]
            if isinstance(alone := getattr(module, "up_proj", None), Tensor):
                found.update(zip(linears, (rows, module.act_fn(rows @ alone[expert].T)), strict=True))
                continue
            gate, up = (rows @ module.gate_up_proj[expert].T).chunk(2, dim=-1)
            found.update(zip(linears, (rows, rows, module.act_fn(gate) * up), strict=True))

    experts = {name: each for name, each in reference.named_modules() if name.endswith(".experts")}
    hooks = [
        module.register_forward_pre_hook(lambda _, given, name=name: found.__setitem__(name, given[0]))
        for name, module in linears_of(reference).items()
    ]
    hooks += [
        module.register_forward_pre_hook(lambda each, given, name=name: observe(name, each, given))
        for name, module in experts.items()
    ]
    with torch.no_grad():
        reference(tokens)
    for hook in hooks:
        hook.remove()
    return separated(found, None) if reference.config.model_type == "gpt_neox" else found


def unpacked(copy: Path, folder: Path) -> Path:
    """Write a folder with a copy's weights, unpacked by compressed-tensors, the experts of a layer stacked."""
    folder.mkdir()
    config = json.loads((copy / "config.json").read_text())
    (group,) = config.pop("quantization_config")["config_groups"].values()
    (folder / "config.json").write_text(json.dumps(config))
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**group["weights"]))
    compressor = BaseCompressor.get_value_from_registry("pack-quantized")
    described = open_model_folder(copy).config
    stored, packed = load_file(copy / "model.safetensors"), dict[str, dict[str, Tensor]]()
    stored = {described.local_name(name): each for name, each in stored.items()}
    for name in [name for name in stored if ".weight_" in name]:
        module, _, part = name.rpartition(".")
        packed.setdefault(module, {})[part] = stored.pop(name)
    for module, parts in packed.items():
        stored[f"{module}.weight"] = compressor.decompress(parts, scheme)["weight"]
    for name, stack in described.stacks.items():
        made = torch.cat([stored.pop(part) for part in stack.parts])
        experts = {part.partition(".experts.")[2].partition(".")[0] for part in stack.parts}
        made = made.view(len(experts), -1, made.shape[-1])
        stored[name] = made.transpose(1, 2).contiguous() if stack.transposed else made
    stored = grouped(stored, described.heads) if described.model_type == "gpt_neox" else stored
    for tensor in joined_linears(described) if described.model_type == "gpt2" else ():
        stored[tensor.name] = stored.pop(tensor.parts[0]).T.contiguous()  # that of a bias is the bias
    stored = {described.stored_name(name): each for name, each in stored.items()}
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize(
    "case",
    [EARLY_ROUTER, *(pytest.param(case, marks=pytest.mark.slow) if case in ALIKE else case for case in KINDS)],
)
def test_calibration_observes_what_each_linear_gets(case: str, tmp_path: Path) -> None:
    reference = random_model(tmp_path, case)
    tokens = torch.randint(0, 4096, (3, TOKENS), generator=torch.Generator().manual_seed(1))
    folder = open_model_folder(tmp_path)
    expected = hooked_inputs(reference, tokens, experts_of(folder))
    model = StreamedModel(folder, CPU)
    stream, context = model.embed(tokens), model.context(TOKENS, exact=True)
    sides, observed = model.side_inputs(tokens), set[str]()
    for index in range(model.config.layers):
        block = model.block(index)
        kept, settled = (ObservedBlock(block, stream.clone(), settled, sides) for settled in (False, True))
        for state, (product, linear) in itertools.product((kept, settled), block.products.items()):
            found = product_input(state, product, slice(0, 3), context, CPU.device).x
            for spec in linear.specs:
                wanted = expected[spec.name]
                assert found.numel() == wanted.numel()  # windows and tokens may be one axis there
                assert (
                    not wanted.numel() or (found.view_as(wanted) - wanted).abs().max() <= 1e-4 * wanted.abs().max()
                ), (spec.name, state is settled)
                observed.add(spec.name)
        model.advance(block, stream, context, sides)
        assert torch.equal(settled.streams[0], stream)
    unquantized = {linear.name for spec in model.config.layer_specs for linear in spec.unquantized}
    unquantized |= {linear.name for linear in model.config.dense_linears()}
    assert expected.keys() - observed <= {"lm_head", *unquantized}, "every linear was looked at"
    assert observed <= expected.keys()


def test_a_copy_holds_the_head_that_predicts_as_it_is(tmp_path: Path) -> None:
    """The MTP head is copied bit for bit, outside the copy's schemes; its parameters count for bits per weight."""
    make_with_head(tmp_path / "source", "qwen3_5-delta", vocab_size=4096, intermediate_size=96)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(PICO / name, tmp_path / "source" / name)
    work = plan_quantization(Source("random", tmp_path / "source"), Recipe("rtn", 4, 32), UNMEASURED)
    quantize(work, OutputTarget(tmp_path / "copy"), CPU)
    stored, copied = (load_file(tmp_path / name / "model.safetensors") for name in ("source", "copy"))
    heads = [{name: each for name, each in one.items() if name.startswith("mtp.")} for one in (stored, copied)]
    assert heads[0].keys() == heads[1].keys() and len(heads[0]) == 15
    assert all(torch.equal(each, heads[1][name]) for name, each in heads[0].items())
    made = open_model_folder(tmp_path / "copy")
    assert made.mtp_head is not None and not made.mtp_head.packings and made.packings
    assert work.size.parameters == sum(each.numel() for each in stored.values())
    assert work.size.bytes == sum(each.nbytes for each in copied.values())
    nbytes = sum(each.nbytes for each in heads[0].values())
    assert read_model_info(Source("random", tmp_path / "copy")).predictor_bytes == nbytes
    request = ExportRequest(Source("random", made.path), made, tmp_path / "dense")
    done = find_export_target("safetensors")[0].export(request, lambda *_: None)
    dense = load_file(done.path / "model.safetensors")
    assert not done.left_out and all(torch.equal(each, dense[name]) for name, each in heads[0].items())
    other = replace(request, target=tmp_path / "gptq", requantize=True)
    done = find_export_target("gptq")[0].export(other, lambda *_: None)
    assert done.left_out and open_model_folder(done.path).mtp_head is None


def test_targets_have_the_names_of_the_files_too(tmp_path: Path) -> None:
    """The modules of EXAONE's published code and of vLLM have other names than Llama's."""
    (tmp_path / "source").mkdir()
    random_model(tmp_path / "source", "exaone-llama3", hidden_size=64, intermediate_size=96)
    quantizing.make(Source("random", tmp_path / "source"), tmp_path / "copy", Recipe("rtn", 4, 32, head="int8"))
    section = json.loads((tmp_path / "copy" / "config.json").read_text())["quantization_config"]
    bits = {
        name: group["weights"]["num_bits"] for group in section["config_groups"].values() for name in group["targets"]
    }
    stored = load_file(tmp_path / "copy" / "model.safetensors")
    packed = {name.removesuffix(".weight_packed") for name in stored if name.endswith(".weight_packed")}
    assert "transformer.h.0.mlp.c_fc_1" in packed <= bits.keys()
    assert {name for name, width in bits.items() if width == 8} == {"lm_head"}
    assert set(open_model_folder(tmp_path / "copy").packings) <= bits.keys()


@pytest.mark.parametrize(
    ("case", "method", "bits"),
    chosen([(case, method, bits) for case in KINDS for method in ("gptq", "awq") for bits in LOST], quick=COPIED),
)
def test_the_copy_is_the_model_that_transformers_reads(case: str, method: str, bits: int, tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    reference = random_model(tmp_path / "source", case, hidden_size=64, intermediate_size=96)
    recipe = Recipe(method, bits, 32, samples=8, seq=48)
    outcome = quantizing.make(Source("random", tmp_path / "source"), tmp_path / "copy", recipe)
    tokens = torch.randint(0, 4096, (2, TOKENS), generator=torch.Generator().manual_seed(1))
    read = unpacked(tmp_path / "copy", tmp_path / "unpacked") if case in STACKED else tmp_path / "copy"
    theirs = class_of(CASES[case][0]).from_pretrained(read, dtype=torch.float32)
    model = load_model(open_model_folder(tmp_path / "copy"), CPU).model
    ours = whole(model, tokens)
    with torch.no_grad():
        logits, original = theirs(tokens).logits, reference(tokens).logits  # which unpacks theirs
    read_by_them = weights_of(theirs, experts_of(open_model_folder(tmp_path / "copy")))
    for name, weight in packed_weights(model).items():
        assert torch.equal(weight, read_by_them[name]), name
    assert (ours - logits).abs().max() <= 2e-3 * logits.abs().max()  # packed products round activations
    lost = (ours - original).norm() / original.norm()
    if any(spec.unquantized for spec in model.config.layer_specs):  # rounding changes which experts are chosen
        lost = ((ours - original).norm(dim=-1) / original.norm(dim=-1)).quantile(0.25)
    assert lost < LOST[bits], "a copy that folds or calibrates wrongly says something else"
    assert all(
        layer.fallback == TOO_FEW_TOKENS
        if layer.output_error is None
        else layer.output_error < (1e-3 if bits == 8 else 0.1)
        for layer in outcome.layers
    )
