"""Which models the fused GPU pass takes, by their declaration alone."""

from mycli.runtime.errors import Declined
from mycli.runtime.kernels.routed import decline_routing
from mycli.runtime.models.config import KvDtype, ModelConfig
from mycli.runtime.models.experts_spec import ExpertsSpec
from mycli.runtime.models.layer_spec import LayerSpec
from mycli.runtime.models.part_spec import AttentionSpec, MlpSpec


def norms_all_heads(spec: AttentionSpec) -> bool:
    return spec.q_norm is not None and spec.q_norm.size != spec.head_dim


def _decline_norms(spec: LayerSpec) -> Declined | None:
    attention, mlp = spec.attention, spec.mlp
    if any(norm.layer_norm or norm.heads for norm in spec.norms()):
        return Declined("norm-kind")
    if attention.inner_norm is not None or (isinstance(mlp, MlpSpec) and mlp.inner_norm is not None):
        return Declined("inner-norm")
    if (attention.q_norm is None) != (attention.k_norm is None):
        return Declined("norm-kind")
    if attention.v_norm is not None and attention.v_norm.size != attention.head_dim:
        return Declined("norm-kind")
    if norms_all_heads(attention) and attention.norm_after_rope:
        return Declined("norm-all-heads")
    return None


def _decline_layer(spec: LayerSpec) -> Declined | None:
    if spec.recurrent is not None:
        return Declined("layer-recurrent")
    if spec.latent is not None:
        return Declined("latent-attention")
    if spec.mixer is None or spec.mlp is None:
        return Declined("layer-parts")
    attention, mlp = spec.attention, spec.mlp
    if attention.gated or attention.gate is not None:
        return Declined("gated-attention")
    if attention.chunk is not None:
        return Declined("attention-chunks")
    if attention.differential is not None:
        return Declined("differential-attention")
    if attention.key_bias is not None:
        return Declined("key-biases")
    if spec.residual_gains is not None:
        return Declined("residual-gains")
    if len(spec.parts) != 2 or spec.streams is not None or attention.kv_source is not None:
        return Declined("layer-parts")
    if spec.parallel:
        return Declined("parallel-parts")
    if (declined := _decline_norms(spec)) is not None:
        return declined
    if (
        attention.value_dim is not None
        or attention.value_scale != 1.0
        or attention.clip is not None
        or (not attention.has_v_proj and attention.rope is not None and attention.rope.interleaved)
    ):
        return Declined("key-value-kind")
    if isinstance(mlp, ExpertsSpec):
        return _decline_experts(mlp)
    if mlp.activation not in ("silu", "gelu_tanh") or not mlp.gated:
        return Declined("activation-kind")
    return None


def _decline_experts(spec: ExpertsSpec) -> Declined | None:
    if spec.norm is None:
        return Declined("no-input-norm")
    if spec.output_norm is not None:
        return Declined("output-norm")
    shared = None if spec.shared is None else spec.shared.mlp
    clamped = spec.activation in ("swiglu_clamped", "swiglu_halves") and shared is None
    if not (spec.gated and (spec.activation == "silu" or clamped)):
        return Declined("activation-kind")
    if spec.weigh_inputs:
        return Declined("expert-inputs")
    if spec.early_router:
        return Declined("early-router")
    if (declined := decline_routing(spec.routing)) is not None:
        return declined
    if any((spec.router_norm, spec.expert_norm, spec.expert_output_norm)):
        return Declined("expert-norms")
    if shared is not None and (shared.norm or shared.output_norm):
        return Declined("shared-expert-norms")
    if spec.expert_scales is not None or any(linear.bias for linear in spec.unquantized if linear is not spec.router):
        return Declined("router-bias")
    if shared is not None and any(linear.bias for linear in shared.linears):
        return Declined("expert-biases")
    return None


def decline_config(config: ModelConfig, kv: KvDtype = "auto") -> Declined | None:
    """Return the first property of a model that the fused kernels do not support; None if they support all."""
    if config.bidirectional:
        return Declined("bidirectional")
    for spec in config.layer_specs:
        if (declined := _decline_layer(spec)) is not None:
            return declined
        rope = spec.attention.rope
        if rope is not None and rope.dim == 0:
            return Declined("query-scale")
        if kv == "int4" and rope is not None and rope.dim != spec.attention.head_dim:
            return Declined("int4-partial-rotation")
    if config.head_bias:
        return Declined("linear-bias", {"linear": config.head().name})
    if config.embedding_norm or config.layer_norm:
        return Declined("norm-kind")
    return None
