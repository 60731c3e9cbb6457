"""What a sequence costs: linear layers grow with its length, attention with the square."""

from dataclasses import dataclass
from typing import Self

from transformers import PreTrainedConfig, PreTrainedModel

from pearl.workers.training.output_layer import is_tied, vocabulary_weight


@dataclass(frozen=True, slots=True)
class Flops:
    """Of a forward pass, in multiply-adds; only their proportion matters."""

    per_token: int
    per_pair: int  # of a token and one before it

    @classmethod
    def of(cls, model: PreTrainedModel) -> Self:
        """Dense decoders; of mixture-of-experts models it overestimates the linear layers."""
        weights = sum(parameter.numel() for parameter in model.parameters())
        # A causal query meets half of the sequence, once for its scores and once for the values.
        return cls(
            weights - (0 if is_tied(model) else vocabulary_weight(model).numel()),
            sum(_attention_width(settings) for settings in _layers(model.config.get_text_config())),
        )

    def of_sequence(self, num_tokens: int) -> int:
        return num_tokens * (self.per_token + num_tokens * self.per_pair)


def _layers(settings: PreTrainedConfig) -> list[PreTrainedConfig]:
    """The settings of each layer; some models have layers of different sizes."""
    if getattr(settings, "is_heterogeneous", False):
        return list(settings.per_layer_config)
    return [settings] * getattr(settings, "num_hidden_layers", 0)


def _attention_width(settings: PreTrainedConfig) -> int:
    heads: int = getattr(settings, "num_attention_heads", 0)
    return heads * (
        getattr(settings, "head_dim", None) or getattr(settings, "hidden_size", 0) // max(1, heads)
    )
