"""Nomic Embed 1, 1.5 and, as GGUF, 2: encoders which compute embeddings: BERT with rotary embedding, gates or experts.

Folders of Nomic Embed 2 are refused: they stack the experts in two matrices, with a bias that GGUF files leave out.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from mycli.runtime.models import hf_config
from mycli.runtime.models.config import ModelConfig, llama_layer
from mycli.runtime.models.experts import ExpertNames, MoeLayers, read_expert_counts
from mycli.runtime.models.experts_spec import ExpertsSpec, RoutingSpec
from mycli.runtime.models.layer_spec import LayerSpec
from mycli.runtime.models.part_spec import LinearSpec, MlpSpec, PositionSpec
from mycli.runtime.utils.json_fields import Fields

# Of published files, whose code derives its config from GPT-2's.
_KEYS = {
    "n_embd": "hidden_size",
    "n_head": "num_attention_heads",
    "n_inner": "intermediate_size",
    "n_layer": "num_hidden_layers",
    "activation_function": "hidden_act",
    "layer_norm_epsilon": "rms_norm_eps",
    "layer_norm_eps": "rms_norm_eps",
    "max_trained_positions": "max_position_embeddings",
    "rotary_emb_base": "rope_theta",
}
_NEUTRAL = {
    "causal": False,
    "mlp_fc1_bias": False,
    "mlp_fc2_bias": False,
    "parallel_block": False,
    "prenorm": False,
    "qkv_proj_bias": False,
    "rotary_emb_fraction": 1.0,
    "rotary_emb_interleaved": False,
    "use_rms_norm": False,
}


def layer(config: ModelConfig, index: int) -> LayerSpec:
    llama, name = llama_layer(config, index), f"model.layers.{index}"
    attention, mlp, hidden = llama.attention, llama.dense_mlp, config.hidden_size
    before = f"model.layers.{index - 1}.norm2" if index else "emb_ln"
    return replace(
        llama,
        mixer=replace(
            attention,
            norm=config.norm_spec(before),
            qkv=(LinearSpec(f"{name}.attn.Wqkv", 3 * hidden, hidden, config.qkv_bias),),
            o=replace(attention.o, name=f"{name}.attn.out_proj"),
            normed_residual=True,
        ),
        mlp=replace(
            mlp,
            norm=config.norm_spec(f"{name}.norm1"),
            gate_up=_gate_up(mlp, name),
            down=replace(mlp.down, name=f"{name}.mlp.fc2"),
            normed_residual=True,
        ),
        ignored_prefixes=("cls.", "pooler."),
    )


def _gate_up(mlp: MlpSpec, name: str) -> tuple[LinearSpec, ...]:
    names = ("fc12", "fc11") if mlp.gated else ("fc1",)
    return tuple(replace(linear, name=f"{name}.mlp.{fc}") for linear, fc in zip(mlp.gate_up, names, strict=True))


@dataclass(frozen=True)
class NomicExperts:
    """Builds the layers of Nomic Embed 2: the second of each `period` has experts."""

    experts: MoeLayers
    period: int

    def __call__(self, config: ModelConfig, index: int) -> LayerSpec:
        dense = layer(config, index)
        if index % self.period != 1:
            return dense
        sparse = self.experts.replace_mlp(dense, config)
        assert isinstance(sparse.mlp, ExpertsSpec)
        return replace(sparse, mlp=replace(sparse.mlp, normed_residual=True))


def read(raw: Fields) -> ModelConfig:
    raw = hf_config.renamed(raw, _KEYS)
    if raw.values.get("hidden_act") == "swiglu":
        raw = Fields({**raw.values, "hidden_act": "silu"}, raw.source)
    raw = hf_config.with_defaults(raw, rms_norm_eps=1e-12, dtype=raw.text("torch_dtype", "float32"))
    if not raw.has("rope_parameters"):
        raw = hf_config.with_defaults(raw, rope_theta=1000.0)
    hf_config.require(raw, **_NEUTRAL)
    has_experts = raw.has("num_local_experts")
    fields = hf_config.common(
        raw,
        handled=("use_bidirectional_attention", "num_local_experts"),
        activations={"gelu": "gelu"} if has_experts else hf_config.SILU,
    )
    build_layer: Callable[[ModelConfig, int], LayerSpec] = layer
    if has_experts:
        count, top_k = read_expert_counts(raw, "num_local_experts", fields["layers"], default=(8, 2))
        names = ExpertNames(router="router.layer")
        experts = MoeLayers(count, RoutingSpec(top_k, normalize=False), fields["intermediate_size"], names)
        build_layer = NomicExperts(experts, raw.integer("moe_every_n_layers"))
    types = LinearSpec("embeddings.token_type_embeddings", raw.integer("type_vocab_size", 2), fields["hidden_size"])
    return ModelConfig(
        **{**fields, "tie_embeddings": True},  # has no head
        **hf_config.attention_biases(raw),
        mlp_bias=raw.boolean("mlp_bias", False),
        mlp_gate=not has_experts,
        layer_norm=True,
        norm_bias=True,
        positions=PositionSpec(None, types),
        final_norm=f"model.layers.{fields['layers'] - 1}.norm2",
        stored_prefixes=(
            ("embeddings.word_embeddings.", "model.embed_tokens."),
            ("encoder.layers.", "model.layers."),
        ),
        build_layer=build_layer,
        bidirectional=True,
    )
