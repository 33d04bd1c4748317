"""Llama with bidirectional attention, which computes embeddings (Llama-Embed-Nemotron); read only."""

from mycli.runtime.checkpoint.gguf.architecture import Architecture, linear_biases
from mycli.runtime.checkpoint.gguf.tensor_rules import PAIRED_TENSORS

ARCHITECTURE = Architecture(
    name="llama-embed",
    model_type="llama_bidirec",
    layer_tensors=PAIRED_TENSORS,
    read_config=lambda model, config: {**linear_biases(model, config), "use_bidirectional_attention": True},
)
