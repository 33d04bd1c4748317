"""Test GGUF files of encoders: names of the gguf library, keys and vocabulary as llama.cpp's converter writes them."""

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional
from transformers import AutoModel, RobertaTokenizerFast

from mycli.runtime.checkpoint.model_folder import ModelFolder
from mycli.runtime.checkpoint.open_folder import open_model_folder
from mycli.runtime.engine.loading.loader import LoadedModel, load_model
from mycli.runtime.engine.replies.embedder import Embedder
from mycli.runtime.errors import ModelError
from mycli.runtime.layers.bidirectional import encode_texts
from mycli.runtime.tokenizer.tokenizer import TextPair
from tests.support import gguf_files
from tests.support.embedding_models import WORD_PIECES, cross_encoder, encoder
from tests.support.models import CPU

TEXT = "The cat sat, what? ЖÉ"
CONTROL, NORMAL = 3, 1


def word_pieces(older: bool = False, **settings: Any) -> dict[str, Any]:
    """Return the vocabulary with the beginnings of words marked; older files name the ends of a text otherwise."""
    tokens = [
        text if text in WORD_PIECES[:5] else text[2:] if text.startswith("##") else f"▁{text}" for text in WORD_PIECES
    ]
    ends = ("bos", "eos") if older else ("cls", "seperator")
    ids = {f"tokenizer.ggml.{ends[0]}_token_id": "[CLS]", f"tokenizer.ggml.{ends[1]}_token_id": "[SEP]"}
    ids |= {"tokenizer.ggml.unknown_token_id": "[UNK]"}
    return {
        "tokenizer.ggml.model": "bert",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [NORMAL if older else CONTROL] * 5 + [NORMAL] * (len(tokens) - 5),
        **{key: WORD_PIECES.index(text) for key, text in ids.items()},
        **settings,
    }


def write(folder: Path, path: Path, arch: str, pooling: int, keys: dict[str, Any]) -> Path:
    config = json.loads((folder / "config.json").read_text())
    names = gguf.get_tensor_name_map(
        {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}[arch], config["num_hidden_layers"]
    )
    first = 2 if config["model_type"] == "xlm-roberta" else 0
    writer = gguf.GGUFWriter(path, arch)
    writer.add_context_length(config["max_position_embeddings"] - first)
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_layer_norm_eps(config.get("norm_eps", config.get("layer_norm_eps")))
    writer.add_causal_attention(False)
    writer.add_pooling_type(gguf.PoolingType(pooling))
    if arch == "nomic-bert":
        writer.add_rope_freq_base(1000.0)
    if arch == "jina-bert-v3":
        writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    if arch == "modern-bert":
        ropes = config["rope_parameters"]
        writer.add_rope_freq_base(ropes["full_attention"]["rope_theta"])
        writer.add_rope_freq_base_swa(ropes["sliding_attention"]["rope_theta"])
        writer.add_sliding_window(config["local_attention"])
        writer.add_sliding_window_pattern(3)
        writer.add_string("modern-bert.hidden_activation", config["hidden_activation"])
    for key, value in keys.items():
        add = {bool: writer.add_bool, int: writer.add_uint32, str: writer.add_string}
        add.get(type(value), writer.add_array)(key, value)
    for name, tensor in load_file(folder / "model.safetensors").items():
        name = name.removeprefix("roberta.").removeprefix("bert.").removeprefix("model.")
        if name.startswith("classifier.") and name.count(".") == 1:
            name = name.replace("classifier.", "classifier.out_proj.")  # as the converter does for BERT
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if name.startswith("pooler."):
            continue
        assert stored is not None, name
        writer.add_tensor(stored, tensor[first:].numpy() if "position" in name else tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def vector(opened: ModelFolder, tokens: list[int]) -> Tensor:
    runner = load_model(opened, CPU)
    assert opened.embedding is not None
    states = encode_texts(runner.model, [tokens], runner.rope(len(tokens)))[0]
    return Embedder(opened.embedding, opened.config.hidden_size).vector(states)


@pytest.mark.parametrize(
    ("model_type", "arch", "pooling", "older"),
    [
        ("bert", "bert", 2, False),
        ("xlm-roberta", "bert", 2, True),
        ("nomic_bert", "nomic-bert", 1, False),
        ("modernbert", "modern-bert", 1, False),
        ("jina_embeddings_v3", "jina-bert-v3", 1, False),
    ],
    ids=["bert", "positions-from-2-older", "nomic-bert", "modern-bert", "jina-bert-v3"],
)
def test_encoders_have_the_vectors_and_tokens_of_their_folder(
    model_type: str, arch: str, pooling: int, older: bool, tmp_path: Path
) -> None:
    windows = {"local_attention": 6, "num_hidden_layers": 4} if model_type == "modernbert" else {}
    folder = encoder(tmp_path / "hf", model_type, "cls_token" if pooling == 2 else "mean_tokens", **windows)
    original = open_model_folder(folder)
    opened = open_model_folder(write(folder, tmp_path / "a.gguf", arch, pooling, word_pieces(older)))
    tokens = opened.tokenizer().encode(TEXT, add_special=True)
    assert tokens == original.tokenizer().encode(TEXT, add_special=True)
    assert tokens[0] == WORD_PIECES.index("[CLS]") and WORD_PIECES.index("[UNK]") in tokens
    torch.testing.assert_close(vector(opened, tokens), vector(original, tokens), rtol=1e-5, atol=1e-6)
    assert opened.config.max_context == original.config.max_context


def test_without_a_window_every_layer_of_modern_bert_reads_the_whole_text(tmp_path: Path) -> None:
    folder = encoder(tmp_path / "hf", "modernbert", local_attention=0, num_hidden_layers=4)
    opened = open_model_folder(write(folder, tmp_path / "a.gguf", "modern-bert", 1, word_pieces()))
    assert [layer.attention.window for layer in opened.config.layer_specs] == [None] * 4


def _nomic_moe(weights: dict[str, Tensor], tokens: list[int], heads: int) -> Tensor:
    """Return the states that llama.cpp's build_moe_ffn and the layers around it define, with exact GELU."""

    def linear(x: Tensor, name: str) -> Tensor:
        return functional.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))

    def norm(x: Tensor, name: str) -> Tensor:
        return functional.layer_norm(x, x.shape[-1:], weights[f"{name}.weight"], weights[f"{name}.bias"], 1e-5)

    x = norm(weights["token_embd.weight"][tokens] + weights["token_types.weight"][0], "token_embd_norm")
    dim = x.shape[-1] // heads
    angles = torch.outer(torch.arange(len(tokens)), 10000.0 ** -(torch.arange(0, dim, 2) / dim)).repeat(1, 2)
    for index in range(4):
        block = f"blk.{index}"
        q, k, v = (
            part.view(len(tokens), heads, dim).transpose(0, 1) for part in linear(x, f"{block}.attn_qkv").chunk(3, -1)
        )
        q, k = (
            part * angles.cos() + torch.cat((-part[..., dim // 2 :], part[..., : dim // 2]), -1) * angles.sin()
            for part in (q, k)
        )
        attended = ((q @ k.transpose(1, 2)) * dim**-0.5).softmax(-1) @ v
        attended = linear(attended.transpose(0, 1).flatten(1), f"{block}.attn_output")
        x = norm(x + attended, f"{block}.attn_output_norm")
        if index % 2 == 0:
            y = linear(functional.gelu(linear(x, f"{block}.ffn_up")), f"{block}.ffn_down")
        else:
            best = linear(x, f"{block}.ffn_gate_inp").softmax(-1).topk(2)
            up, down = (weights[f"{block}.ffn_{part}_exps.weight"][best.indices] for part in ("up", "down"))
            outputs = down @ functional.gelu(up @ x[:, None, :, None])
            y = (outputs[..., 0] * best.values[..., None]).sum(1)
        x = norm(x + y, f"{block}.layer_output_norm")
    return x


def test_an_encoder_with_experts(tmp_path: Path) -> None:
    """Nomic Embed 2, for which transformers has no class: tensors are named and shaped as llama.cpp loads them."""
    torch.manual_seed(6)
    hidden, inner, experts = 32, 48, 4
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (97, hidden), "token_types.weight": (1, hidden)}
    norms, linears = ["token_embd_norm"], {}
    for index in range(4):
        block = f"blk.{index}"
        norms += [f"{block}.attn_output_norm", f"{block}.layer_output_norm"]
        linears |= {f"{block}.attn_qkv": (3 * hidden, hidden), f"{block}.attn_output": (hidden, hidden)}
        if index % 2 == 0:
            linears |= {f"{block}.ffn_up": (inner, hidden), f"{block}.ffn_down": (hidden, inner)}
        else:
            shapes |= {f"{block}.ffn_gate_inp.weight": (experts, hidden)}
            shapes |= {f"{block}.ffn_up_exps.weight": (experts, inner, hidden)}
            shapes |= {f"{block}.ffn_down_exps.weight": (experts, hidden, inner)}
    for name, shape in (linears | dict.fromkeys(norms, (hidden,))).items():
        shapes |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    weights = {name: torch.randn(shape) * shape[-1] ** -0.5 for name, shape in shapes.items()}
    arch = "nomic-bert-moe"
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", arch)
    writer.add_context_length(512)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(inner)
    writer.add_block_count(4)
    writer.add_head_count(4)
    writer.add_layer_norm_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_causal_attention(False)
    writer.add_pooling_type(gguf.PoolingType.MEAN)
    writer.add_expert_count(experts)
    writer.add_expert_used_count(2)
    writer.add_moe_every_n_layers(2)
    for key, value in gguf_files.byte_tokenizer(97).items():
        add = {int: writer.add_uint32, str: writer.add_string}
        add.get(type(value), writer.add_array)(key, value)
    for name, weight in weights.items():
        writer.add_tensor(name, weight.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    tokens = list(range(5, 60))
    expected = functional.normalize(_nomic_moe(weights, tokens, 4).mean(0), dim=0)
    torch.testing.assert_close(vector(open_model_folder(tmp_path / "a.gguf"), tokens), expected, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("arch", ["eurobert", "llama-embed"])
def test_layers_of_llama_with_bidirectional_attention(arch: str, tmp_path: Path) -> None:
    """The converter says of EuroBERT that it is not causal, and nothing of Llama-Embed-Nemotron."""
    biases = {"attention_bias": arch == "llama-embed"}
    folder = encoder(tmp_path / "hf", "eurobert", "mean_tokens", num_key_value_heads=2, vocab_size=97, **biases)
    config = json.loads((folder / "config.json").read_text())
    weights = load_file(folder / "model.safetensors")
    save_file(
        {f"model.{name.removeprefix('model.')}": weight for name, weight in weights.items()},
        folder / "model.safetensors",
    )
    keys = {**gguf_files.byte_tokenizer(97), f"{arch}.pooling_type": 1}
    if arch == "eurobert":
        keys |= {"eurobert.attention.causal": False, "eurobert.rope.scaling.type": "none"}
    gguf_files.write_model(folder, tmp_path / "a.gguf", arch, "F32", config, keys)
    opened, tokens = open_model_folder(tmp_path / "a.gguf"), list(range(5, 60))
    reference = AutoModel.from_pretrained(folder, dtype=torch.float32)(torch.tensor([tokens]))
    expected = functional.normalize(reference.last_hidden_state[0].mean(0), dim=0)
    torch.testing.assert_close(vector(opened, tokens), expected.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("pooling", [None, "mean", "cls"])
def test_a_reranker_has_the_scores_of_its_folder(pooling: str | None, tmp_path: Path) -> None:
    if pooling is None:
        folder, arch = cross_encoder(tmp_path / "hf", "xlm-roberta", type_vocab_size=1), "bert"
        keys = word_pieces()
    else:
        folder, arch = cross_encoder(tmp_path / "hf", "modernbert", classifier_pooling=pooling), "modern-bert"
        keys = word_pieces(**({"modern-bert.classifier.pooling_type": 2} if pooling == "cls" else {}))
    original = LoadedModel.load(open_model_folder(folder), CPU)
    path = write(folder, tmp_path / "a.gguf", arch, 4, keys)
    opened = LoadedModel.load(open_model_folder(path), CPU)
    scores = []
    for loaded in (original, opened):
        assert loaded.cross_encoder is not None and loaded.embedder is None
        tokens = loaded.cross_encoder.request(loaded.tokenizer.encode_pair("a cat", TEXT))
        states = encode_texts(loaded.runner.model, [tokens.prompt], loaded.runner.rope(64), [tokens.token_types])
        scores.append(loaded.cross_encoder.score(states[0]))
    assert opened.tokenizer.encode_pair("a", "b") == original.tokenizer.encode_pair("a", "b")
    torch.testing.assert_close(*scores, rtol=1e-6, atol=1e-6)


def test_a_reranker_without_its_pooler_is_refused(tmp_path: Path) -> None:
    """llama.cpp's converter leaves it out, so that the file scores pairs otherwise than its model."""
    folder = cross_encoder(tmp_path / "hf", "bert")
    with pytest.raises(ModelError, match=r"cls.output.weight is a head without cls.weight"):
        open_model_folder(write(folder, tmp_path / "a.gguf", "bert", 4, word_pieces()))


@pytest.mark.parametrize(("model_type", "arch"), [("xlm-roberta", "bert"), ("jina_embeddings_v3", "jina-bert-v3")])
def test_a_unigram_vocabulary(model_type: str, arch: str, tmp_path: Path) -> None:
    """As of BGE-M3: scores decide, and a map of characters comes first; this one has no entry."""
    folder = encoder(tmp_path / "hf", model_type)
    pieces = [("<s>", 0.0), ("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -3.0), ("▁the", -1.0), ("c", -4.0)]
    pieces += [("at", -2.0), ("a", -3.0), ("t", -3.0), ("▁c", -2.5)]
    empty = (4 * 256).to_bytes(4, "little") + bytes(4 * 256)  # a trie whose letters all differ from the text's
    keys = {
        "tokenizer.ggml.model": "t5",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": [text for text, _ in pieces],
        "tokenizer.ggml.scores": [score for _, score in pieces],
        "tokenizer.ggml.token_type": [3, 3, 3, 2] + [NORMAL] * (len(pieces) - 4),
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 3,
        "tokenizer.ggml.precompiled_charsmap": empty,
        "tokenizer.ggml.remove_extra_whitespaces": True,
    }
    tokenizer = open_model_folder(write(folder, tmp_path / "a.gguf", arch, 2, keys)).tokenizer()
    assert tokenizer.encode("the  cat ж", add_special=True) == [0, 5, 10, 7, 4, 3, 2]
    assert tokenizer.decode([0, 5, 10, 7, 2]) == "the cat"
    assert tokenizer.encode_pair("the", "cat") == TextPair((0, 5, 2, 2, 10, 7, 2), ())
    del keys["tokenizer.ggml.unknown_token_id"]  # then it is the token of this type
    found = open_model_folder(write(folder, tmp_path / "typed.gguf", arch, 2, keys)).tokenizer()
    assert found.encode("the  cat ж", add_special=True) == [0, 5, 10, 7, 4, 3, 2]


def test_a_byte_level_vocabulary_of_roberta(tmp_path: Path) -> None:
    """The reference is the tokenizer of transformers with the same vocabulary: two tokens stand between the texts."""
    folder = encoder(tmp_path / "hf", "roberta")
    letters = ["<s>", "<pad>", "</s>", "<unk>", "a", "b", "c", "Ġ", "ab", "Ġc"]
    merges = [("a", "b"), ("Ġ", "c")]
    keys = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "roberta-bpe",
        "tokenizer.ggml.tokens": letters,
        "tokenizer.ggml.merges": [" ".join(merge) for merge in merges],
        "tokenizer.ggml.token_type": [CONTROL] * 4 + [NORMAL] * (len(letters) - 4),
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 2,
    }
    tokenizer = open_model_folder(write(folder, tmp_path / "a.gguf", "bert", 1, keys)).tokenizer()
    reference = RobertaTokenizerFast(vocab={text: index for index, text in enumerate(letters)}, merges=merges)
    assert tokenizer.encode("ab c", add_special=True) == reference("ab c")["input_ids"] == [0, 8, 9, 2]
    pair = reference("ab", "c")["input_ids"]
    assert tokenizer.encode_pair("ab", "c") == TextPair(tuple(pair), ()) and pair.count(2) == 3


def test_a_vocabulary_with_capitals_is_cased(tmp_path: Path) -> None:
    folder = encoder(tmp_path / "hf")
    tokens = word_pieces()["tokenizer.ggml.tokens"]
    keys = word_pieces(**{"tokenizer.ggml.tokens": [*tokens[:-1], "T"]})
    tokenizer = open_model_folder(write(folder, tmp_path / "a.gguf", "bert", 2, keys)).tokenizer()
    assert tokenizer.encode("aT", add_special=False) == [WORD_PIECES.index("a"), len(tokens) - 1]


def test_files_without_tokens_around_a_text_are_refused(tmp_path: Path) -> None:
    folder = encoder(tmp_path / "hf")
    keys = {key: value for key, value in word_pieces().items() if "seperator" not in key}
    keys["tokenizer.ggml.tokens"] = [text.replace("[SEP]", "[END]") for text in keys["tokenizer.ggml.tokens"]]
    with pytest.raises(ModelError, match=r"seperator_token_id is missing, and there is no token \[SEP\]"):
        open_model_folder(write(folder, tmp_path / "a.gguf", "bert", 2, keys)).tokenizer()
