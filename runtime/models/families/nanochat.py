"""nanochat: norms without gain, also of the embeddings, of q and k, after a rotation by the negative angle."""

from dataclasses import replace

from mycli.runtime.models import hf_config
from mycli.runtime.models.config import ModelConfig, llama_layer
from mycli.runtime.models.families import gemma2
from mycli.runtime.models.layer_spec import LayerSpec
from mycli.runtime.models.part_spec import RopeSpec
from mycli.runtime.utils.json_fields import Fields


def layer(config: ModelConfig, index: int) -> LayerSpec:
    llama, mlp = llama_layer(config, index), f"model.layers.{index}.mlp"
    # After the rotation, which does not change the root mean square, as in the original code.
    norm = config.norm_spec(None, config.head_dim)
    up, down = replace(llama.dense_mlp.gate_up[0], name=f"{mlp}.fc1"), replace(llama.dense_mlp.down, name=f"{mlp}.fc2")
    return replace(
        llama,
        mixer=replace(llama.attention, q_norm=norm, k_norm=norm, norm_after_rope=True),
        mlp=replace(llama.dense_mlp, gate_up=(up,), down=down),
    )


def read(raw: Fields) -> ModelConfig:
    raw = hf_config.with_defaults(raw, final_logit_softcapping=15.0)
    fields = hf_config.common(raw, handled=("final_logit_softcapping",), activations=hf_config.UNGATED_RELU)
    rope = RopeSpec(fields["rope_theta"], fields["head_dim"], fields["rope_scaling"], clockwise=True)
    return ModelConfig(
        **fields,
        **hf_config.attention_biases(raw),
        mlp_gate=False,
        norm_gain=False,
        final_norm=None,
        embedding_norm=True,
        layer_ropes=(rope,) * fields["layers"],
        logit_softcap=gemma2.softcap(raw, "final_logit_softcapping"),
        build_layer=layer,
    )
