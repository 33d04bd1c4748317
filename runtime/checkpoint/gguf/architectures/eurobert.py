"""EuroBERT and Jina Embeddings 5 nano, encoders with Llama's layers; read only."""

from mycli.runtime.checkpoint.gguf.architecture import Architecture

ARCHITECTURE = Architecture(
    name="eurobert",
    model_type="eurobert",
    read_config=lambda model, config: {"use_bidirectional_attention": True},
)
