"""A model's forward on the meta device, with an attention that only takes down how it is called.

Nothing is computed and no weight is needed, so a model of any size takes about a second.
"""

import copy
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)

from pearl.workers.architecture.arguments import unknown_arguments
from pearl.workers.architecture.masks import Mask, recognize
from pearl.workers.architecture.mixing import MixingWatch
from pearl.workers.architecture.positions import freeze_positions
from pearl.workers.architecture.recurrence import recurrent_parts

log = logging.getLogger(__name__)

NAME = "pearl_survey"
NUM_TOKENS = 251
"""A prime that is no size of a model: an operation over a dimension of this size is one over tokens."""


@dataclass
class Survey:
    """``masks`` by the name of the attention module, in the order of the calls."""

    model: PreTrainedModel | None = None
    masks: dict[str, Mask] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    uses: set[str] = field(default_factory=set)
    """Arguments of attention beyond queries, keys, values and mask that have a value, e.g. "softcap"."""


@dataclass(frozen=True)
class _MaskMade:
    """What the recorder's mask interface hands to the layers in place of a tensor."""

    mask: Mask | None
    problem: str = ""


def survey(config: PreTrainedConfig, max_context_tokens: int) -> Survey:
    """Return what the causal language model of ``config`` asks of attention, and why PEARL could not run it."""
    result = Survey()
    config = copy.deepcopy(config)
    try:
        with torch.device("meta"):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
        freeze_positions(model, max_context_tokens)
    except (ValueError, AttributeError, KeyError, TypeError, ImportError, RuntimeError) as error:
        result.problems.append(str(error))
        return result
    result.model = model
    result.problems += recurrent_parts(model)
    if not result.problems:
        model.train(False)
        _run(model, result)
    return result


def _run(model: PreTrainedModel, result: Survey) -> None:
    recorder = _Recorder(model, result)
    AttentionInterface.register(NAME, recorder.attention)
    AttentionMaskInterface.register(NAME, _describe_mask)
    ids = torch.zeros((1, NUM_TOKENS), dtype=torch.long, device="meta")
    try:
        model.set_attn_implementation(NAME)
        if hasattr(model, "set_experts_implementation") and model._can_set_experts_implementation():
            model.set_experts_implementation("batched_mm")
        with torch.no_grad(), MixingWatch(NUM_TOKENS) as watch:
            model(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                position_ids=torch.zeros_like(ids),
                use_cache=False,
                logits_to_keep=torch.zeros(1, dtype=torch.long, device="meta"),
                pearl_probe=True,
            )
    # Whatever a model's own code raises on the meta device: it cannot be vouched for.
    except Exception as error:
        log.debug("the survey failed", exc_info=True)
        if not result.problems:
            result.problems.append(
                f"its forward cannot be examined without weights: {type(error).__name__}: {error}"
            )
        return
    if not recorder.layers:
        result.problems.append(
            f"its attention cannot be replaced: {type(model).__name__} does not call transformers' attention interface"
        )
    else:
        result.problems += watch.problems()
        _check_layers(model, recorder, result)


def _check_layers(model: PreTrainedModel, recorder: "_Recorder", result: Survey) -> None:
    num_layers = int(getattr(model.config.get_text_config(), "num_hidden_layers", 0))
    called = sorted(recorder.layers)
    if called != list(range(num_layers)):
        result.problems.append(
            f"{len(set(called))} of its {num_layers} layers call transformers' attention interface once each"
        )
    if not recorder.passes_arguments:
        result.problems.append("it does not hand the arguments of its forward on to attention")


class _Recorder:
    def __init__(self, model: nn.Module, result: Survey) -> None:
        self._names = {module: name for name, module in model.named_modules()}
        self._result = result
        self.layers: list[int] = []
        self.passes_arguments = True

    def attention(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: object,
        scaling: float | None = None,
        pearl_probe: bool = False,
        **features: Any,
    ) -> tuple[torch.Tensor, None]:
        self.passes_arguments &= pearl_probe
        self.layers.append(int(getattr(module, "layer_idx", -1)))
        self._check_arguments(features)
        self._check_shapes(query, key, value)
        if not isinstance(attention_mask, _MaskMade):
            self._problem(f"its layers make an attention mask of their own ({type(attention_mask).__name__})")
        elif attention_mask.mask is None:
            self._problem(attention_mask.problem)
        else:
            self._result.masks[self._names[module]] = attention_mask.mask
        return query.new_empty((query.shape[0], query.shape[2], query.shape[1], value.shape[3])), None

    def _check_arguments(self, features: Mapping[str, Any]) -> None:
        self._result.uses |= {name for name, value in features.items() if value is not None}
        if unknown := unknown_arguments(features):
            self._problem(f"its attention uses {', '.join(map(repr, unknown))}, which is not known")

    def _check_shapes(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        if (
            not query.shape[2] == key.shape[2] == value.shape[2] == NUM_TOKENS
            or query.shape[1] % key.shape[1]
        ):
            self._problem(
                f"its attention takes queries {list(query.shape)} and keys {list(key.shape)}: not one of each a token"
            )

    def _problem(self, text: str) -> None:
        if text not in self._result.problems:
            self._result.problems.append(text)


def _describe_mask(*, mask_function: Any, **others: Any) -> _MaskMade:
    try:
        return _MaskMade(recognize(mask_function))
    except ValueError as error:
        return _MaskMade(None, str(error))
