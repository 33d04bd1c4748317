"""ERNIE 4.5 with experts (21B-A3B, 300B-A47B, VL 28B-A3B): softmax-routed, with a correction bias."""

from dataclasses import replace

from mycli.runtime.models import hf_config
from mycli.runtime.models.config import ModelConfig, llama_layer
from mycli.runtime.models.experts import EXPERT_KEYS, ExpertNames, MoeLayers, read_dense_layers, read_expert_counts
from mycli.runtime.models.experts_spec import RoutingSpec
from mycli.runtime.models.hf_rope import UNSUPPORTED_HINT
from mycli.runtime.models.layer_spec import LayerSpec
from mycli.runtime.utils.json_fields import Fields

_NAMES = ExpertNames(
    shared="shared_experts",
    shared_gate=None,
    correction_bias="moe_statics.e_score_correction_bias",
    correction_rows=(1,),
)


def layer(config: ModelConfig, index: int) -> LayerSpec:
    # Checkpoints may contain an MTP head, which is not used.
    return replace(llama_layer(config, index), ignored_prefixes=("model.mtp_",))


def _dense(raw: Fields, layers: int) -> frozenset[int]:
    """Return the layers that have an MLP: all but every `moe_layer_interval`-th from start to end index."""
    if raw.has("mlp_layer_types"):  # in ERNIE 4.5 VL they are listed
        return read_dense_layers(raw, layers)
    first, interval = raw.integer("moe_layer_start_index", 1, low=0), raw.integer("moe_layer_interval", 1)
    last = raw.integer("moe_layer_end_index", -1, low=-1)
    last = layers - 1 if last == -1 else last
    return frozenset(index for index in range(layers) if not first <= index <= last or (index + 1) % interval)


def read(raw: Fields) -> ModelConfig:
    raw = hf_config.with_defaults(
        raw, num_key_value_heads=4, rope_theta=500000.0, rms_norm_eps=1e-5, tie_word_embeddings=True
    )
    if raw.boolean("use_bias", False):
        raise raw.fail("use_bias", "= true is not supported: the head would have a bias", UNSUPPORTED_HINT)
    fields = hf_config.common(raw, handled=EXPERT_KEYS)
    count, top_k = read_expert_counts(raw, "moe_num_experts", fields["layers"], default=(64, 6), top_k_key="moe_k")
    size = raw.integer("moe_intermediate_size", 1536)
    mixture = MoeLayers(
        count,
        RoutingSpec(top_k, normalize=True, epsilon=raw.number("moe_norm_min", 1e-12, high=1e-6)),
        size,
        _NAMES,
        dense=_dense(raw, fields["layers"]),
        shared=size * raw.integer("moe_num_shared_experts", 2, low=0, high=count),
        base=layer,
    )
    return ModelConfig(**fields, interleaved=True, build_layer=mixture)
