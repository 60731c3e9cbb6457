"""In which dtype each tensor of a served model is: some models keep routers and the like in float32.

``from_pretrained`` follows a plan that the model's class has; what is trained and published follows the same one.
"""

from collections.abc import Iterable

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.core_model_loading import build_glob_alternation


class ServedDtypes:
    """Of the tensors of ``model`` when it is loaded as ``dtype``."""

    def __init__(self, model: PreTrainedModel, dtype: torch.dtype) -> None:
        self.dtype = dtype
        patterns = [name for name, kept in model._get_dtype_plan(dtype).items() if kept == torch.float32]
        self._kept = build_glob_alternation(patterns)[0] if patterns else None

    def of(self, name: str, tensor: torch.Tensor) -> torch.dtype:
        """``tensor`` in any floating dtype; what is not floating stays what it is."""
        if not tensor.is_floating_point():
            return tensor.dtype
        return torch.float32 if self.is_kept(name) else self.dtype

    def is_kept(self, name: str) -> bool:
        """Whether it is float32 whatever the model is loaded as."""
        return self._kept is not None and self._kept.search(name) is not None

    def kept_modules(self, model: nn.Module) -> list[nn.Module]:
        """Modules all of whose parameters are kept in float32, the outermost ones.

        Raises:
            ValueError: a parameter is kept that has neighbours in the same module which are not.
        """
        found: list[nn.Module] = []
        self._collect(model, "", found)
        return found

    def _collect(self, module: nn.Module, prefix: str, found: list[nn.Module]) -> None:
        names = [prefix + name for name, _ in module.named_parameters()]
        kept = [name for name in names if self.is_kept(name)]
        if names and len(kept) == len(names):
            found.append(module)
        elif kept:
            if own := self._own(module, prefix):
                raise ValueError(
                    f"its {own!r} is kept in float32 within a module that is not, which training lacks"
                )
            for name, child in module.named_children():
                self._collect(child, f"{prefix}{name}.", found)

    def _own(self, module: nn.Module, prefix: str) -> str:
        names: Iterable[str] = (prefix + name for name, _ in module.named_parameters(recurse=False))
        return next((name for name in names if self.is_kept(name)), "")


def cast_persistent_buffers(model: PreTrainedModel, served: ServedDtypes) -> None:
    """Buffers that a snapshot holds, into the dtype in which an engine has them; parameters stay as they are."""
    persistent = model.state_dict().keys()
    for path, module in model.named_modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            full = f"{path}.{name}" if path else name
            if full in persistent:
                setattr(module, name, buffer.to(served.of(full, buffer)))
