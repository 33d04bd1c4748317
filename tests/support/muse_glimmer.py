"""Muse Glimmer's text model with its head, as transformers computes it: that library has no class for both alone."""

from typing import Any

from torch import Tensor, nn
from transformers.generation import GenerationMixin
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.muse_glimmer.modeling_muse_glimmer import (
    MuseGlimmerPreTrainedModel,
    MuseGlimmerTextConfig,
    MuseGlimmerTextModel,
)


class MuseGlimmerText(MuseGlimmerPreTrainedModel, GenerationMixin):
    config: MuseGlimmerTextConfig
    config_class = MuseGlimmerTextConfig
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: MuseGlimmerTextConfig) -> None:
        super().__init__(config)
        self.model = MuseGlimmerTextModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, input_ids: Tensor, **options: Any) -> CausalLMOutputWithPast:
        output = self.model(input_ids, **options)
        cap = self.config.final_logit_softcapping
        logits = cap * (self.lm_head(output.last_hidden_state) * self.config.output_multiplier / cap).tanh()
        return CausalLMOutputWithPast(logits=logits, past_key_values=output.past_key_values)
