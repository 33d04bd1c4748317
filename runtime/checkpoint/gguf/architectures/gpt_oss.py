"""gpt-oss: attention sinks, biases, and experts whose rows of gate and up alternate in Hugging Face's tensors."""

from collections.abc import Iterable

from mycli.runtime.checkpoint.gguf.architecture import ALL_BIASES, Architecture, Config
from mycli.runtime.checkpoint.gguf.architectures.exaone4 import WINDOW_KEY
from mycli.runtime.checkpoint.gguf.experts import SOFTMAX_WEIGHT, expert_keys, experts_spec
from mycli.runtime.checkpoint.gguf.header import GgufModel
from mycli.runtime.checkpoint.gguf.requirements import WHOLE_ROTATION
from mycli.runtime.checkpoint.gguf.tensor_rules import LLAMA_TENSORS, RowRanges, TensorRule
from mycli.runtime.models.config import ModelConfig


def _gate_then_up(config: ModelConfig) -> Iterable[range]:
    rows = 2 * config.intermediate_size
    return range(0, rows, 2), range(1, rows, 2)


def _read_config(model: GgufModel, config: Config) -> Config:
    # There is no key for yarn's bounds, which are not rounded in any published model.
    rope = {**config["rope_parameters"], "truncate": False}
    return {"attention_bias": True, "rope_parameters": rope}


ARCHITECTURE = Architecture(
    name="gpt-oss",
    model_type="gpt_oss",
    written_types=("gpt_oss",),
    requires=(WHOLE_ROTATION,),
    own_head=True,
    biases=(*ALL_BIASES, "ffn_gate_inp", "ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"),
    layer_tensors={
        **{name: rule for name, rule in LLAMA_TENSORS.items() if name != "ffn_norm"},
        "post_attention_norm": TensorRule("post_attention_layernorm"),
        "attn_sinks": TensorRule("self_attn.sinks", suffixes={".weight": ""}),
        "ffn_gate_inp": TensorRule("mlp.router"),
        "ffn_gate_exps": TensorRule(
            "mlp.experts.{expert}.gate_up_proj",
            RowRanges(_gate_then_up),
            followed_by="ffn_up_exps",
            first_rows=lambda config: config.intermediate_size,
        ),
        "ffn_down_exps": TensorRule("mlp.experts.{expert}.down_proj"),
    },
    keys=(*expert_keys("num_local_experts", size=None), WINDOW_KEY),
    slides=lambda layer: layer % 2 == 0,
    gating=(SOFTMAX_WEIGHT,),
    read_config=_read_config,
    write_keys=lambda config: {"expert_feed_forward_length": experts_spec(config).size},
)
