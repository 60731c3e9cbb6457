"""Errors of building a model that any later try would meet again."""

from collections.abc import Iterator
from contextlib import contextmanager

from safetensors import SafetensorError

from pearl.runtime.errors import FinalError

KINDS = (
    ValueError,
    TypeError,
    AttributeError,
    LookupError,
    ImportError,
    NotImplementedError,
    FileNotFoundError,
    SafetensorError,
)
"""Not among them: want of memory, time-outs, lost connections, a disk that fails; those may pass."""


@contextmanager
def final_errors() -> Iterator[None]:
    """Whatever of these kinds is raised inside comes out as FinalError, with its text and its first cause."""
    try:
        yield
    except KINDS as error:
        text = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        cause = _first_cause(error)
        if cause is not error and str(cause) not in text:
            text += f" (first cause: {type(cause).__name__}: {cause})"
        raise FinalError(text) from error


def _first_cause(error: BaseException) -> BaseException:
    while error.__cause__ is not None:
        error = error.__cause__
    return error
