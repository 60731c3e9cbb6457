"""Finds an environment by its built-in name, by "package.module:Class" or by "package.module:rollout", and makes it
from the job's options."""

import importlib
import inspect
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar, cast

from pearl.envs.protocol import Environment
from pearl.envs.text import TextEnvironment

T = TypeVar("T")

BUILT_IN = {
    "bugfix": "pearl.envs.bugfix:BugfixEnvironment",
    "emulated": "pearl.envs.emulated:EmulatedEnvironment",
    "harness": "pearl.envs.agents.harness:make_harness_environment",
}

Options = Mapping[str, int | float | str | bool]


def load_environment(name: str, options: Options, model_path: str = "") -> Environment:
    """The environment called ``name``; ``options`` are the keywords of its class.

    Those in text take the options of ``ChatOptions`` too; ``model_path`` is where their tokenizer is by default.

    Raises:
        ValueError: the name or an option is wrong; the message has key, value and the way out.
    """
    if name == "harness":
        from pearl.envs.agents.harness import make_harness_environment

        return make_harness_environment(options, model_path)
    made = _find(name)
    if not isinstance(made, type):
        from pearl.envs.agents.rollout import make_rollout_environment

        return make_rollout_environment(made, _tasks_beside(made), options, model_path)
    if issubclass(made, TextEnvironment):
        # Only here, since they take a tenth of a second to import.
        from pearl.envs.text.environment import RenderedEnvironment
        from pearl.envs.text.options import make_chat, split_options

        chat, options = split_options(options)
        return RenderedEnvironment(_make(made, name, options), make_chat(chat, model_path))
    return cast(Environment, _make(made, name, options))


def _make(made: type[T], name: str, options: Options) -> T:
    try:
        inspect.signature(made).bind(**options)
    except TypeError as error:
        raise ValueError(
            f"environment.options = {dict(options)}: {error}; {name} takes {_keywords(made)}"
        ) from error
    return made(**options)


def _find(name: str) -> type | Callable[[Any, Any], Awaitable[float]]:
    module_name, colon, class_name = BUILT_IN.get(name, name).partition(":")
    if not colon or not module_name or not class_name:
        raise ValueError(
            f'environment.name = "{name}" is unknown; built in: {", ".join(BUILT_IN)} '
            '(your own: "package.module:Class" or "package.module:rollout")'
        )
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ValueError(
            f'environment.name = "{name}": module {module_name} cannot be imported ({error}); '
            "install it into this interpreter or put its directory on PYTHONPATH"
        ) from error
    found = getattr(module, class_name, None)
    if inspect.iscoroutinefunction(found):
        return found
    if inspect.isfunction(found) and found.__module__ == module_name:
        raise ValueError(
            f'environment.name = "{name}": {class_name} is a plain function; a rollout is '
            f"async def {class_name}(task, client) -> float"
        )
    if not isinstance(found, type):
        classes = [key for key, value in vars(module).items() if isinstance(value, type)]
        raise ValueError(
            f'environment.name = "{name}": {module_name} has no class {class_name}; it has {", ".join(classes)}'
        )
    if issubclass(found, TextEnvironment):
        return found
    missing = [method for method in ("describe", "episode", "demonstrations") if not hasattr(found, method)]
    if missing:
        raise ValueError(
            f'environment.name = "{name}": {class_name} lacks {", ".join(missing)}; '
            "pearl.envs.protocol.Environment says what an environment offers"
        )
    return found


def _tasks_beside(rollout: Callable[..., Any]) -> Callable[..., Any] | None:
    found = getattr(inspect.getmodule(rollout), "tasks", None)
    return found if callable(found) else None


def _keywords(made: type) -> str:
    return ", ".join(inspect.signature(made).parameters) or "no options"
