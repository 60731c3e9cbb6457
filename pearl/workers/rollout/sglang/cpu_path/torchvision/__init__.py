"""Stands in for torchvision, of which SGLang imports a few names at module level even for text models: the real one
does not load beside a CPU build of torch."""

from . import io as io
from . import transforms as transforms

__version__ = "0.0.0"
