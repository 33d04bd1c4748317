"""Scores pairs of texts with the classification head of a reranker, as a CrossEncoder of sentence-transformers does."""

import torch
from torch import Tensor

from mycli.runtime.checkpoint.sentence_transformers import CrossEncoderSpec
from mycli.runtime.engine.replies.embedder import VECTOR_ACTIVATIONS
from mycli.runtime.engine.sequence import Request
from mycli.runtime.errors import ModelError
from mycli.runtime.layers.transformer import Transformer
from mycli.runtime.tokenizer.tokenizer import TextPair, Tokenizer


class CrossEncoder:
    """Computes scores with the head of `model`, as described by `spec`.

    Raises ModelError if the tokenizer gives the second text a type that the model does not have.
    """

    def __init__(self, spec: CrossEncoderSpec, model: Transformer, tokenizer: Tokenizer) -> None:
        assert model.classifier is not None
        self.spec = spec
        self._head, self._activate = model.classifier, VECTOR_ACTIVATIONS[spec.activation]
        types = None if model.config.positions is None else model.config.positions.types
        self._types = 1 if types is None else types.out_features
        if self._types > 1 and (largest := max(tokenizer.encode_pair("a", "a").types, default=0)) >= self._types:
            raise ModelError(f"tokenizer.json: token type {largest} in pairs; the model has {self._types} types")

    def request(self, pair: TextPair) -> Request:
        types = pair.types if self._types > 1 else ()
        return Request(pair.ids, limit=0, hidden_states="all", token_types=types)

    @torch.inference_mode()
    def score(self, states: Tensor) -> Tensor:
        """Return the score fp32 [1] of a pair from its hidden states [tokens, hidden]."""
        return self._activate(self._head(states))
