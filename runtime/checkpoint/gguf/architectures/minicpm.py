"""MiniCPM 1, 2 and 4: Llama with three multipliers, which older files lack, and longrope."""

from mycli.runtime.checkpoint.gguf.architecture import Architecture, Config, GgufKey, linear_biases
from mycli.runtime.checkpoint.gguf.header import GgufModel
from mycli.runtime.checkpoint.gguf.requirements import WHOLE_ROTATION
from mycli.runtime.checkpoint.gguf.tensor_rules import PAIRED_TENSORS


def _read_config(model: GgufModel, config: Config) -> Config:
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    # Of a file without the keys llama.cpp takes the multipliers of the 2B model.
    logits = model.number("logit_scale", hidden / 256, low=1e-9)
    return {
        **linear_biases(model, config),
        "scale_depth": model.number("residual_scale", 1.4 / layers**0.5, low=1e-9) * layers**0.5,
        "dim_model_base": hidden / logits,
    }


ARCHITECTURE = Architecture(
    name="minicpm",
    model_type="minicpm",
    written_types=("minicpm",),
    requires=(WHOLE_ROTATION,),
    biases=(*("attn_q", "attn_k", "attn_v"), "attn_output"),
    layer_tensors=PAIRED_TENSORS,
    keys=(GgufKey("embedding_scale", "scale_emb", float, 12.0, write=lambda config: float(config.embedding_scale)),),
    read_config=_read_config,
    write_keys=lambda config: {
        "residual_scale": float(config.residual_scale),
        "logit_scale": float(1 / config.logit_scale),
    },
)
