"""EmbeddingGemma: Gemma 3 in which every token sees the tokens on both sides; read only."""

from dataclasses import replace

from mycli.runtime.checkpoint.gguf.architecture import Config
from mycli.runtime.checkpoint.gguf.architectures import gemma3
from mycli.runtime.checkpoint.gguf.header import GgufModel

DENSE = ("dense_2.weight", "dense_3.weight")  # after the pooling; read by `GgufFolder.embedding`


def _read_config(model: GgufModel, config: Config) -> Config:
    return {**gemma3.ARCHITECTURE.read_config(model, config), "use_bidirectional_attention": True}


ARCHITECTURE = replace(
    gemma3.ARCHITECTURE,
    name="gemma-embedding",
    written_types=(),
    ignored=DENSE,
    read_config=_read_config,
)
