"""What the families share: reading the common fields of config.json, and refusing by name what is not implemented.

Knows the keys that change the arithmetic of a decoder. Keys that only describe training or the writer's software are
ignored; a key that would change the result and is not implemented is an error, never a silent difference.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Any

from mycli.runtime.models.config import MAX_LAYERS
from mycli.runtime.models.hf_rope import UNSUPPORTED_HINT, read_rope, trained_context
from mycli.runtime.models.part_spec import ActivationName
from mycli.runtime.utils.dtypes import float_dtype
from mycli.runtime.utils.json_fields import Fields

# Each would change what is computed. The value beside a key is the one that changes nothing.
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
}
ACTIVATIONS: dict[str, ActivationName] = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}


def with_defaults(raw: Fields, **defaults: Any) -> Fields:
    """`raw` with what the family's configs leave out; a null that is written stands."""
    return Fields({**defaults, **raw.values}, raw.source)


def refuse_unsupported(raw: Fields, handled: Collection[str] = ()) -> None:
    """Raise ModelError for the first key of `NEUTRAL` whose value is not neutral and that is not `handled`."""
    for key, neutral in NEUTRAL.items():
        if key not in handled and raw.has(key) and raw.values[key] not in neutral:
            raise raw.fail(key, f"= {raw.values[key]!r:.60} is not supported", UNSUPPORTED_HINT)


def _activation(raw: Fields, known: Mapping[str, ActivationName]) -> ActivationName:
    key = "hidden_activation" if raw.has("hidden_activation") else "hidden_act"
    name = raw.text(key, next(iter(known)))
    if name not in known:
        raise raw.fail(key, f"{name!r} is not supported ({', '.join(known)})", UNSUPPORTED_HINT)
    return known[name]


def token_ids(raw: Fields, key: str, vocab_size: int) -> tuple[int, ...]:
    """Token ids of `key`, one integer or a list of at most 100; each must be below `vocab_size`."""
    value = raw.values.get(key)
    ids = [] if value is None else raw.array(key, int, 100) if isinstance(value, list) else [raw.integer(key, low=0)]
    for token in ids:
        if not 0 <= token < vocab_size:
            raise raw.fail(key, f"{token} is not below vocab_size {vocab_size}")
    return tuple(dict.fromkeys(ids))


def common(
    raw: Fields,
    head_dim: int | None = None,
    handled: Collection[str] = (),
    activations: Mapping[str, ActivationName] = ACTIVATIONS,
) -> dict[str, Any]:
    """The ModelConfig fields that every family reads the same way; a family adds or replaces what is its own.

    `head_dim` is the family's where config.json gives none; None for hidden_size / num_attention_heads. `handled`: the
    keys of `NEUTRAL` that the family reads itself. `activations`: those that its MLP may have, the usual one first.
    """
    refuse_unsupported(raw, handled)
    hidden, heads = raw.integer("hidden_size"), raw.integer("num_attention_heads", high=1 << 16)
    if head_dim is None:
        if not raw.has("head_dim") and hidden % heads:
            raise raw.fail("hidden_size", f"{hidden} is not a multiple of num_attention_heads {heads}")
        head_dim = max(hidden // heads, 1)
    spelled = raw.text("dtype", raw.text("torch_dtype", "bfloat16"))
    dtype = float_dtype(spelled)
    if dtype is None:
        raise raw.fail("dtype", f"{spelled!r} is not supported", "supported: bfloat16, float16, float32")
    vocab = raw.integer("vocab_size")
    bos = token_ids(raw, "bos_token_id", vocab)
    theta, scaling = read_rope(raw, handled)
    return {
        "model_type": raw.text("model_type"),
        "hidden_size": hidden,
        "layers": raw.integer("num_hidden_layers", high=MAX_LAYERS),
        "heads": heads,
        "kv_heads": raw.integer("num_key_value_heads", heads, high=1 << 16),
        "head_dim": raw.integer("head_dim", head_dim, high=1 << 16),
        "intermediate_size": raw.integer("intermediate_size"),
        "vocab_size": vocab,
        "max_context": trained_context(raw),
        "rms_norm_eps": raw.number("rms_norm_eps", 1e-6, low=1e-30, high=1.0),
        "rope_theta": theta,
        "rope_scaling": scaling,
        "tie_embeddings": raw.boolean("tie_word_embeddings", False),
        "dtype": dtype,
        "eos": token_ids(raw, "eos_token_id", vocab),
        "bos": bos[0] if bos else None,
        "activation": _activation(raw, activations),
    }


def sliding_layers(raw: Fields, layers: int, usual: Callable[[int], bool] | None = None) -> tuple[bool, ...]:
    """Which layers attend to a window only, by `layer_types`; by `usual` where the key is absent, else none."""
    return layers_of_kind(raw, layers, "sliding_attention", usual)


def layers_of_kind(
    raw: Fields, layers: int, kind_asked: str, usual: Callable[[int], bool] | None = None
) -> tuple[bool, ...]:
    """Which layers are of the kind, the others having full attention; as `sliding_layers`."""
    kinds = raw.array("layer_types", str, MAX_LAYERS)
    if not kinds:
        return tuple(usual(index) if usual else False for index in range(layers))
    if len(kinds) != layers:
        raise raw.fail("layer_types", f"has {len(kinds)} entries for {layers} layers")
    for kind in kinds:
        if kind not in ("full_attention", kind_asked):
            raise raw.fail("layer_types", f"{kind!r:.40} is not supported", UNSUPPORTED_HINT)
    return tuple(kind == kind_asked for kind in kinds)


def windows_of(raw: Fields, sliding: Collection[bool]) -> tuple[int | None, ...]:
    """`sliding_window` for the layers that slide. Raises ModelError where there are some and it is not given."""
    if not any(sliding):
        return ()
    if not raw.has("sliding_window"):
        raise raw.fail("layer_types", "asks for sliding_attention without sliding_window")
    window = raw.integer("sliding_window")
    return tuple(window if slides else None for slides in sliding)


def every(period: int) -> Callable[[int], bool]:
    """All layers but each `period`-th slide."""
    return lambda index: (index + 1) % period != 0


def layer_windows(raw: Fields, layers: int, window: int | None) -> tuple[int | None, ...]:
    """The sliding window of each layer from `layer_types`; the same for all where the key is absent."""
    if not raw.has("layer_types"):
        return (window,) * layers if window else ()
    sliding = sliding_layers(raw, layers)
    if any(sliding) and window is None:
        raise raw.fail("layer_types", "asks for sliding_attention without sliding_window")
    return tuple(window if slides else None for slides in sliding) if any(sliding) else ()


def sliding_windows(raw: Fields, fields: dict[str, Any]) -> tuple[int | None, ...]:
    """`layer_windows` by `sliding_window`, if there is one: a window as long as the context is none."""
    window = raw.integer("sliding_window") if raw.has("sliding_window") else None
    if window is not None and window >= fields["max_context"]:
        window = None
    return layer_windows(raw, fields["layers"], window)
