"""Operations through which one token reaches another outside of attention.

Trainer and torch engine put tokens of several sequences into one row, and the engine computes a sequence piece by
piece: both are right only when everything but attention treats each token by itself.
"""

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import masking_utils

OVER_A_DIMENSION = {
    "cumsum",
    "cumprod",
    "cummax",
    "cummin",
    "flip",
    "roll",
    "_softmax",
    "_log_softmax",
    "logcumsumexp",
}
CONVOLUTIONS = {"convolution", "convolution_overrideable", "_fft_r2c", "_fft_c2c"}
PRODUCTS = {"mm", "bmm", "addmm", "baddbmm"}


class MixingWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes operations that mix the ``num_tokens`` tokens of a row, or that number them anew."""

    def __init__(self, num_tokens: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._num_tokens = num_tokens
        self._found: dict[str, None] = {}

    def problems(self) -> list[str]:
        return [f"its tokens meet outside of attention: {name}" for name in self._found]

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = str(function.overloadpacket.__name__)
        if (problem := self._problem(name, args)) and not _makes_a_mask():
            self._found[problem] = None
        result: Callable[..., Any] = function(*args, **(kwargs or {}))
        return result

    def _problem(self, name: str, args: tuple[Any, ...]) -> str:
        if name == "arange" and self._num_tokens in args:
            return "it numbers the tokens of a row by itself"
        if name in CONVOLUTIONS:
            return "a convolution"
        if name in OVER_A_DIMENSION and self._is_over_tokens(args):
            return f"{name.strip('_')} over tokens"
        if name in PRODUCTS and self._contracts_tokens(args):
            return "a product over tokens"
        return ""

    def _is_over_tokens(self, args: tuple[Any, ...]) -> bool:
        tensor, dimension = args[0], args[1]
        dimensions = dimension if isinstance(dimension, (list, tuple)) else [dimension]
        return any(tensor.dim() and tensor.shape[d] == self._num_tokens for d in dimensions)

    def _contracts_tokens(self, args: tuple[Any, ...]) -> bool:
        left = [argument for argument in args if isinstance(argument, torch.Tensor)][-2]
        return bool(left.shape[-1] == self._num_tokens)


def _makes_a_mask() -> bool:
    """Whether ``transformers`` is making an attention mask: those are judged by themselves."""
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code.co_filename == masking_utils.__file__:
            return True
    return False
