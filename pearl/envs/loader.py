"""Finds an environment by its built-in name or by "package.module:Class" and makes it from the job's options."""

import importlib
import inspect
from collections.abc import Mapping
from typing import cast

from pearl.envs.protocol import Environment

BUILT_IN = {
    "bugfix": "pearl.envs.bugfix:BugfixEnvironment",
    "emulated": "pearl.envs.emulated:EmulatedEnvironment",
}

Options = Mapping[str, int | float | str | bool]


def load_environment(name: str, options: Options) -> Environment:
    """The environment called ``name``; ``options`` are the keywords of its class.

    Raises:
        ValueError: the name or an option is wrong; the message has key, value and the way out.
    """
    made = _find(name)
    try:
        inspect.signature(made).bind(**options)
    except TypeError as error:
        raise ValueError(
            f"environment.options = {dict(options)}: {error}; {name} takes {_keywords(made)}"
        ) from error
    return cast(Environment, made(**options))


def _find(name: str) -> type:
    module_name, colon, class_name = BUILT_IN.get(name, name).partition(":")
    if not colon or not module_name or not class_name:
        raise ValueError(
            f'environment.name = "{name}" is unknown; built in: {", ".join(BUILT_IN)} '
            '(your own: "package.module:Class")'
        )
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ValueError(
            f'environment.name = "{name}": module {module_name} cannot be imported ({error}); '
            "install it into this interpreter or put its directory on PYTHONPATH"
        ) from error
    found = getattr(module, class_name, None)
    if not isinstance(found, type):
        classes = [key for key, value in vars(module).items() if isinstance(value, type)]
        raise ValueError(
            f'environment.name = "{name}": {module_name} has no class {class_name}; it has {", ".join(classes)}'
        )
    missing = [method for method in ("describe", "episode", "demonstrations") if not hasattr(found, method)]
    if missing:
        raise ValueError(
            f'environment.name = "{name}": {class_name} lacks {", ".join(missing)}; '
            "pearl.envs.protocol.Environment says what an environment offers"
        )
    return found


def _keywords(made: type) -> str:
    return ", ".join(inspect.signature(made).parameters) or "no options"
