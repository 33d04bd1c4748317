"""Reads the settings of sentence-transformers in a folder: pooling, dense layers, prompts, activation of a reranker.

Imports no torch.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from mycli.runtime.checkpoint.safetensors_header import TensorEntry
from mycli.runtime.errors import ModelError
from mycli.runtime.utils.json_fields import Fields, read_bytes, read_object, strict_json

MODULES = "modules.json"
_SETTINGS = "config_sentence_transformers.json"
# In the order in which sentence-transformers looks for them; older versions named the file after the model's class.
TEXT_SETTINGS = tuple(
    f"sentence_{name}_config.json"
    for name in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
SETTINGS_FILES = (MODULES, _SETTINGS, *TEXT_SETTINGS)
# Files of the modules after the first, in folders as sentence-transformers names them: 1_Pooling, 2_Dense.
MODULE_FILE = re.compile(r"\d+_\w+/(?:config\.json|model\.safetensors)", re.ASCII)
_MAX_BYTES = 1 << 20
PoolingMode = Literal["last", "cls", "mean", "max", "mean_sqrt_len", "weighted_mean"]
# By the keys of older versions of 1_Pooling/config.json, in the order in which sentence-transformers joins the vectors.
_MODES: Mapping[str, PoolingMode] = {
    "cls_token": "cls",
    "max_tokens": "max",
    "mean_tokens": "mean",
    "mean_sqrt_len_tokens": "mean_sqrt_len",
    "weightedmean_tokens": "weighted_mean",
    "lasttoken": "last",
}
VectorActivation = Literal["Identity", "Tanh", "ReLU", "GELU", "Sigmoid"]


@dataclass(frozen=True)
class DenseSpec:
    """A linear layer on the pooled vector, with its weights in `path`, which may be a GGUF file that holds `tensor`."""

    path: Path
    in_features: int
    out_features: int
    bias: bool
    activation: VectorActivation
    tensor: TensorEntry | None = None


@dataclass(frozen=True)
class EmbeddingSpec:
    """Describes how the vector of a text is computed from its hidden states.

    pooling: modes whose vectors are joined; dense, normalize: applied after it, in this order; prompts: texts before
    an input, by name; default_prompt: the prompt of inputs that name none; None for no prompt; max_tokens: of a text,
    None for as many as the context holds.
    """

    pooling: tuple[PoolingMode, ...]
    dense: tuple[DenseSpec, ...] = ()
    normalize: bool = False
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    max_tokens: int | None = None

    @property
    def needs_all(self) -> bool:
        """Whether the hidden states of all tokens are needed, not only of the last."""
        return self.pooling != ("last",)

    def longest(self, context: int) -> int:
        """Return the number of tokens of the longest text."""
        return context if self.max_tokens is None else min(self.max_tokens, context)

    def size(self, hidden_size: int) -> int:
        """Return the number of values of a vector."""
        return self.dense[-1].out_features if self.dense else hidden_size * len(self.pooling)


@dataclass(frozen=True)
class CrossEncoderSpec:
    """Describes how a reranker with a classification head scores a pair of texts.

    activation: applied to the output of the head; prompt: text before the first text; max_tokens: of a pair, None for
    as many as the context holds.
    """

    activation: VectorActivation = "Sigmoid"
    prompt: str = ""
    max_tokens: int | None = None


@dataclass(frozen=True)
class ScoreSpec:
    """The tokens whose logits are the score of a reranker: of `true` without those of `false`, if there is one."""

    true: int
    false: int | None


def lowers_texts(folder: Path) -> bool:
    """Return whether texts are put in lower case before the tokenizer reads them. Raises ModelError."""
    return _text_settings(folder).boolean("do_lower_case", False)


def read_score_spec(folder: Path) -> ScoreSpec | None:
    """Return the LogitScore module of a reranker, a CrossEncoder; None for other folders. Raises ModelError."""
    path = folder / MODULES
    entries = _entries(path) if path.is_file() else []
    if [_kind(entry) for entry in entries] != ["Transformer", "LogitScore"]:
        return None
    raw = read_object(folder / _folder_name(entries[1], path) / "config.json")
    false = raw.integer("false_token_id", low=0) if raw.has("false_token_id") else None
    return ScoreSpec(raw.integer("true_token_id", low=0), false)


def read_cross_encoder_spec(folder: Path, config: Fields, settings: Fields) -> CrossEncoderSpec:
    """Return how a reranker scores pairs, from its config.json and tokenizer_config.json too. Raises ModelError."""
    path = folder / MODULES
    kinds = [_kind(entry) for entry in _entries(path)] if path.is_file() else ["Transformer"]
    if kinds != ["Transformer"]:
        raise ModelError(f"{path}: modules {', '.join(kinds)!r:.80} are not supported after a classification head")
    path = folder / _SETTINGS
    saved = read_object(path) if path.is_file() else Fields({}, str(path))
    prompts, default = _prompts(path)
    # Where newer versions of the library keep it, then where older ones did. ms-marco-MiniLM is without a sigmoid.
    for fields, key in (
        (saved, "activation_fn"),
        (config.object("sentence_transformers"), "activation_fn"),
        (config, "sbert_ce_default_activation_function"),
    ):
        # By default the library runs no code of a model, and takes the sigmoid for other names.
        if (name := fields.text(key, "")).startswith("torch."):
            activation: Any = name.rpartition(".")[2]
            if activation not in get_args(VectorActivation):
                raise fields.fail(key, f"= {name!r:.60} is not supported")
            break
    else:
        activation = "Sigmoid"
    longest = _max_tokens(_text_settings(folder))
    if longest is None:
        most = settings.values.get("model_max_length")  # 1e30 where there is no limit
        longest = most if type(most) is int and 0 < most < 1 << 31 else None
    return CrossEncoderSpec(activation, "" if default is None else prompts[default], longest)


def read_embedding_spec(folder: Path, hidden_size: int) -> EmbeddingSpec | None:
    """Return the modules of an embedding model; None for a reranker and for another folder. Raises ModelError."""
    path = folder / MODULES
    if not path.is_file() or read_score_spec(folder) is not None:
        return None
    pooling: tuple[PoolingMode, ...] = ()
    dense: list[DenseSpec] = []
    normalize = False
    kinds = [(_kind(entry), entry) for entry in _entries(path)]
    # Only this order of modules. One that is skipped would change every vector without a message, so others are
    # refused.
    for position, (kind, entry) in enumerate(kinds):
        if kind == "Transformer" and position == 0:
            continue
        if kind == "Pooling" and position == 1:
            pooling = _pooling(folder / _folder_name(entry, path), hidden_size)
        elif kind == "Dense" and pooling and not normalize:
            width = dense[-1].out_features if dense else hidden_size * len(pooling)
            dense.append(_dense(folder / _folder_name(entry, path), width))
        elif kind == "Normalize" and pooling and position == len(kinds) - 1:
            normalize = True
        else:
            raise ModelError(f"{path}: module {kind!r:.60} is not supported in place {position}")
    if not pooling:
        raise ModelError(f"{path}: has no Pooling module")
    longest = _max_tokens(_text_settings(folder))
    prompts, default = _prompts(folder / _SETTINGS)
    return EmbeddingSpec(pooling, tuple(dense), normalize, prompts, default, longest)


def _entries(path: Path) -> list[Fields]:
    try:
        value = strict_json(read_bytes(path, _MAX_BYTES))
    except ValueError as error:
        raise ModelError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value) or len(value) > 16:
        raise ModelError(f"{path}: must be a list of at most 16 modules")
    return [Fields(entry, str(path)) for entry in value]


def _kind(entry: Fields) -> str:
    # Only the name of the class counts: its Python module differs between versions. It is never imported.
    return entry.text("type").rpartition(".")[2]


def _folder_name(entry: Fields, path: Path) -> str:
    # The path comes from the model: one name, so that it cannot lead out of the folder.
    name = entry.text("path", "")
    if not name or name != Path(name).name or name.startswith("."):
        raise ModelError(f"{path}: path {name!r:.60} is not a folder of the model")
    return name


def _pooling(folder: Path, hidden_size: int) -> tuple[PoolingMode, ...]:
    raw = read_object(folder / "config.json")
    width = raw.integer("word_embedding_dimension", raw.integer("embedding_dimension", hidden_size))
    if width != hidden_size:
        raise raw.fail("word_embedding_dimension", f"is {width}, but hidden_size is {hidden_size}")
    # Without it, the tokens of the prompt are left out of the mean.
    if not raw.boolean("include_prompt", True):
        raise raw.fail("include_prompt", "= false is not supported")
    if raw.has("pooling_mode"):
        names = raw.values["pooling_mode"]
        names = [names] if isinstance(names, str) else names
        known: dict[str, PoolingMode] = {
            "mean_sqrt_len_tokens": "mean_sqrt_len",
            "weightedmean": "weighted_mean",
            "lasttoken": "last",
        }
        modes = tuple(known.get(name, name) for name in names) if isinstance(names, list) else ()
        if not modes or not all(mode in get_args(PoolingMode) for mode in modes):
            raise raw.fail("pooling_mode", f"= {names!r:.60} is not supported")
        return modes
    modes = tuple(mode for key, mode in _MODES.items() if raw.boolean(f"pooling_mode_{key}", False))
    if not modes:
        raise raw.fail("pooling_mode_mean_tokens", "no pooling mode is set")
    return modes


def _dense(folder: Path, width: int) -> DenseSpec:
    raw = read_object(folder / "config.json")
    if raw.integer("in_features") != width:
        raise raw.fail("in_features", f"is {raw.integer('in_features')}, but the vector before it has {width} values")
    activation: Any = raw.text("activation_function", "torch.nn.modules.activation.Tanh").rpartition(".")[2]
    if activation not in get_args(VectorActivation):
        raise raw.fail("activation_function", f"= {activation!r:.60} is not supported")
    if raw.boolean("use_residual", False):
        raise raw.fail("use_residual", "= true is not supported")
    for key in ("module_input_name", "module_output_name"):
        if raw.text(key, "sentence_embedding") != "sentence_embedding":
            raise raw.fail(key, f"= {raw.text(key)!r:.60} is not supported")
    path = folder / "model.safetensors"
    return DenseSpec(path, width, raw.integer("out_features", high=1 << 20), raw.boolean("bias", True), activation)


def _text_settings(folder: Path) -> Fields:
    path = next((path for name in TEXT_SETTINGS if (path := folder / name).is_file()), None)
    return Fields({}, str(folder / TEXT_SETTINGS[0])) if path is None else read_object(path)


def _max_tokens(raw: Fields) -> int | None:
    # With it the library renders every text by the chat template, as for Qwen3-VL-Embedding.
    if "message" in raw.object("modality_config").values:
        raise raw.fail("modality_config", "has 'message': texts within a chat template are not supported")
    # E5-Mistral embeds 4,096 tokens of its 32,768. The library cuts longer texts without a word.
    return raw.integer("max_seq_length") if raw.has("max_seq_length") else None


def _prompts(path: Path) -> tuple[dict[str, str], str | None]:
    if not path.is_file():
        return {}, None
    raw = read_object(path)
    prompts = raw.values.get("prompts") or {}
    if not isinstance(prompts, dict) or not all(isinstance(text, str) for text in prompts.values()):
        raise raw.fail("prompts", "must be an object of texts")
    default = raw.values.get("default_prompt_name")
    if default is not None and default not in prompts:
        raise raw.fail("default_prompt_name", f"= {default!r:.60} is not one of the prompts")
    return prompts, default
