"""Loads a person's own router, checks what it answers, and hands it to the core, which imports nothing by name."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from pearl.config import ConfigError
from pearl.core.pipeline.router import STRATEGIES, Candidate, Strategy
from pearl.runtime.extensions import ExtensionError, defined_at, describe_error, load_extension
from pearl.types.config import Config
from pearl.types.ids import Slot


class RouterError(RuntimeError):
    """A person's router raised, or chose a worker that may not serve the trajectory."""


def load_router(config: Config) -> Strategy | None:
    """The router that ``rollout.router`` names by "package.module:function"; None for a built-in one.

    Raises:
        ConfigError: it cannot be loaded, or does not take the three arguments of a router.
    """
    name = config.rollout.router
    if name in STRATEGIES:
        return None
    try:
        function = load_extension("rollout.router", name)
    except ExtensionError as error:
        raise ConfigError(str(error)) from error
    try:
        inspect.signature(function).bind(0, None, ())
    except TypeError as error:
        raise ConfigError(
            f'rollout.router = "{name}": {error} ({defined_at(function)}); a router takes '
            "(context_tokens, last_slot, candidates)"
        ) from None
    return _checked(name, function)


def _checked(name: str, function: Callable[..., Any]) -> Strategy:
    def choose(context_tokens: int, last_slot: Slot | None, candidates: Sequence[Candidate]) -> Slot | None:
        try:
            slot = function(context_tokens, last_slot, candidates)
        except Exception as error:  # a person's code may raise anything
            raise RouterError(f'rollout.router = "{name}" raised {describe_error(error)}') from error
        if slot is None or any(candidate.slot == slot for candidate in candidates):
            chosen: Slot | None = slot
            return chosen
        raise RouterError(
            f'rollout.router = "{name}" chose {slot!r}, which is not a slot of its candidates '
            f"{[candidate.slot for candidate in candidates]} ({defined_at(function)})"
        )

    return choose
