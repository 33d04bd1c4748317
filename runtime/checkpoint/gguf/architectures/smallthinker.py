"""SmallThinker: ReLU-gated experts; with a window, every fourth layer has neither window nor rotation."""

from typing import Any

from mycli.runtime.checkpoint.gguf.architecture import Architecture, Config, GgufKey
from mycli.runtime.checkpoint.gguf.experts import SIGMOID, SOFTMAX, expert_keys, expert_tensors, experts_spec
from mycli.runtime.checkpoint.gguf.header import GgufModel
from mycli.runtime.checkpoint.gguf.requirements import WHOLE_ROTATION, Requirement
from mycli.runtime.checkpoint.gguf.tensor_rules import LLAMA_TENSORS
from mycli.runtime.models.config import ModelConfig

_DENSE = ("ffn_gate", "ffn_up", "ffn_down")  # llama.cpp has no layers without experts
_WINDOW_KEY = GgufKey(
    "attention.sliding_window",
    "sliding_window_size",
    write=lambda config: next((window for window in config.windows if window is not None), 0),
)
_WINDOW, _PERIOD = 4096, 4  # what llama.cpp computes for a file with the key, whatever its value is


def _layouts(layers: int, windows: bool) -> tuple[list[int], list[int]]:
    """Return 1 for each layer with a window, and for each that rotates; 0 for the others."""
    slides = [int(layer % _PERIOD != 0) for layer in range(layers)]
    return (slides, slides) if windows else ([0] * layers, [1] * layers)


def _read_config(model: GgufModel, config: Config) -> Config:
    slides, rotates = _layouts(config["num_hidden_layers"], model.integer(_WINDOW_KEY.name, 0) > 0)
    return {
        "hidden_act": "relu",
        "moe_primary_router_apply_softmax": model.integer("expert_gating_func") == SOFTMAX,
        "sliding_window_layout": slides,
        "rope_layout": rotates,
    }


def _fits(config: ModelConfig) -> bool:
    slides, rotates = _layouts(config.layers, any(config.windows))
    return all(
        config.window(layer) == (_WINDOW if slides[layer] else None)
        and (config.layer_rope(layer) is not None) == bool(rotates[layer])
        for layer in range(config.layers)
    )


def _write_keys(config: ModelConfig) -> dict[str, Any]:
    scoring = experts_spec(config).routing.scoring
    return {"expert_gating_func": SOFTMAX if scoring == "softmax" else SIGMOID}


ARCHITECTURE = Architecture(
    name="smallthinker",
    model_type="smallthinker",
    written_types=("smallthinker",),
    requires=(
        WHOLE_ROTATION,
        Requirement(
            f"rotation and no window in all layers, or in every {_PERIOD}th neither and else a window of {_WINDOW}",
            _fits,
        ),
    ),
    biases=(),
    layer_tensors={
        **{name: rule for name, rule in LLAMA_TENSORS.items() if name not in _DENSE},
        **expert_tensors("block_sparse_moe", router="primary_router", gate="gate", up="up", down="down"),
    },
    keys=(
        *expert_keys("moe_num_primary_experts", "moe_num_active_primary_experts", "moe_ffn_hidden_size"),
        _WINDOW_KEY,
    ),
    gating=(SOFTMAX, SIGMOID),
    read_config=_read_config,
    write_keys=_write_keys,
)
