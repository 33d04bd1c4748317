"""gpt-oss 20B and 120B: attention sinks, biases everywhere, experts with a clamped SwiGLU, in MXFP4 or 16 bits."""

from dataclasses import dataclass, replace

from mycli.runtime.models import hf_config
from mycli.runtime.models.config import ModelConfig, llama_layer
from mycli.runtime.models.experts import EXPERT_KEYS, read_expert_counts
from mycli.runtime.models.experts_spec import ExpertsSpec, RoutingSpec, StackSpec
from mycli.runtime.models.layer_spec import LayerSpec
from mycli.runtime.models.multimodal import SEPARATE_GATE
from mycli.runtime.models.part_spec import LinearSpec, MlpSpec
from mycli.runtime.utils.json_fields import Fields

_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
_ENDINGS = ("blocks", "scales", "bias")


@dataclass(frozen=True)
class GptOssLayers:
    """Builds the layers. separate: gate and up of an expert are two linears."""

    count: int
    top_k: int
    separate: bool

    def __call__(self, config: ModelConfig, index: int) -> LayerSpec:
        llama, prefix = llama_layer(config, index), f"model.layers.{index}"
        return replace(
            llama,
            mixer=replace(llama.attention, sinks=f"{prefix}.self_attn.sinks"),
            mlp=self._experts(llama.dense_mlp, config, f"{prefix}.mlp"),
        )

    def _experts(self, mlp: MlpSpec, config: ModelConfig, block: str) -> ExpertsSpec:
        size, hidden = config.intermediate_size, config.hidden_size
        names = [f"{block}.experts.{expert}" for expert in range(self.count)]
        gate_up = (("gate_proj", size), ("up_proj", size)) if self.separate else (("gate_up_proj", 2 * size),)
        experts = tuple(
            MlpSpec(
                size,
                None,
                tuple(LinearSpec(f"{name}.{linear}", rows, hidden, bias=True) for linear, rows in gate_up),
                LinearSpec(f"{name}.down_proj", hidden, size, bias=True),
                activation="swiglu_halves" if self.separate else "swiglu_clamped",
            )
            for name in names
        )
        # Checkpoints stack all experts of a layer, with alternating rows of gate and up: in MXFP4, or in 16 bits, which
        # are transposed.
        linears = ("gate_up_proj", "down_proj")
        stacks = [
            StackSpec(
                f"{block}.experts.{linear}_{ending}",
                tuple(f"{name}.{linear}.{ending}" for name in names),
                published=not self.separate,
            )
            for linear in linears
            for ending in _ENDINGS
        ]
        stacks += [
            StackSpec(
                f"{block}.experts.{linear}",
                tuple(f"{name}.{linear}.weight" for name in names),
                transposed=True,
                published=not self.separate,
            )
            for linear in linears
        ]
        router = LinearSpec(f"{block}.router", self.count, hidden, bias=True)
        return ExpertsSpec(mlp.norm, router, experts, RoutingSpec(self.top_k, normalize=True), stacks=tuple(stacks))


def read(raw: Fields) -> ModelConfig:
    raw = hf_config.with_defaults(
        raw, head_dim=64, num_key_value_heads=8, sliding_window=128, rms_norm_eps=1e-5, rope_theta=150000.0
    )
    raw = hf_config.with_default_rope(raw, _ROPE)
    hf_config.require(raw, swiglu_alpha=1.702, swiglu_limit=7.0)
    fields = hf_config.common(raw, handled=EXPERT_KEYS)
    count, top_k = read_expert_counts(raw, "num_local_experts", fields["layers"], default=(128, 4))
    slides = hf_config.layers_of_type(raw, fields["layers"], hf_config.all_but_every(2))
    return ModelConfig(
        **fields,
        **hf_config.attention_biases(raw, default=True),
        windows=hf_config.layer_windows(raw, slides),
        build_layer=GptOssLayers(count, top_k, raw.boolean(SEPARATE_GATE, False)),
    )
