"""PEARL from Python: ``pearl.run`` runs a job, ``pearl.runs.open`` reads what a run left. Imports nothing heavy.

The names' types are in ``__init__.pyi``: this module imports none of them, so that imports of ``pearl`` stay cheap.
"""

from importlib import import_module
from typing import Any

__all__ = ["RunError", "run", "runs"]


def __getattr__(name: str) -> Any:
    """Import the part that is asked for: ``import pearl`` happens in every worker, which needs none of them."""
    if name == "runs":
        return import_module("pearl.runs")
    if name in __all__:
        return getattr(import_module("pearl.api"), name)
    raise AttributeError(f"module 'pearl' has no attribute {name!r}")
