"""gpt-oss 20B and 120B: biases everywhere, a score per head that attends to nothing (a sink), a sliding window in every
other layer, and experts whose gates are clamped, stored in MXFP4.

The files hold all experts of a layer in one tensor, gates and what goes up beside them in turn. Copies in 16 bits,
which store them transposed, are not read.
"""

from dataclasses import dataclass, replace

from mycli.runtime.models import hf_config
from mycli.runtime.models.config import ModelConfig, llama_layer
from mycli.runtime.models.experts import EXPERT_KEYS, read_expert_counts
from mycli.runtime.models.experts_spec import ExpertsSpec, RoutingSpec, StackSpec
from mycli.runtime.models.hf_rope import UNSUPPORTED_HINT
from mycli.runtime.models.layer_spec import LayerSpec
from mycli.runtime.models.part_spec import LinearSpec, MlpSpec
from mycli.runtime.utils.json_fields import Fields

_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 150000.0,
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
_ENDINGS = ("blocks", "scales", "bias")


@dataclass(frozen=True)
class GptOssLayers:
    """What layers are made of; as `ModelConfig.build_layer`."""

    count: int
    top_k: int

    def __call__(self, config: ModelConfig, index: int) -> LayerSpec:
        """Llama's attention with sinks, and the experts."""
        llama, prefix = llama_layer(config, index), f"model.layers.{index}"
        return replace(
            llama,
            mixer=replace(llama.attention, sinks=f"{prefix}.self_attn.sinks"),
            mlp=self._experts(llama.dense_mlp, config, f"{prefix}.mlp"),
        )

    def _experts(self, mlp: MlpSpec, config: ModelConfig, block: str) -> ExpertsSpec:
        size, hidden = config.intermediate_size, config.hidden_size
        names = [f"{block}.experts.{expert}" for expert in range(self.count)]
        experts = tuple(
            MlpSpec(
                size,
                None,
                (LinearSpec(f"{name}.gate_up_proj", 2 * size, hidden, bias=True),),
                LinearSpec(f"{name}.down_proj", hidden, size, bias=True),
                activation="swiglu_clamped",
            )
            for name in names
        )
        stacks = (
            StackSpec(f"{block}.experts.{own}_{ending}", tuple(f"{name}.{own}.{ending}" for name in names))
            for own in ("gate_up_proj", "down_proj")
            for ending in _ENDINGS
        )
        router = LinearSpec(f"{block}.router", self.count, hidden, bias=True)
        return ExpertsSpec(mlp.norm, router, experts, RoutingSpec(self.top_k, normalize=True), stacks=tuple(stacks))


def read(raw: Fields) -> ModelConfig:
    """The ModelConfig of a gpt-oss config.json."""
    raw = hf_config.with_defaults(raw, head_dim=64, sliding_window=128, rms_norm_eps=1e-5, rope_theta=150000.0)
    if not (raw.has("rope_parameters") or raw.has("rope_scaling")):
        raw = Fields({**raw.values, "rope_parameters": _ROPE}, raw.source)
    for key, done in (("swiglu_alpha", 1.702), ("swiglu_limit", 7.0)):
        if raw.has(key) and raw.values[key] != done:
            raise raw.fail(key, f"= {raw.values[key]!r:.40} is not supported", UNSUPPORTED_HINT)
    fields = hf_config.common(raw, handled=EXPERT_KEYS)
    count, top_k = read_expert_counts(raw, "num_local_experts", fields["layers"], usual=(128, 4))
    slides = hf_config.sliding_layers(raw, fields["layers"], hf_config.every(2))
    bias = raw.boolean("attention_bias", True)
    return ModelConfig(
        **fields,
        qkv_bias=bias,
        output_bias=bias,
        windows=hf_config.windows_of(raw, slides),
        build_layer=GptOssLayers(count, top_k),
    )
