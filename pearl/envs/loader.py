"""Finds an environment by its built-in name or by "package.module:Class" and makes it from the job's options."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, cast

from pearl.envs.protocol import Environment, EnvironmentSpec
from pearl.runtime.extensions import ExtensionError, defined_at, describe_error, load_extension

BUILT_IN = {
    "bugfix": "pearl.envs.bugfix:BugfixEnvironment",
    "emulated": "pearl.envs.emulated:EmulatedEnvironment",
}
KEY = "environment.name"
NEEDED = ("describe", "episode")
PAGE = "docs/environments.md"

Options = Mapping[str, int | float | str | bool]


def load_environment(name: str, options: Options) -> Environment:
    """The environment called ``name``; ``options`` are the keywords of its class, or of the function that makes it.

    Raises:
        ValueError: the name or an option is wrong; the message has key, value and the way out.
    """
    maker = load_extension(KEY, name, BUILT_IN)
    if isinstance(maker, type):
        _check_methods(name, maker)
    try:
        inspect.signature(maker).bind(**options)
    except TypeError as error:
        raise ValueError(
            f"environment.options = {dict(options)}: {error}; {name} takes {_keywords(maker)}"
        ) from None
    made = maker(**options)
    _check_methods(name, made)
    return cast(Environment, made)


def describe(name: str, environment: Environment) -> EnvironmentSpec:
    """What the environment says of itself.

    Raises:
        ValueError: it raised, or answered something that is no EnvironmentSpec.
    """
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


def _check_methods(name: str, found: object) -> None:
    methods = {method: getattr(found, method, None) for method in (*NEEDED, "demonstrations")}
    missing = [method for method in NEEDED if not callable(methods[method])]
    if missing:
        what = found.__name__ if isinstance(found, type) else type(found).__name__
        raise ValueError(
            f'{KEY} = "{name}": {what} lacks {", ".join(missing)}; '
            f"pearl.envs.protocol.Environment says what an environment offers, {PAGE} how to write one"
        )
    for method, function in methods.items():
        if inspect.iscoroutinefunction(function):
            raise ValueError(
                f'{KEY} = "{name}": {method} is async ({defined_at(function)}); only reset, step and close of an '
                "episode may be, write it as a plain method"
            )


def _keywords(made: Callable[..., Any]) -> str:
    return ", ".join(inspect.signature(made).parameters) or "no options"
