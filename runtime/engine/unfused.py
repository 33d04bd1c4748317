"""What of a model the fused kernels do not do, by its declaration alone, in the words that users read.

Knows no tensors and no kernels; `runtime.engine.decode_step` says what of a loaded model stands against them.
"""

from mycli.runtime.models.config import ModelConfig
from mycli.runtime.models.experts_spec import ExpertsSpec
from mycli.runtime.models.layer_spec import LayerSpec


def _unlike(spec: LayerSpec) -> str | None:
    """What of a layer the fused kernels do not do; None where they do all of it."""
    if spec.recurrent is not None:
        return "it keeps a state instead of keys and values"
    attention, mlp = spec.attention, spec.mlp
    if attention.sinks is not None:
        return "its attention has sinks"
    if attention.gated:
        return "what heads attend to is gated"
    if len(spec.parts) != 2 or attention.kv_source is not None:
        return "it has other parts, or reads the keys of another"
    if spec.parallel or attention.norm is None or mlp.norm is None:
        return "a part of it has no norm before it"
    if attention.output_norm is not None or mlp.output_norm is not None:
        return "a part of it has a norm behind it"
    if any(norm.offset or norm.layer_norm for norm in spec.norms()):
        return "its norms are not plain"
    if any(norm is not None and norm.size != attention.head_dim for norm in (attention.q_norm, attention.k_norm)):
        return "queries or keys are normed over all heads at once"
    if (
        attention.v_norm is not None
        or attention.norm_after_rope
        or attention.clip is not None
        or not attention.has_v_proj
    ):
        return "keys or values are made in another way"
    if attention.rope is None or attention.rope.interleaved or attention.rope.dim != attention.head_dim:
        return "heads are not turned whole, by halves"
    if attention.rope.scaling.query_beta:
        return "queries are scaled by their position"
    if attention.scale not in (None, attention.head_dim**-0.5) or attention.softcap is not None:
        return "scores are scaled or capped in another way"
    if (
        mlp.activation != "silu"
        or {attention.residual_scale, mlp.residual_scale} != {1.0}
        or spec.layer_scalar is not None
    ):
        return "it has another activation, or a multiplier"
    return _unlike_experts(mlp) if isinstance(mlp, ExpertsSpec) else None


def _unlike_experts(spec: ExpertsSpec) -> str | None:
    """Likewise, of experts and their router."""
    if any((spec.router_norm, spec.expert_norm, spec.expert_output_norm)):
        return "its experts or their router have norms of their own"
    if spec.shared is not None and (spec.shared.mlp.norm or spec.shared.mlp.output_norm):
        return "the expert that all tokens go through has norms of its own"
    if spec.routing.groups > 1:
        return "its experts are chosen among groups"
    if spec.expert_scales is not None or any(linear.bias for linear in spec.unquantized):
        return "its router has a bias, or its experts factors"
    if any(linear.bias for linear in spec.experts[0].linears):
        return "its experts have biases"
    return None


def unfused(config: ModelConfig) -> str | None:
    """What of a model the fused kernels do not do, by its declaration; None where they do all of it."""
    for spec in config.layer_specs:
        if (reason := _unlike(spec)) is not None:
            return f"layer {spec.index}: {reason}"
    if config.embedding_scale != 1.0 or config.logit_scale != 1.0 or config.logit_softcap is not None:
        return "embeddings or logits are multiplied or capped"
    if config.norm_offset or config.layer_norm:
        return "its last norm is not plain"
    shapes = {(spec.attention.heads, spec.attention.kv_heads, spec.attention.head_dim) for spec in config.layer_specs}
    if len(shapes) > 1 or len(config.distinct_ropes) > 1:
        return "its layers differ in heads or in how they turn them"
    return None
