"""Runs one iteration of the model: packed tokens through its own forward, attention over the paged store."""

import copy
import inspect
import logging

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.nn import functional
from transformers import PreTrainedModel

from pearl.workers.architecture.attach import attach_attention
from pearl.workers.rollout.torch_engine.attention import NAME, KvStore
from pearl.workers.rollout.torch_engine.layout import Layout, lay_out
from pearl.workers.rollout.torch_engine.sampler import Sampled, key_uniform, sample
from pearl.workers.rollout.torch_engine.scheduler import ScheduledChunk
from pearl.workers.rollout.torch_engine.settings import EngineSettings

log = logging.getLogger(__name__)


class ModelRunner:
    def __init__(self, model: PreTrainedModel, settings: EngineSettings, vocabulary_size: int) -> None:
        """Raises ValueError when the model cannot run on paged attention."""
        self.model = model.to(settings.device).eval()  # type: ignore[arg-type]
        self.device = settings.device
        self.store = KvStore(settings.kv_capacity_tokens // settings.page_tokens, settings.page_tokens)
        self._page_tokens = settings.page_tokens
        self._vocabulary_size = vocabulary_size
        self._dtype = model.dtype
        self.num_layers = attach_attention(model, NAME, settings.max_context_tokens)
        num_fused = fuse_norms(model)
        log.info("model on %s, %d norms fused", self.device, num_fused)

    @torch.inference_mode()
    def run(self, works: list[ScheduledChunk]) -> Sampled | None:
        """Compute the works' tokens; one sampled id for each work that is its request's last, in order."""
        layout = lay_out(works, self._page_tokens, self.device, self._dtype)
        logits = self._forward(layout)
        ending = [work.request for work in works if work.is_last]
        if not ending:
            return None
        keys = np.array([r.key for r in ending], np.uint64)
        positions = np.array([r.num_tokens for r in ending], np.int64)
        temperatures = np.array([r.temperature for r in ending], np.float64)
        # Rows beyond the vocabulary are padding: they have no probability, here and in training.
        logits_NV = logits[0, :, : self._vocabulary_size]
        return sample(logits_NV, temperatures, key_uniform(keys, positions))

    @torch.inference_mode()
    def copy(self, sources: npt.NDArray[np.int64], targets: npt.NDArray[np.int64]) -> None:
        self.store.copy(sources, targets)

    @torch.inference_mode()
    def zero(self, slots: npt.NDArray[np.int64]) -> None:
        self.store.zero(slots)

    def _forward(self, layout: Layout) -> torch.Tensor:
        output = self.model(
            input_ids=layout.ids_T[None],
            position_ids=layout.positions_T[None],
            use_cache=False,
            logits_to_keep=layout.last_rows,
            store=self.store,
            layout=layout,
        )
        logits: torch.Tensor = output.logits
        return logits


def fuse_norms(model: nn.Module) -> int:
    """Replace eager RMS norms by the fused one wherever it gives the same numbers; returns how many."""
    verdicts: dict[tuple[type, int, float], bool] = {}
    count = 0
    for module in model.modules():
        if _may_be_fused(module):
            weight = module.weight
            assert isinstance(weight, nn.Parameter)
            epsilon = _epsilon(module)
            key = (type(module), weight.numel(), epsilon)
            if key not in verdicts:
                verdicts[key] = _fused_is_same(module, epsilon)
            if verdicts[key]:
                module.forward = _fused(module, epsilon)
                count += 1
    return count


def _may_be_fused(module: nn.Module) -> bool:
    """Norms without a weight, and gated ones that take a second input, are left as they are."""
    weight = getattr(module, "weight", None)
    is_norm = type(module).__name__.endswith("RMSNorm") and isinstance(weight, nn.Parameter)
    return is_norm and len(inspect.signature(module.forward).parameters) == 1


class _Fused:
    """``module.forward``, fused."""

    def __init__(self, weight: nn.Parameter, epsilon: float) -> None:
        self.weight = weight
        self.shape = tuple(weight.shape)
        self.epsilon = epsilon

    def __call__(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(hidden_states, self.shape, self.weight, self.epsilon)


def _fused(module: nn.Module, epsilon: float) -> _Fused:
    assert isinstance(module.weight, nn.Parameter)
    return _Fused(module.weight, epsilon)


def _epsilon(module: nn.Module) -> float:
    return float(getattr(module, "variance_epsilon", getattr(module, "eps", 0.0)))


@torch.no_grad()
def _fused_is_same(module: nn.Module, epsilon: float) -> bool:
    """Compare on random weights and inputs: variants add one to the weight or round in between."""
    twin = copy.deepcopy(module)
    assert isinstance(twin.weight, nn.Parameter)
    generator = torch.Generator().manual_seed(0)
    twin.weight.copy_(torch.rand(twin.weight.shape, generator=generator) + 0.5)
    inputs = torch.randn((8, twin.weight.numel()), generator=generator).to(twin.weight)
    fused = _fused(twin, epsilon)(inputs)
    return torch.allclose(twin(inputs), fused, rtol=1e-6, atol=1e-6)
