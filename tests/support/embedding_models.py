"""Writes random embedding models with published architectures as sentence-transformers folders.

The folders are written directly, so that tests need no other library to make them.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForSequenceClassification,
    Gemma3TextConfig,
    Gemma3TextModel,
    LlamaConfig,
    LlamaModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3Model,
)

from tests.support.paths import PICO

VOCABULARY = 4096
_SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
PROMPTS = {"query": "Instruct: find it\nQuery: ", "document": ""}


def _write(folder: Path, model: Any, modules: list[tuple[str, str]], pooling: str) -> Path:
    model.to(torch.float32).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(PICO / name, folder)
    types = "sentence_transformers.models."
    listed = [{"idx": 0, "name": "0", "path": "", "type": f"{types}Transformer"}]
    for index, (kind, path) in enumerate(modules, 1):
        listed.append({"idx": index, "name": str(index), "path": path, "type": f"{types}{kind}"})
        (folder / path).mkdir()
    (folder / "modules.json").write_text(json.dumps(listed))
    width = model.config.hidden_size
    config = {"word_embedding_dimension": width, f"pooling_mode_{pooling}": True, "include_prompt": True}
    config |= {
        f"pooling_mode_{other}": False for other in ("cls_token", "mean_tokens", "max_tokens") if other != pooling
    }
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(config))
    (folder / "config_sentence_transformers.json").write_text(
        json.dumps({"prompts": PROMPTS, "default_prompt_name": None, "similarity_fn_name": "cosine"})
    )
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 512, "do_lower_case": False}))
    return folder


def qwen3_embedding(folder: Path, pooling: str = "lasttoken", **shape: Any) -> Path:
    """Write Qwen3-Embedding: causal, last-token pooling, normalized."""
    torch.manual_seed(0)
    model = Qwen3Model(Qwen3Config(**{**_SMALL, **shape}))
    return _write(folder, model, [("Pooling", "1_Pooling"), ("Normalize", "2_Normalize")], pooling)


def embedding_gemma(folder: Path, **shape: Any) -> Path:
    """Write EmbeddingGemma: bidirectional, mean pooling, two dense layers, normalized."""
    torch.manual_seed(1)
    config = {**_SMALL, "sliding_window": 24, "use_bidirectional_attention": True, "query_pre_attn_scalar": 32}
    model = Gemma3TextModel(Gemma3TextConfig(**{**config, **shape}))
    modules = [("Pooling", "1_Pooling"), ("Dense", "2_Dense"), ("Dense", "3_Dense"), ("Normalize", "4_Normalize")]
    _write(folder, model, modules, "mean_tokens")
    width = model.config.hidden_size
    for path, rows, columns in (("2_Dense", 4 * width, width), ("3_Dense", width, 4 * width)):
        weight = torch.randn(rows, columns) * columns**-0.5
        save_file({"linear.weight": weight}, folder / path / "model.safetensors")
        settings = {"in_features": columns, "out_features": rows, "bias": False}
        activation = {"activation_function": "torch.nn.modules.linear.Identity"}
        (folder / path / "config.json").write_text(json.dumps({**settings, **activation}))
    return folder


def llama_bidirectional(folder: Path, **shape: Any) -> Path:
    """Write Llama-Embed-Nemotron as transformers reads it: bidirectional, mean pooling, normalized."""
    torch.manual_seed(3)
    model = LlamaModel(LlamaConfig(**{**_SMALL, "is_causal": False, **shape}))
    return _write(folder, model, [("Pooling", "1_Pooling"), ("Normalize", "2_Normalize")], "mean_tokens")


# Of the words below: each letter, alone and inside a word, and two longer pieces.
_LETTERS = "abcdefghijklmnopqrstuvwxyz.,?!"
WORD_PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *_LETTERS, *(f"##{x}" for x in _LETTERS), "the", "##at"]


def word_piece_tokenizer(folder: Path) -> None:
    """Write the tokenizer of an uncased BERT with a small vocabulary."""
    special = [{"id": index, "content": token, "special": True} for index, token in enumerate(WORD_PIECES[:5])]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    bert = {"clean_text": True, "handle_chinese_chars": True, "strip_accents": None, "lowercase": True}
    ends = {name: {"id": name, "ids": [WORD_PIECES.index(name)], "tokens": [name]} for name in ("[CLS]", "[SEP]")}
    single: list[dict[str, Any]] = [
        {"SpecialToken": {"id": "[CLS]", "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}},
        {"SpecialToken": {"id": "[SEP]", "type_id": 0}},
    ]
    second: list[dict[str, Any]] = [
        {"Sequence": {"id": "B", "type_id": 1}},
        {"SpecialToken": {"id": "[SEP]", "type_id": 1}},
    ]
    pair = [*single, *second]
    tokenizer = {
        "version": "1.0",
        "added_tokens": [{**flags, **token} for token in special],
        "normalizer": {"type": "BertNormalizer", **bert},
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "post_processor": {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": ends},
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
        "model": {
            "type": "WordPiece",
            "unk_token": "[UNK]",
            "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100,
            "vocab": {token: index for index, token in enumerate(WORD_PIECES)},
        },
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    names = {"unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]"}
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "BertTokenizer", **names}))


def _random_encoder(factory: Any, model_type: str, shape: dict[str, Any]) -> Any:
    small = {key: value for key, value in _SMALL.items() if key not in ("num_key_value_heads", "head_dim")}
    small |= {"max_position_embeddings": 514, "pad_token_id": 1, "bos_token_id": None, "eos_token_id": None}
    model = factory.from_config(AutoConfig.for_model(model_type, **{**small, **shape}))
    with torch.no_grad():
        for parameter in model.parameters():  # biases and gains are 0 and 1 at first
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model


def encoder(folder: Path, model_type: str = "bert", pooling: str = "cls_token", **shape: Any) -> Path:
    """Write an encoder as BGE: bidirectional, first-token pooling, normalized."""
    torch.manual_seed(4)
    model = _random_encoder(AutoModel, model_type, shape)
    _write(folder, model, [("Pooling", "1_Pooling"), ("Normalize", "2_Normalize")], pooling)
    word_piece_tokenizer(folder)
    return folder


def cross_encoder(folder: Path, model_type: str = "bert", **shape: Any) -> Path:
    """Write a reranker with a classification head as MiniLM of MS MARCO or, as "xlm-roberta", BGE."""
    torch.manual_seed(5)
    model = _random_encoder(AutoModelForSequenceClassification, model_type, {"num_labels": 1, **shape})
    model.to(torch.float32).save_pretrained(folder)
    word_piece_tokenizer(folder)
    return folder


def qwen3_reranker(folder: Path, **shape: Any) -> Path:
    """Write Qwen3-Reranker: a causal model that answers yes or no, with the modules of a CrossEncoder."""
    torch.manual_seed(2)
    model = Qwen3ForCausalLM(Qwen3Config(**{**_SMALL, **shape, "tie_word_embeddings": True}))
    model.to(torch.float32).save_pretrained(folder)
    shutil.copy(PICO / "tokenizer_config.json", folder)
    tokenizer = json.loads((PICO / "tokenizer.json").read_text())
    # Both answers must be one token: the last one of the vocabulary becomes "yes".
    vocabulary, merges = tokenizer["model"]["vocab"], tokenizer["model"]["merges"]
    last = max(vocabulary, key=vocabulary.get)
    vocabulary["yes"] = vocabulary.pop(last)
    merges[:] = [merge for merge in merges if "".join(merge) != last] + [["y", "es"]]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    types = "sentence_transformers."
    kinds = (
        ("base.modules.transformer.Transformer", ""),
        ("cross_encoder.modules.logit_score.LogitScore", "1_LogitScore"),
    )
    (folder / "modules.json").write_text(json.dumps([{"type": types + kind, "path": path} for kind, path in kinds]))
    (folder / "1_LogitScore").mkdir()
    answers = {"true_token_id": vocabulary["yes"], "false_token_id": vocabulary["no"]}
    (folder / "1_LogitScore" / "config.json").write_text(json.dumps(answers))
    return folder
