from pearl import runs as runs
from pearl.api import RunError as RunError
from pearl.api import run as run

__all__ = ["RunError", "run", "runs"]
