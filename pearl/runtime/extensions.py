"""Loads what a person wrote, by ``package.module:Name``: the one loader of environments, rewards and routers.

A module is looked for among the installed packages and in the folder that the command runs in.
"""

import importlib
import os
import site
import sys
import sysconfig
import traceback
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

from pearl.types.error_text import error_text, escaped

MAX_ERROR_CHARACTERS = 500
_LIBRARIES = tuple(
    os.path.realpath(path) + os.sep
    for path in (
        *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
        *site.getsitepackages(),
    )
)
_PEARL = os.path.dirname(os.path.dirname(os.path.realpath(__file__))) + os.sep


class ExtensionError(ValueError):
    """A name cannot be loaded; the message holds the setting, its value and the way out."""


def load_extension(key: str, name: str, built_in: Mapping[str, str] = {}) -> Callable[..., Any]:
    """Load the class or function that the setting ``key`` names: a built-in name or "package.module:Name".

    Raises:
        ExtensionError: there is no such module or name, or the module cannot be imported.
    """
    module_name, colon, attribute = built_in.get(name, name).partition(":")
    if not colon or not module_name or not attribute:
        known = f"; built in: {', '.join(built_in)}" if built_in else ""
        raise ExtensionError(f'{key} = "{name}" is unknown{known} (your own: "package.module:Name")')
    if (here := os.getcwd()) not in sys.path and "" not in sys.path:
        sys.path.append(here)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ExtensionError(
            f'{key} = "{name}": module {module_name} cannot be imported ({error}); run the command in the folder '
            f"that holds {module_name.partition('.')[0]}, or install it into this interpreter, or put its folder on "
            "PYTHONPATH"
        ) from error
    except Exception as error:  # a person's module may raise anything while it is imported
        raise ExtensionError(
            f'{key} = "{name}": importing {module_name} failed: {describe_error(error)}'
        ) from error
    found = getattr(module, attribute, None)
    if not callable(found):
        names = [
            own
            for own, value in vars(module).items()
            if not own.startswith("_")
            and callable(value)
            and f"{getattr(value, '__module__', '')}.".startswith(f"{module.__name__}.")
        ]
        there = f"it has {', '.join(names)}" if names else "it defines no class and no function"
        raise ExtensionError(f'{key} = "{name}": {module_name} has no {attribute}; {there}')
    loaded: Callable[..., Any] = found
    return loaded


def describe_error(error: BaseException) -> str:
    """Give the error's type, its text (bounded) and the line of the person's own code that led to it."""
    text = f"{type(error).__name__}: {error_text(error, MAX_ERROR_CHARACTERS)}"
    if isinstance(error, SyntaxError) and error.filename:
        return escaped(f"{type(error).__name__}: {error.msg} ({error.filename}:{error.lineno})")
    place = _place(error)
    return escaped(f"{text} ({place})" if place else text)


def format_error(error: BaseException) -> str:
    """Give the whole traceback as text, without PEARL's own frames at its beginning."""
    lines = traceback.TracebackException.from_exception(error)
    while len(lines.stack) > 1 and os.path.realpath(lines.stack[0].filename).startswith(_PEARL):
        del lines.stack[0]
    return "".join(lines.format()).rstrip()


def defined_at(found: object) -> str:
    """Give "file:line" of a function, "" for what has no source."""
    code = getattr(found, "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code is not None else ""


def _place(error: BaseException) -> str:
    """The innermost line outside of libraries and of PEARL; else the innermost of all."""
    innermost = own = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        innermost = f"{frame.f_code.co_filename}:{line}"
        if not _is_library(frame):
            own = innermost
    return own or innermost


def _is_library(frame: FrameType) -> bool:
    path = os.path.realpath(frame.f_code.co_filename)
    return path.startswith((*_LIBRARIES, _PEARL)) or path.startswith("<")
