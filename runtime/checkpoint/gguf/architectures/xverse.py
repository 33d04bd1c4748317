"""XVERSE (7B, 13B, 65B): Llama; read only."""

from mycli.runtime.checkpoint.gguf.architecture import Architecture
from mycli.runtime.checkpoint.gguf.tensor_rules import PAIRED_TENSORS

ARCHITECTURE = Architecture(name="xverse", model_type="llama", layer_tensors=PAIRED_TENSORS)
