"""The types of tensors are those of llama-quantize (b11434), whose output for pico is recorded here."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import gguf
import pytest

from mycli.quant.ggml.mixes import GGUF_EMBEDDING, GGUF_HEAD, MIXES, ModelShape, choose_types
from mycli.quant.ggml.plan import kind_bytes, model_shape, quantized_names
from mycli.runtime.checkpoint.gguf.architectures import written_architecture
from mycli.runtime.checkpoint.model_folder import ModelFolder
from mycli.runtime.errors import UsageError
from tests.support.published import published

PICO = ModelShape(layers=6, queries_per_key=2, experts=0, architecture="llama", tied=True)
PARTS = {"attn_q": 256, "attn_k": 256, "attn_v": 256, "attn_output": 256, "ffn_gate": 256, "ffn_up": 256}
ROWS = {**PARTS, "ffn_down": 768}
# By file type: the embedding, the type of most tensors, and the tensors of another type.
RECORDED = {
    "q4_k_m": ("Q6_K", "Q4_K", {f"blk.{layer}.{part}": "Q6_K" for layer in (2, 5) for part in ("attn_v", "ffn_down")}),
    "q6_k": ("Q6_K", "Q6_K", {}),
    "q4_0": ("Q6_K", "Q4_0", {}),
    "q8_0": ("Q8_0", "Q8_0", {}),
    "iq4_xs": ("Q6_K", "IQ4_XS", {}),
    "iq3_s": ("Q6_K", "IQ3_S", {}),
    "q3_k_s": ("Q6_K", "Q3_K", {}),
    "q2_k": (
        "Q6_K",
        "Q2_K",
        {f"blk.{layer}.{part}": "Q3_K" for layer in range(6) for part in ("attn_v", "ffn_down", "attn_output")},
    ),
    "iq3_xxs": (
        "Q5_K",
        "IQ3_XXS",
        {
            f"blk.{layer}.{part}": "IQ3_S" if part == "attn_output" else "IQ2_S"
            for layer in range(6)
            for part in ("attn_q", "attn_k", "attn_output")
        },
    ),
}


def _tensors(layers: int) -> list[tuple[str, int]]:
    inner = [(f"blk.{layer}.{part}.weight", columns) for layer in range(layers) for part, columns in ROWS.items()]
    return [(GGUF_EMBEDDING, 256), *inner]


@pytest.mark.parametrize("name", RECORDED)
def test_types_of_pico(name: str) -> None:
    embedding, base, others = RECORDED[name]
    types = choose_types(name, _tensors(6), PICO)
    assert types.pop(GGUF_EMBEDDING) == embedding
    assert types == {tensor: others.get(tensor.removesuffix(".weight"), base) for tensor in types}


@pytest.mark.parametrize(("name", "output"), [("q4_k_m", "Q5_K"), ("q3_k_s", "Q5_K"), ("q6_k", "Q6_K")])
def test_attention_of_eight_experts_gets_more_bits(name: str, output: str) -> None:
    """llama-quantize gives models of Mixtral's kind wider keys and values, which are small next to the experts."""
    shape = ModelShape(layers=6, queries_per_key=4, experts=8, architecture="llama", tied=False)
    types = choose_types(name, _tensors(6), shape)
    for layer in range(6):
        assert types[f"blk.{layer}.attn_k.weight"] == types[f"blk.{layer}.attn_v.weight"] == "Q8_0"
        assert types[f"blk.{layer}.attn_output.weight"] == output


@pytest.mark.parametrize(("name", "values"), [("q3_k_s", "Q5_K"), ("q6_k", "Q6_K")])
def test_values_of_a_70b_model_get_more_bits(name: str, values: str) -> None:
    shape = ModelShape(layers=80, queries_per_key=8, experts=0, architecture="llama", tied=False)
    types = choose_types(name, _tensors(80), shape)
    assert {types[f"blk.{layer}.attn_v.weight"] for layer in range(80)} == {values}


def test_the_first_and_last_eighth_of_the_layers_get_more_bits() -> None:
    types = choose_types("iq3_xs", _tensors(16), replace(PICO, layers=16))
    for part in ("ffn_gate", "ffn_up"):
        of_layers = [types[f"blk.{layer}.{part}.weight"] for layer in range(16)]
        assert of_layers == 2 * ["IQ3_S"] + 12 * ["IQ3_XXS"] + 2 * ["IQ3_S"]


def test_rows_that_fill_no_super_block_get_narrow_types() -> None:
    types = choose_types("q4_k_m", [("blk.0.ffn_up.weight", 96), ("blk.0.ffn_gate.weight", 40)], PICO)
    assert types == {"blk.0.ffn_up.weight": "Q5_0", "blk.0.ffn_gate.weight": "F16"}


@pytest.mark.parametrize(
    ("name", "columns", "kind"),
    [
        *(("iq2_xs", 256, "Q5_K"), ("iq2_xs", 96, "Q8_0"), ("q4_k_m", 96, "Q8_0"), ("q4_0", 256, "Q6_K")),
        *(("q4_0", 96, "Q8_0"), ("q8_0", 256, "Q8_0"), ("q8_0", 40, "F16")),
    ],
)
def test_the_head_by_file_type_and_length_of_a_row(name: str, columns: int, kind: str) -> None:
    assert choose_types(name, [(GGUF_HEAD, columns)], LARGE) == {GGUF_HEAD: kind}


def test_an_unknown_file_type_lists_the_choices() -> None:
    with pytest.raises(UsageError) as error:
        choose_types("q7_k", [], PICO)
    assert all(name in error.value.hint for name in MIXES)


def test_file_types_have_the_numbers_of_llama_cpp() -> None:
    """Readers print the type by this number."""
    for name, mix in MIXES.items():
        assert mix.id == gguf.LlamaFileType[f"MOSTLY_{name.upper()}"], name


def test_halves_of_latent_attention_stay_in_floats() -> None:
    """kv_b is stored as two halves, one transposed, so blocks cannot lie along its rows."""
    config = published("DeepSeek-V2-Lite")
    names = quantized_names(cast(ModelFolder, SimpleNamespace(config=config)))
    linears = {f"{linear.name}.weight" for linear in config.linears()}
    assert linears - set(names) == {name for name in linears if name.endswith("kv_b_proj.weight")}


LARGE = ModelShape(layers=32, queries_per_key=2, experts=0, architecture="llama", tied=False)


def _layers(name: str, part: str, shape: ModelShape) -> dict[str, list[int]]:
    """Return the layers of each type of a part, without those of the base type."""
    types = choose_types(name, _tensors(shape.layers), shape)
    layers: dict[str, list[int]] = {}
    for layer in range(shape.layers):
        layers.setdefault(types[f"blk.{layer}.{part}.weight"], []).append(layer)
    return {kind: found for kind, found in layers.items() if kind != MIXES[name].base}


@pytest.mark.parametrize(
    ("name", "part", "expected"),
    [
        # use_more_bits of llama-quant.cpp: the first and last eighth, and every third between them.
        ("q4_k_m", "attn_v", {"Q6_K": [0, 1, 2, 3, 6, 9, 12, 15, 18, 21, 24, 27, 28, 29, 30, 31]}),
        ("q5_k_m", "ffn_down", {"Q6_K": [0, 1, 2, 3, 6, 9, 12, 15, 18, 21, 24, 27, 28, 29, 30, 31]}),
        ("q3_k_m", "attn_v", {"Q5_K": [0, 1], "Q4_K": [*range(2, 32)]}),
        ("q3_k_m", "ffn_down", {"Q5_K": [0, 1], "Q4_K": [*range(2, 32)]}),
        ("q4_k_s", "attn_v", {"Q5_K": [0, 1, 2, 3]}),
        ("q4_k_s", "ffn_down", {"Q5_K": [0, 1, 2, 3]}),
        ("q2_k_s", "ffn_down", {"Q4_K": [0, 1, 2, 3]}),
        ("iq3_m", "ffn_down", {"Q4_K": [0, 1, 2, 3]}),
        ("iq2_xs", "ffn_down", {"Q2_K": [0, 1, 2, 3]}),
        ("iq2_m", "ffn_down", {"IQ3_S": [0, 1, 2, 3]}),
        ("iq2_m", "attn_output", {"IQ3_S": [*range(32)]}),
        ("iq2_xs", "attn_output", {}),
        ("iq3_xs", "ffn_up", {"IQ3_XXS": [*range(4, 28)]}),
        ("q4_0", "ffn_down", {"Q4_1": [0, 1, 2, 3]}),
        ("q4_0", "attn_v", {}),
        ("q5_0", "ffn_down", {"Q5_1": [0, 1, 2, 3]}),
        ("q4_1", "ffn_down", {}),
    ],
)
def test_layers_with_more_bits_of_32(name: str, part: str, expected: dict[str, list[int]]) -> None:
    assert _layers(name, part, LARGE) == expected


@pytest.mark.parametrize(
    ("name", "change", "values"),
    [
        ("iq4_xs", {"queries_per_key": 3}, "IQ4_XS"),
        ("iq4_xs", {"queries_per_key": 4}, "Q5_K"),
        ("iq2_xs", {"queries_per_key": 3}, "Q2_K"),
        ("iq2_xs", {"queries_per_key": 4}, "Q4_K"),
        ("iq2_xs", {"queries_per_key": 1, "experts": 3}, "Q2_K"),
        ("iq2_xs", {"queries_per_key": 1, "experts": 4}, "Q4_K"),
        ("q3_k_s", {"layers": 80}, "Q5_K"),
        ("q3_k_s", {"layers": 79}, "Q3_K"),
        ("q3_k_s", {"layers": 80, "queries_per_key": 1}, "Q3_K"),
        ("q3_k_s", {"layers": 80, "architecture": "gemma"}, "Q3_K"),
        ("q3_k_s", {"experts": 8}, "Q8_0"),
        ("q3_k_s", {"experts": 9}, "Q3_K"),
    ],
    ids=str,
)
def test_values_get_more_bits_where_they_are_few(name: str, change: dict[str, Any], values: str) -> None:
    shape = replace(LARGE, **change)
    types = choose_types(name, _tensors(shape.layers), shape)
    assert {types[f"blk.{layer}.attn_v.weight"] for layer in range(shape.layers)} == {values}


@pytest.mark.parametrize(
    ("experts", "kinds"),
    [(8, {"attn_k": "Q4_K", "attn_output": "Q5_K"}), (9, dict.fromkeys(("attn_k", "attn_output")))],
)
def test_attention_of_eight_experts_gets_more_than_two_bits(experts: int, kinds: dict[str, str | None]) -> None:
    shape = replace(LARGE, experts=experts)
    for part, kind in kinds.items():
        assert _layers("iq2_xs", part, shape) == ({} if kind is None else {kind: [*range(32)]})


def test_layers_of_experts_are_counted_by_their_number() -> None:
    """A mixture may have dense layers without the role; the rule for its first layers counts all of them."""
    tensors = [(f"blk.{layer}.ffn_down_exps.weight", 256) for layer in range(2, 32)]
    types = choose_types("q4_k_s", reversed(tensors), replace(LARGE, experts=16))
    assert [name for name, kind in types.items() if kind == "Q5_K"] == [name for name, _ in tensors[:2]]
    dense = choose_types("q4_k_s", reversed(tensors), LARGE)
    assert [name for name, kind in dense.items() if kind == "Q5_K"] == [name for name, _ in tensors[:4]]


@pytest.mark.parametrize(
    ("name", "tied", "kind"), [("q4_k_m", True, "Q6_K"), ("q4_k_m", False, "Q4_K"), ("iq2_m", False, "IQ3_S")]
)
def test_a_table_of_per_layer_inputs_has_the_type_of_the_embedding(name: str, tied: bool, kind: str) -> None:
    tensors = [(GGUF_EMBEDDING, 2048), ("per_layer_token_embd.weight", 7680)]
    assert set(choose_types(name, tensors, replace(LARGE, tied=tied)).values()) == {kind}


@pytest.mark.parametrize("name", ["gemma-3n-E2B", "gemma-4-E2B"])
def test_the_table_of_per_layer_inputs_is_quantized(name: str) -> None:
    """It has two fifths of the parameters of Gemma 3n E2B."""
    config = published(name)
    names = quantized_names(cast(ModelFolder, SimpleNamespace(config=config)))
    assert f"{config.per_layer_table().name}.weight" in names


def test_values_of_recurrent_layers_and_of_attention_are_counted_together() -> None:
    """Qwen 3.5 has attn_qkv in three of four layers; llama-quantize counts it and attn_v as one role, by layer."""
    names = [f"blk.{layer}.{'attn_v' if layer % 4 == 3 else 'attn_qkv'}.weight" for layer in range(32)]
    # In any order: a file lists them by layer, a model need not.
    ordered = sorted(names, key=lambda name: "qkv" in name)
    for mix, kind, layers in (
        ("q3_k_m", "Q5_K", [0, 1]),
        ("q4_k_s", "Q5_K", [0, 1, 2, 3]),
        ("q4_k_m", "Q6_K", [0, 1, 2, 3, 6, 9, 12, 15, 18, 21, 24, 27, 28, 29, 30, 31]),
    ):
        types = choose_types(mix, [(name, 4096) for name in ordered], LARGE)
        assert [layer for layer, name in enumerate(names) if types[name] == kind] == layers


def test_tensors_of_a_layer_are_counted_by_name() -> None:
    """Qwen 3.5 MoE has two ffn_down in a layer, and an eighth of 40 layers is five tensors."""
    parts = ("ffn_down_shexp", "ffn_down_exps")
    tensors = [(f"blk.{layer}.{part}.weight", 512) for layer in range(40) for part in parts]
    types = choose_types("iq2_xs", tensors, replace(LARGE, layers=40, experts=256))
    more = [name for name, kind in types.items() if kind == "Q2_K"]
    assert more == [f"blk.{layer}.{part}.weight" for layer in (0, 1) for part in reversed(parts)] + [
        "blk.2.ffn_down_exps.weight"
    ]


def test_low_rank_parts_of_latent_attention_have_the_type_of_most_tensors() -> None:
    parts = ("attn_q_a", "attn_q_b", "attn_kv_a_mqa")
    assert set(choose_types("iq3_xs", [(f"blk.0.{part}.weight", 512) for part in parts], LARGE).values()) == {"IQ3_S"}


@pytest.mark.parametrize(("name", "queries"), [("LFM2-1.2B", 0), ("Qwen3.5-9B", 4), ("Llama-3.2-1B", 4)])
def test_queries_per_key_are_those_of_the_first_layer(name: str, queries: int) -> None:
    """LFM2 has a convolution there. The counts of heads are what the file says: a number, or one for each layer."""
    config = published(name)
    assert model_shape(config, written_architecture(config)).queries_per_key == queries


def test_a_tensor_has_the_bytes_of_its_type() -> None:
    for kind in ("F32", "BF16", "Q4_0", "Q8_0", "Q4_K", "Q6_K", "IQ2_XXS"):
        block, nbytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
        assert kind_bytes((3, 512), kind) == 3 * (512 // block) * nbytes
