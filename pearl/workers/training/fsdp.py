"""The policy sharded over the training world (FSDP2), its optimizer, and collectives over its tensors.

Every function that gathers or reduces is a collective: all ranks call it, in the same order. Master weights are
float32; with ``model.dtype = "bfloat16"`` the forward computes in bfloat16 and snapshots are bfloat16.
"""

import math
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel

from pearl.types.config import ModelConfig
from pearl.workers.architecture.attach import attach_attention
from pearl.workers.architecture.dtypes import ServedDtypes, cast_persistent_buffers
from pearl.workers.model import build_shapes, check_precision, first_weights
from pearl.workers.training.activations import checkpoint_activations, decoder_layers
from pearl.workers.training.flops import Flops
from pearl.workers.training.output_layer import OutputLayer, is_tied, output_layer
from pearl.workers.training.packing import NAME, Packed
from pearl.workers.training.scoring import Scores
from pearl.workers.weight_source import WeightSource
from pearl.workers.weight_transfer.checksum import canonical_tensors

MOMENTS = ("exp_avg", "exp_avg_sq")
"""Per-parameter tensors of AdamW."""
CLIP_EPSILON = 1e-6
NORM_PIECE = 1 << 20


class Policy:
    """This rank's part of the model. Construct it on all ranks; needs the default process group."""

    def __init__(
        self,
        config: ModelConfig,
        vocabulary_size: int,
        seed: int,
        device: torch.device,
        activation_checkpointing: bool = True,
        max_context_tokens: int = 32768,
    ) -> None:
        """``vocabulary_size``: ids that may be trained; further rows of the model are padding.

        Raises:
            ValueError: the model cannot be trained; says why.
        """
        self.device = device
        self.num_ranks = dist.get_world_size()
        model = build_shapes(config, vocabulary_size)
        check_precision(config, device, sum(parameter.numel() for parameter in model.parameters()))
        source = first_weights(config, model, seed)
        self.served = ServedDtypes(model, getattr(torch, config.dtype))
        cast_persistent_buffers(model, self.served)
        attach_attention(model, NAME, max_context_tokens)
        self.vocabulary_size = vocabulary_size
        self.model: nn.Module = model
        self.flops = Flops.of(model)
        self.output_layer = OutputLayer(model, self.vocabulary_size)
        layers = decoder_layers(model)
        if activation_checkpointing:
            for layer in layers:
                checkpoint_activations(layer)
        # A world of one in one dtype would only copy all weights and gradients at each forward and backward.
        self._is_sharded = self.num_ranks > 1 or self.served.dtype != torch.float32
        if self._is_sharded:
            self._shard(model, layers)
        self._materialize(source)
        self.parameters = dict(self.model.named_parameters())

    def _shard(self, model: PreTrainedModel, layers: list[nn.Module]) -> None:
        mesh = init_device_mesh(self.device.type, (self.num_ranks,))
        # Gradients are summed in float32 over ranks and, in the parameters' own dtype, over micro-batches.
        mixed = MixedPrecisionPolicy(param_dtype=self.served.dtype, reduce_dtype=torch.float32)
        kept = MixedPrecisionPolicy(torch.float32, torch.float32, cast_forward_inputs=False)
        for module in self.served.kept_modules(self.model):
            fully_shard(module, mesh=mesh, mp_policy=kept)
        for layer in layers:
            fully_shard(layer, mesh=mesh, mp_policy=mixed)
        if not is_tied(model):
            fully_shard(model.get_input_embeddings(), mesh=mesh, mp_policy=mixed)
            # The backward begins with it: gathering it twice would buy nothing.
            fully_shard(output_layer(model), mesh=mesh, mp_policy=mixed, reshard_after_forward=False)
        fully_shard(model, mesh=mesh, mp_policy=mixed)

    def _materialize(self, source: WeightSource) -> None:
        """Memory for this rank's part of the parameters, and their first values, read row by row."""
        buffers = [
            (module, name, buffer)
            for module in self.model.modules()
            for name, buffer in module.named_buffers(recurse=False)
        ]
        if self._is_sharded:
            self.model.to_empty(device=self.device)
        else:
            _materialize_plain(self.model, self.device)
        for module, name, buffer in buffers:  # they were real all the time
            setattr(module, name, buffer.to(self.device))
        with torch.no_grad():
            for name, tensor in self.tensors():
                start, end = own_rows(tensor)
                local_shard(tensor).copy_(source.rows(name, start, end))

    def score(self, packed: Packed, temperature: float, has_entropy_gradient: bool = False) -> Scores:
        """All ranks call it together, those without a sequence too."""
        return self.output_layer.score(packed, temperature, has_entropy_gradient)

    # gradients

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradient of the sum over ranks of ``loss``; the sharding divides by their number."""
        torch.autograd.backward(loss * self.num_ranks)

    def gradient_norm(self) -> float:
        """L2, over all ranks' shards."""
        squares = torch.zeros(1, dtype=torch.float64, device=self.device)
        for gradient in self.gradients():
            for piece in torch.split(gradient.reshape(-1), NORM_PIECE):  # no second copy of a large one
                squares += piece.double().square().sum()
        dist.all_reduce(squares)
        return math.sqrt(squares.item()) if squares.item() >= 0 else math.nan

    def scale_gradients(self, factor: float) -> None:
        for gradient in self.gradients():
            gradient.mul_(factor)

    def gradients(self) -> Iterator[torch.Tensor]:
        """This rank's parts of those there are."""
        for parameter in self.parameters.values():
            if parameter.grad is not None:
                yield local_shard(parameter.grad)

    def reshard(self) -> None:
        """After a forward without a backward: until then the root keeps the gathered weights, old or new."""
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    # whole tensors

    def tensors(self) -> list[tuple[str, torch.Tensor]]:
        """This rank's part of everything a snapshot holds, in name order."""
        return canonical_tensors(self.model)

    def served_tensors(self) -> list[tuple[str, torch.Tensor]]:
        """Yield all tensors, each in the dtype in which an engine holds it."""
        return [(name, tensor.to(self.served.of(name, tensor))) for name, tensor in self.tensors()]

    def load(self, read: Callable[[str], torch.Tensor]) -> None:
        """Take every tensor whole from ``read(name)`` and keep this rank's part."""
        with torch.no_grad():
            for name, tensor in self.tensors():
                local_shard(tensor).copy_(local_shard(shard_like(read(name), tensor)))

    # keeping and lending weights

    def clone(self) -> dict[str, torch.Tensor]:
        """This rank's part of the weights as they are now, in the same form as ``tensors``."""
        return {name: tensor.detach().clone() for name, tensor in self.tensors()}

    def assign(self, weights: dict[str, torch.Tensor]) -> None:
        with torch.no_grad():
            for name, tensor in self.tensors():
                local_shard(tensor).copy_(local_shard(weights[name]))


def _materialize_plain(model: nn.Module, device: torch.device) -> None:
    """Give parameters memory on ``device``; those that are one tensor under several names stay one."""
    made: dict[int, nn.Parameter] = {}
    replaced: list[nn.Parameter] = []  # alive, so that each keeps its identity to the end
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) not in made:
                replaced.append(parameter)
                made[id(parameter)] = nn.Parameter(torch.empty_like(parameter, device=device))
            setattr(module, name, made[id(parameter)])


def local_shard(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part, sharing its storage."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def own_rows(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the rows of the first dimension that this rank holds."""
    length = len(tensor) if tensor.dim() else 1
    if not isinstance(tensor, DTensor):
        return 0, length
    [placement] = tensor.placements
    assert placement.is_shard(0), placement
    chunk = -(-length // tensor.device_mesh.size())
    start = min(length, tensor.device_mesh.get_local_rank() * chunk)
    end = start + len(tensor.to_local())
    assert end == min(length, start + chunk), (start, end, length)
    return start, end


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The whole tensor on every rank. A collective."""
    return tensor.full_tensor().detach() if isinstance(tensor, DTensor) else tensor.detach()


def shard_like(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """``tensor``, which every rank holds whole, in the form of ``like``. No collective."""
    moved = tensor.to(like.device, like.dtype)
    if not isinstance(like, DTensor):
        return moved
    return distribute_tensor(moved, like.device_mesh, like.placements, src_data_rank=None)


# the optimizer


def make_optimizer(
    policy: Policy, learning_rate: float, betas: tuple[float, float], weight_decay: float
) -> torch.optim.AdamW:
    return torch.optim.AdamW(
        policy.parameters.values(), lr=learning_rate, betas=betas, weight_decay=weight_decay, fused=True
    )


def apply_update(
    policy: Policy, optimizer: torch.optim.AdamW, learning_rate: float, max_grad_norm: float
) -> tuple[float, bool]:
    """Clip, step and clear the gradients -> (norm before clipping, whether the step was done).

    A norm that is not finite skips the step: weights and moments stay as they were, on all ranks alike.
    """
    norm = policy.gradient_norm()
    is_finite = math.isfinite(norm)
    if is_finite:
        if norm > max_grad_norm:
            policy.scale_gradients(max_grad_norm / (norm + CLIP_EPSILON))
        for group in optimizer.param_groups:
            group["lr"] = learning_rate
        optimizer.step()
    optimizer.zero_grad()
    return norm, is_finite


def optimizer_tensors(policy: Policy, optimizer: torch.optim.AdamW) -> list[tuple[str, torch.Tensor]]:
    """This rank's part of the moments and the step counts, the same names in the same order on all ranks."""
    tensors: list[tuple[str, torch.Tensor]] = []
    for name, parameter in policy.parameters.items():
        state = optimizer.state.get(parameter, {})
        tensors += [(f"{kind}.{name}", state[kind]) for kind in (*MOMENTS, "step") if kind in state]
    return tensors


def load_optimizer(
    policy: Policy, optimizer: torch.optim.AdamW, names: set[str], read: Callable[[str], torch.Tensor]
) -> None:
    """The inverse of ``optimizer_tensors`` on whole tensors, for any number of ranks."""
    for name, parameter in policy.parameters.items():
        if f"step.{name}" in names:
            state = {kind: shard_like(read(f"{kind}.{name}"), parameter) for kind in MOMENTS}
            step = read(f"step.{name}").to(policy.device)
            optimizer.state[parameter] = {"step": step, **state}
