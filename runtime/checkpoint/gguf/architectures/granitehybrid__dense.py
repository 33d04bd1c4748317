"""Granite 4 H without experts: the tensors of its shared MLP have other names."""

from dataclasses import replace

from mycli.runtime.checkpoint.gguf.architectures import granitehybrid
from mycli.runtime.checkpoint.gguf.architectures.granitehybrid import SHARED_LENGTH, TENSORS, shared_mlp_size
from mycli.runtime.checkpoint.gguf.experts import joined_shared_expert

ARCHITECTURE = replace(
    granitehybrid.ARCHITECTURE,
    layer_tensors={**TENSORS, **joined_shared_expert("ffn_gate", "ffn_up", "ffn_down", shared_mlp_size)},
    reads=lambda header, experts: not experts and header.metadata.has(f"granitehybrid.{SHARED_LENGTH}"),
    writes=lambda config: not granitehybrid.ARCHITECTURE.writes(config),
)
