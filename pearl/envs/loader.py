"""Finds an environment by its built-in name, by "package.module:Class" or by "package.module:rollout", and makes it
from the job's options."""

import inspect
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar, cast

from pearl.envs.protocol import Environment, EnvironmentSpec
from pearl.envs.text import TextEnvironment
from pearl.runtime.extensions import ExtensionError, defined_at, describe_error, load_extension

T = TypeVar("T")

BUILT_IN = {
    "bugfix": "pearl.envs.bugfix:BugfixEnvironment",
    "emulated": "pearl.envs.emulated:EmulatedEnvironment",
    "python-repository": "pearl.envs.repository:RepositoryEnvironment",
    "jsonl": "pearl.envs.jsonl:JsonlEnvironment",
    "harness": "pearl.envs.agents.harness:make_harness_environment",
}

KEY = "environment.name"
NEEDED = ("describe", "episode")
PAGE = "docs/environments.md"

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
        ) from None
    return made(**options)


def _find(name: str) -> type | Callable[[Any, Any], Awaitable[float]]:
    found = load_extension(KEY, name, BUILT_IN)
    what = name.rpartition(":")[2]
    if inspect.iscoroutinefunction(found):
        return found
    if not isinstance(found, type):
        raise ValueError(
            f'{KEY} = "{name}": {what} is a plain function; a rollout is async def {what}(task, client) -> float'
        )
    if not issubclass(found, TextEnvironment):
        _check_methods(name, found)
    return found


def describe(name: str, environment: Environment) -> EnvironmentSpec:
    """Return the environment's description."""
    try:
        spec: object = environment.describe()
    except Exception as error:  # a person's code may raise anything
        raise ExtensionError(f'{KEY} = "{name}": describe raised {describe_error(error)}') from error
    if not isinstance(spec, EnvironmentSpec):
        place = defined_at(getattr(type(environment), "describe", None))
        raise ValueError(
            f'{KEY} = "{name}": describe returned {type(spec).__name__}, not a pearl.envs.protocol.EnvironmentSpec '
            f"({place})"
        )
    return spec


def check_demonstrations(name: str, environment: Environment, num_steps: int) -> None:
    """Refuse a supervised warm start of ``num_steps`` that has nothing to learn from.

    Raises:
        ValueError: the environment has no demonstrations, or gives none.
    """
    way_out = (
        f"set warm_start.num_steps = 0 to begin from the model as it is, or write the method (see {PAGE})"
    )
    asked = f"warm_start.num_steps = {num_steps} asks for a supervised warm start"
    method = getattr(environment, "demonstrations", None)
    if method is None:
        raise ValueError(f"{asked}, but {name} has no method demonstrations: {way_out}")
    try:
        made = method(0, 0, 1)
        count = len(made)
    except Exception as error:  # a person's code may raise anything
        raise ExtensionError(
            f"{asked}, but demonstrations of {name} raised {describe_error(error)}"
        ) from error
    if count == 0:
        raise ValueError(f"{asked}, but demonstrations of {name} gave none ({defined_at(method)}): {way_out}")


def _check_methods(name: str, found: type) -> None:
    methods = {method: getattr(found, method, None) for method in (*NEEDED, "demonstrations")}
    missing = [method for method in NEEDED if not callable(methods[method])]
    if missing:
        raise ValueError(
            f'{KEY} = "{name}": {found.__name__} lacks {", ".join(missing)}; '
            f"pearl.envs.protocol.Environment says what an environment offers, {PAGE} how to write one"
        )
    for method, function in methods.items():
        if inspect.iscoroutinefunction(function):
            raise ValueError(
                f'{KEY} = "{name}": {method} is async ({defined_at(function)}); only reset, step and close of an '
                "episode may be, write it as a plain method"
            )


def _tasks_beside(rollout: Callable[..., Any]) -> Callable[..., Any] | None:
    found = getattr(inspect.getmodule(rollout), "tasks", None)
    return found if callable(found) else None


def _keywords(made: type) -> str:
    return ", ".join(inspect.signature(made).parameters) or "no options"
