"""Which keys a query may see, by positions alone, and how ``transformers``' mask functions are recognized."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from transformers import masking_utils

Kind = Literal["causal", "sliding", "chunked"]
SLIDING = masking_utils.sliding_window_overlay(1).__code__
CHUNKED = masking_utils.chunked_overlay(1, torch.zeros(1)).__code__
ALL_OF = masking_utils.and_masks().__code__


@dataclass(frozen=True, slots=True)
class Mask:
    """``size`` in tokens: a query sees itself and ``size - 1`` before it, or those of its own chunk up to itself."""

    kind: Kind = "causal"
    size: int = 0

    def hidden(self, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """True where a key is not seen; positions that broadcast against each other."""
        hidden = keys > queries
        match self.kind:
            case "sliding":
                hidden |= keys <= queries - self.size
            case "chunked":
                hidden |= keys // self.size != queries // self.size
            case "causal":
                pass
        return hidden

    def hides_past(self, num_tokens: int) -> bool:
        """Whether it differs from plain causality among the first ``num_tokens`` positions."""
        return self.kind != "causal" and num_tokens > self.size

    def __str__(self) -> str:
        return self.kind if self.kind == "causal" else f"{self.kind} {self.size}"


CAUSAL = Mask()


def recognize(mask_function: Callable[..., Any]) -> Mask:
    """The mask that a ``transformers`` mask function computes.

    Raises:
        ValueError: it is none of those that are known; says what it is made of.
    """
    found = CAUSAL
    for part in _parts(mask_function):
        mask = _simple(part)
        if mask is None or (mask is not CAUSAL and found is not CAUSAL):
            names = ", ".join(sorted(_name(p) for p in _parts(mask_function)))
            raise ValueError(f"its attention mask is made of {names}, which is not a known one")
        found = found if mask is CAUSAL else mask
    return found


def _parts(function: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    if getattr(function, "__code__", None) is ALL_OF:
        for part in _captured(function)["mask_functions"]:
            yield from _parts(part)
    else:
        yield function


def _simple(function: Callable[..., Any]) -> Mask | None:
    code = getattr(function, "__code__", None)
    if function is masking_utils.causal_mask_function:
        return CAUSAL
    if code is SLIDING:
        return Mask("sliding", int(_captured(function)["sliding_window"]))
    if code is CHUNKED:
        return Mask("chunked", int(_captured(function)["chunk_size"]))
    return None


def _captured(function: Callable[..., Any]) -> dict[str, Any]:
    code: Any = getattr(function, "__code__", None)
    cells: Any = getattr(function, "__closure__", None)
    return {name: cell.cell_contents for name, cell in zip(code.co_freevars, cells or (), strict=True)}


def _name(function: Callable[..., Any]) -> str:
    name: str = getattr(function, "__qualname__", repr(function))
    return name.split(".")[0]
