"""See ``torchvision``. Every transform is there by name and fails when it is called."""

import enum
import sys
import types
from typing import Any, NoReturn


class InterpolationMode(enum.Enum):
    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


def _missing(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_: object, **__: object) -> NoReturn:
        raise NotImplementedError(f"torchvision stand-in: {name}")

    return missing


class _Names(types.ModuleType):
    InterpolationMode = InterpolationMode

    def __getattr__(self, name: str) -> Any:
        return _missing(name)


functional = _Names(f"{__name__}.functional")
v2 = _Names(f"{__name__}.v2")
v2.functional = functional  # type: ignore[attr-defined]
sys.modules |= {
    f"{__name__}.functional": functional,
    f"{__name__}.v2": v2,
    f"{__name__}.v2.functional": functional,
}


def __getattr__(name: str) -> Any:
    return _missing(name)
