"""Reads the config.json fields that families share and refuses those that would change the result and are not done.

Keys about training or the software that wrote the file are ignored.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Any

from mycli.runtime.errors import ModelError
from mycli.runtime.models.config import MAX_LAYERS
from mycli.runtime.models.hf_rope import UNSUPPORTED_HINT, has_rope, read_rope, scaled_context
from mycli.runtime.models.part_spec import ActivationName
from mycli.runtime.utils.dtypes import float_dtype
from mycli.runtime.utils.json_fields import Fields

# Keys that change the result, with the values that do not.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attn_logit_softcapping": (),
    "final_logit_softcapping": (),
    "partial_rotary_factor": (1, 1.0),
    "rotary_pct": (1, 1.0),
    "logit_scale": (1, 1.0),
    "embedding_multiplier": (1, 1.0),
    "residual_multiplier": (1, 1.0),
    "attention_multiplier": (),
    "logits_scaling": (1, 1.0),
    "num_experts": (0, 1),
    "num_local_experts": (0, 1),
    "no_rope_layers": ([],),
    "alibi": (False,),
    "is_decoder": (True, False),
    "add_cross_attention": (False,),
    "parallel_attn": (False,),
    "attention_chunk_size": (),
    "use_bidirectional_attention": (False, "vision"),
    "is_causal": (True,),
}
ACTIVATIONS: dict[str, ActivationName] = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
SILU: dict[str, ActivationName] = {"silu": "silu", "swish": "silu"}  # where it is also that of a convolution
# Of MLPs without a gate; the first is the default.
UNGATED_GELU: dict[str, ActivationName] = {"gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh", "relu2": "relu2"}
UNGATED_RELU: dict[str, ActivationName] = {"relu2": "relu2", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh"}


def with_defaults(raw: Fields, **defaults: Any) -> Fields:
    """Return `raw` with the family's defaults for keys that are absent; an explicit null stays."""
    return Fields({**defaults, **raw.values}, raw.source)


def with_epsilon(raw: Fields, key: str, default: float = 1e-5) -> Fields:
    """Return `raw` with the epsilon of norms, `key` in the family's files, as `rms_norm_eps`.

    Raises ModelError if the file has both and they differ.
    """
    common = raw.number("rms_norm_eps", default, low=1e-30, high=1.0)
    epsilon = raw.number(key, common, low=1e-30, high=1.0)
    return renamed(Fields({**raw.values, key: epsilon}, raw.source), {key: "rms_norm_eps"})


def with_default_rope(raw: Fields, rope: Mapping[str, Any]) -> Fields:
    """Return `raw` with `rope` as `rope_parameters` where the config has no rope section."""
    return raw if has_rope(raw) else Fields({**raw.values, "rope_parameters": rope}, raw.source)


def renamed(raw: Fields, names: Mapping[str, str]) -> Fields:
    """Return `raw` with the keys of `names` under their new names. Raises ModelError if two names of one key differ."""
    values: dict[str, Any] = {}
    for key, value in raw.values.items():
        name = names.get(key, key)
        if values.setdefault(name, value) != value:
            raise raw.fail(key, f"= {value!r:.40} differs from {values[name]!r:.40}, under another name", "keep one")
    return Fields(values, raw.source)


def refuse_unsupported(raw: Fields, handled: Collection[str] = ()) -> None:
    """Raise ModelError for the first key of `NEUTRAL` that is not `handled` and has another value than listed there."""
    for key, neutral in NEUTRAL.items():
        if key not in handled and raw.has(key) and raw.values[key] not in neutral:
            raise raw.fail(key, f"= {raw.values[key]!r:.60} is not supported", UNSUPPORTED_HINT)


def require(raw: Fields, **values: Any) -> None:
    """Raise ModelError for the first key whose value is present and differs: the family implements one value only."""
    for key, value in values.items():
        if raw.has(key) and raw.values[key] != value:
            raise raw.fail(key, f"= {raw.values[key]!r:.40} is not supported, only {value!r}", UNSUPPORTED_HINT)


def reranker_class(raw: Fields) -> str | None:
    """Return the class of a classifier with one label, which scores pairs of texts; None for other models.

    Raises ModelError for a classifier with more labels.
    """
    classes = [name for name in raw.array("architectures", str, 16) if name.endswith("ForSequenceClassification")]
    if not classes:
        return None
    names = raw.object("id2label").values
    labels = raw.integer("num_labels", len(names) or 2)  # transformers counts two where neither key is there
    if labels != 1:
        message = f"{classes[0]!r:.60} has {labels} labels: only rerankers, with one label, are supported"
        raise raw.fail("architectures", message, UNSUPPORTED_HINT)
    return classes[0]


def require_untied_head(fields: Mapping[str, Any]) -> None:
    """Raise ModelError if a family whose head has a bias ties it to the embedding."""
    if fields["tie_embeddings"]:
        message = "config.json: tie_word_embeddings = true is not supported: the head has a bias"
        raise ModelError(message, UNSUPPORTED_HINT)


def attention_biases(raw: Fields, default: bool = False) -> dict[str, Any]:
    """Return the ModelConfig fields for families in which `attention_bias` gives q, k, v and o a bias."""
    bias = raw.boolean("attention_bias", default)
    return {"qkv_bias": bias, "output_bias": bias}


def _activation(raw: Fields, known: Mapping[str, ActivationName]) -> ActivationName:
    key = "hidden_activation" if raw.has("hidden_activation") else "hidden_act"
    name = raw.text(key, next(iter(known)))
    if name not in known:
        raise raw.fail(key, f"{name!r} is not supported ({', '.join(known)})", UNSUPPORTED_HINT)
    return known[name]


def token_ids(raw: Fields, key: str, vocab_size: int) -> tuple[int, ...]:
    """Return the token ids of `key`, one integer or a list of at most 100, each below `vocab_size`."""
    value = raw.values.get(key)
    ids = [] if value is None else raw.array(key, int, 100) if isinstance(value, list) else [raw.integer(key, low=0)]
    for token in ids:
        if not 0 <= token < vocab_size:
            raise raw.fail(key, f"{token} is not below vocab_size {vocab_size}")
    return tuple(dict.fromkeys(ids))


def common(
    raw: Fields,
    handled: Collection[str] = (),
    activations: Mapping[str, ActivationName] = ACTIVATIONS,
) -> dict[str, Any]:
    """Return the ModelConfig fields that all families read the same way.

    handled: keys of `NEUTRAL` that the family reads itself. activations: those that the family's MLP may have, the
    default first. head_dim is hidden_size / num_attention_heads where it is absent or null.
    """
    refuse_unsupported(raw, handled)
    hidden, heads = raw.integer("hidden_size"), raw.integer("num_attention_heads", high=1 << 16)
    if not raw.has("head_dim") and hidden % heads:
        raise raw.fail("hidden_size", f"{hidden} is not a multiple of num_attention_heads {heads}")
    dtype_name = raw.text("dtype", raw.text("torch_dtype", "bfloat16"))
    dtype = float_dtype(dtype_name)
    if dtype is None:
        raise raw.fail("dtype", f"{dtype_name!r} is not supported", "supported: bfloat16, float16, float32")
    vocab = raw.integer("vocab_size")
    bos = token_ids(raw, "bos_token_id", vocab)
    theta, scaling = read_rope(raw, handled)
    # Whether null means the family's default or false depends on the reader; transformers refuses it for text models.
    if raw.values.get("tie_word_embeddings", False) is None:
        raise raw.fail("tie_word_embeddings", "must be true or false, not null")
    return {
        "model_type": raw.text("model_type"),
        "hidden_size": hidden,
        "layers": raw.integer("num_hidden_layers", high=MAX_LAYERS),
        "heads": heads,
        "kv_heads": raw.integer("num_key_value_heads", heads, high=1 << 16),
        "head_dim": raw.integer("head_dim", max(hidden // heads, 1), high=1 << 16),
        "intermediate_size": raw.integer("intermediate_size"),
        "vocab_size": vocab,
        "max_context": scaled_context(raw, scaling),
        "rms_norm_eps": raw.number("rms_norm_eps", 1e-6, low=1e-30, high=1.0),
        "rope_theta": theta,
        "rope_scaling": scaling,
        "tie_embeddings": raw.boolean("tie_word_embeddings", False),
        "dtype": dtype,
        "eos": token_ids(raw, "eos_token_id", vocab),
        "bos": bos[0] if bos else None,
        "activation": _activation(raw, activations),
    }


def layers_of_type(
    raw: Fields, layers: int, default: Callable[[int], bool] | None = None, layer_type: str = "sliding_attention"
) -> tuple[bool, ...]:
    """Return which layers `layer_types` says are of `layer_type`, the others having full attention.

    Without `layer_types`, `default(index)` decides; without either, no layer is.
    """
    types = raw.array("layer_types", str, MAX_LAYERS)
    if not types:
        return tuple(default(index) if default else False for index in range(layers))
    if len(types) != layers:
        raise raw.fail("layer_types", f"has {len(types)} entries for {layers} layers")
    for name in types:
        if name not in ("full_attention", layer_type):
            raise raw.fail("layer_types", f"{name!r:.40} is not supported", UNSUPPORTED_HINT)
    return tuple(name == layer_type for name in types)


def all_but_every(period: int) -> Callable[[int], bool]:
    """Return a default for `layers_of_type`: all layers except each `period`-th."""
    return lambda index: (index + 1) % period != 0


def layer_windows(raw: Fields, sliding: Collection[bool]) -> tuple[int | None, ...]:
    """Return the sliding window of each layer, for `ModelConfig.windows`; `sliding` says which layers have one."""
    return _windows(raw, sliding, raw.integer("sliding_window") if any(sliding) and raw.has("sliding_window") else None)


def uniform_windows(raw: Fields, layers: int, window: int | None) -> tuple[int | None, ...]:
    """Return `window` for the sliding layers of `layer_types`, or for all layers where that key is absent."""
    sliding = layers_of_type(raw, layers) if raw.has("layer_types") else (window is not None,) * layers
    return _windows(raw, sliding, window)


def _windows(raw: Fields, sliding: Collection[bool], window: int | None) -> tuple[int | None, ...]:
    if not any(sliding):
        return ()
    if window is None:
        raise raw.fail("layer_types", "has sliding_attention, but sliding_window is missing")
    return tuple(window if slides else None for slides in sliding)


def optional_window(raw: Fields, default: int) -> int | None:
    """Return `sliding_window`: `default` if it is absent, None if it is null."""
    raw = with_defaults(raw, sliding_window=default)
    return raw.integer("sliding_window") if raw.has("sliding_window") else None


def mistral_windows(raw: Fields, fields: dict[str, Any]) -> tuple[int | None, ...]:
    """Return `uniform_windows` of `sliding_window`; a window at least as long as the context counts as none."""
    window = raw.integer("sliding_window") if raw.has("sliding_window") else None
    if window is not None and window >= fields["max_context"]:
        window = None
    return uniform_windows(raw, fields["layers"], window)
