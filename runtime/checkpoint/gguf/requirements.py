"""The shapes that llama.cpp's code for an architecture assumes without a key: a file of another shape is not loaded.

Each was read in llama.cpp b11434, src/models. Imports no torch.
"""

from collections.abc import Callable
from dataclasses import dataclass

from mycli.runtime.models.config import ModelConfig


@dataclass(frozen=True)
class Requirement:
    """A property that a model must have to be written; `text` completes "llama.cpp needs ..."."""

    text: str
    holds: Callable[[ModelConfig], bool]


HIDDEN_WIDE_HEADS = Requirement(
    "heads whose sizes add up to hidden_size", lambda config: config.heads * config.head_dim == config.hidden_size
)
PER_LAYER_VOCAB = Requirement(
    "vocab_size_per_layer_input of at most vocab_size", lambda config: config.per_layer_vocab <= config.vocab_size
)
WHOLE_ROTATION = Requirement(
    "the whole of each head rotated",
    lambda config: all(rope.dim == config.head_dim for rope in config.distinct_ropes),
)
