"""Mellum 2: Qwen 3 MoE with sliding windows in some layers, whose rotation is not scaled."""

from mycli.runtime.checkpoint.gguf.architecture import Architecture, Config
from mycli.runtime.checkpoint.gguf.architectures.exaone4 import WINDOW_KEY, full_attention
from mycli.runtime.checkpoint.gguf.experts import expert_keys, expert_tensors
from mycli.runtime.checkpoint.gguf.header import GgufModel
from mycli.runtime.checkpoint.gguf.requirements import WHOLE_ROTATION, Requirement
from mycli.runtime.checkpoint.gguf.rope import sliding_rope_keys, sliding_rope_parameters
from mycli.runtime.checkpoint.gguf.tensor_rules import LLAMA_TENSORS

_DENSE = ("ffn_gate", "ffn_up", "ffn_down")  # llama.cpp has no layers without experts


def _read_config(model: GgufModel, config: Config) -> Config:
    return {
        **full_attention(model, config),
        "attention_bias": "blk.0.attn_q.bias" in model.tensors,
        "norm_topk_prob": True,
        "rope_parameters": sliding_rope_parameters(model, config["rope_parameters"]),
    }


ARCHITECTURE = Architecture(
    name="mellum",
    model_type="mellum",
    written_types=("mellum",),
    requires=(
        WHOLE_ROTATION,
        # It reads rope.freq_base_swa and rotates by rope.freq_base.
        Requirement("one rope_theta", lambda config: len({rope.theta for rope in config.distinct_ropes}) == 1),
    ),
    own_head=True,
    layer_tensors={
        **{name: rule for name, rule in LLAMA_TENSORS.items() if name not in _DENSE},
        **expert_tensors(),
    },
    keys=(*expert_keys(), WINDOW_KEY),
    slides=lambda layer: (layer + 1) % 4 != 0,
    pattern=True,
    read_config=_read_config,
    write_keys=sliding_rope_keys,
)
