"""Orion (14B): Llama with LayerNorms, which is a StableLM that rotates whole heads; read only."""

from mycli.runtime.checkpoint.gguf.architecture import LAYER_NORM_EPSILON, Architecture

ARCHITECTURE = Architecture(
    name="orion", model_type="stablelm", epsilon=LAYER_NORM_EPSILON, epsilon_field="layer_norm_eps"
)
