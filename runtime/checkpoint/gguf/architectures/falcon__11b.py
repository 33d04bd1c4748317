"""Falcon 2 (11B): groups of keys and values as in 40B, one norm for attention and MLP as in 7B; read only."""

from dataclasses import replace

from mycli.runtime.checkpoint.gguf.architecture import Config
from mycli.runtime.checkpoint.gguf.architectures import falcon, falcon__large
from mycli.runtime.checkpoint.gguf.header import GgufModel

# The converter writes no base of the rotary embedding and llama.cpp takes 10000; the only model of this layout has
# another.
_THETA = 500042.0


def _read_config(model: GgufModel, config: Config) -> Config:
    fields = {**falcon__large.read_grouped_config(model, config), "num_ln_in_parallel_attn": 1}
    if not model.has("rope.freq_base"):
        fields["rope_parameters"] = {**config["rope_parameters"], "rope_theta": _THETA}
    return fields


_GROUPED = falcon__large.ARCHITECTURE.layer_tensors
ARCHITECTURE = replace(
    falcon__large.ARCHITECTURE,
    layer_tensors={
        **{name: rule for name, rule in _GROUPED.items() if name != "attn_norm_2"},
        "attn_norm": falcon.ARCHITECTURE.layer_tensors["attn_norm"],
    },
    reads=lambda header, experts: not falcon.is_small(header) and not falcon__large.has_two_norms(header),
    read_config=_read_config,
)
