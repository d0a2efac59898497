"""The text model of GLM-5.3-Flash with its head: transformers has a class for the two, and for the
multimodal model, but none for them alone. Registered with AutoModelForCausalLM."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GenerationMixin
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.glm5_next import modeling_glm5_next as glm


class Glm5NextTextForCausalLM(glm.Glm5NextPreTrainedModel, GenerationMixin):
    config_class = glm.Glm5NextTextConfig
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012

    def __init__(self, config: glm.Glm5NextTextConfig):
        super().__init__(config)
        self.model = glm.Glm5NextTextModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        labels: Tensor | None = None,
        logits_to_keep: int = 0,
        **options: Any,
    ) -> CausalLMOutputWithPast:
        output = self.model(input_ids=input_ids, **options)
        logits = self.lm_head(output.last_hidden_state[:, -logits_to_keep:])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, vocab_size=self.config.vocab_size)
        return CausalLMOutputWithPast(loss, logits, output.past_key_values)


AutoModelForCausalLM.register(glm.Glm5NextTextConfig, Glm5NextTextForCausalLM, exist_ok=True)
