"""A model's tensors under the names and in the shapes of a checkpoint, as views of those that it has in memory.

``transformers`` holds the experts of a layer as one tensor, a checkpoint and SGLang each by its own name. Its own rules
for saving say which is which; here they run on tensors without memory, once, and tell where each piece lies.
"""

from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

CLONE = torch.ops.aten.clone.default


class Piece(NamedTuple):
    """Offset and strides are in elements of the tensor, whose elements lie in order."""

    name: str  # in a checkpoint
    tensor: str  # canonical name of the one that it is a part of
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def checkpoint_pieces(model: PreTrainedModel) -> tuple[Piece, ...]:
    """Return the checkpoint pieces of a model on the meta device, tied tensors under each of their names."""
    stand_ins: dict[int, torch.Tensor] = {}
    names: dict[int, str] = {}  # canonical name by storage
    given: dict[str, torch.Tensor] = {}
    for name, tensor in sorted(model.state_dict(keep_vars=True).items()):
        stand_in = stand_ins.setdefault(
            id(tensor), torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        )
        names.setdefault(_storage(stand_in), name)
        given[name] = stand_in
    with _Views():  # type: ignore[no-untyped-call]
        reverted = revert_weight_conversion(model, given)
    pieces = []
    for name, tensor in sorted(reverted.items()):
        canonical = names.get(_storage(tensor))
        if canonical is None:
            raise ValueError(
                f"SGLang cannot be given {name!r} of {type(model).__name__}: a checkpoint holds it in a layout that is "
                'no view of the model\'s own; use rollout.engine = "torch"'
            )
        pieces.append(
            Piece(name, canonical, int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride())
        )
    return tuple(pieces)


def _storage(tensor: torch.Tensor) -> int:
    """Return the identity of a storage, also where it has no memory."""
    identity: int = tensor.untyped_storage()._cdata
    return identity


class _Views(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Copies for the sake of contiguous memory stay views."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is CLONE:
            return args[0].detach()
        return func(*args, **(kwargs or {}))
