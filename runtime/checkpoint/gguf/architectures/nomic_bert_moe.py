"""Nomic Embed 2: an encoder with rotary embedding, and experts in every second layer; read only."""

from mycli.runtime.checkpoint.gguf.architecture import Architecture, Config, GgufKey
from mycli.runtime.checkpoint.gguf.architectures import nomic_bert
from mycli.runtime.checkpoint.gguf.architectures.bert import encoder_config
from mycli.runtime.checkpoint.gguf.experts import expert_keys, expert_tensors
from mycli.runtime.checkpoint.gguf.header import GgufModel
from mycli.runtime.checkpoint.gguf.tensor_rules import TensorRule


def _read_config(model: GgufModel, config: Config) -> Config:
    biases = {"attention_bias": "blk.0.attn_qkv.bias", "mlp_bias": "blk.0.ffn_up.bias"}
    fields = encoder_config(model, "gelu", type_vocab_size="token_types.weight")
    return {**fields, **{field: name in model.tensors for field, name in biases.items()}}


_EXPERTS = expert_tensors(router="router.layer")
_NAMES = ("ffn_gate_inp", "ffn_up_exps", "ffn_down_exps")
_DENSE = {name: rule for name, rule in nomic_bert.ARCHITECTURE.layer_tensors.items() if name != "ffn_gate"}
ARCHITECTURE = Architecture(
    name="nomic-bert-moe",
    model_type="nomic_bert",
    layer_tensors={**_DENSE, "ffn_up": TensorRule("mlp.fc1"), **{name: _EXPERTS[name] for name in _NAMES}},
    model_tensors=nomic_bert.ARCHITECTURE.model_tensors,
    keys=(
        *expert_keys("num_local_experts", size=None),
        GgufKey("moe_every_n_layers", "moe_every_n_layers", required=True),
    ),
    epsilon=nomic_bert.ARCHITECTURE.epsilon,
    epsilon_field=nomic_bert.ARCHITECTURE.epsilon_field,
    read_config=_read_config,
)
