"""``pearl preempt``: takes GPUs from a live run and gives it others, at once or as a trace says."""

import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import NamedTuple

from pearl.cli.coordinator_client import CoordinatorClient, SilentError, select_run, with_client
from pearl.cli.numbers import MAX_GPUS, MAX_WAIT_S, whole_number
from pearl.cli.player import Player, describe, said
from pearl.runtime.clock import MonotonicClock
from pearl.runtime.errors import RemoteError
from pearl.runtime.run_registry import LiveRun
from pearl.traces import at_most, read_trace
from pearl.types.exit_codes import EXIT_FAILURE, EXIT_USAGE
from pearl.types.messages.control import Preempt
from pearl.types.trace import Action


class Choice(NamedTuple):
    """GPUs by their ids, or how many of them."""

    gpus: tuple[str, ...] = ()
    number: int = 0


def choose(text: str) -> Choice:
    """``local/3,local/4`` or ``2``.

    Raises:
        ValueError: it is neither.
    """
    if text.strip().lstrip("+-").isdecimal():
        try:
            return Choice(number=whole_number(text, 1, MAX_GPUS))
        except ValueError as error:
            raise ValueError(f"--gpus {error}, or ids like local/3") from None
    gpus = tuple(gpu.strip() for gpu in text.split(","))
    for gpu in gpus:
        host, _, name = gpu.rpartition("/")
        if not (host and name):
            raise ValueError(
                f'--gpus {text}: "{gpu}" is not the id of a GPU; give ids like local/3,local/4, or a count'
            )
    if len(set(gpus)) < len(gpus):
        raise ValueError(f"--gpus {text}: names a GPU twice")
    return Choice(gpus=gpus)


def preempt(run_dir: Path | None, action: Action, choice: Choice, grace_s: float = 30.0) -> int:
    """One arrival or reclaim, now; 2 when the run refuses it.

    Raises:
        ValueError: the grace is none.
    """
    if not 0 <= grace_s <= MAX_WAIT_S:
        raise ValueError(f"--grace {grace_s:g}: give seconds, from 0 to {MAX_WAIT_S:g}")
    message = Preempt(action, choice.gpus, choice.number, grace_s)

    async def once(client: CoordinatorClient) -> int:
        try:
            print(said(message, await client.preempt(message)))
        except RemoteError as error:
            # What the run can say no to is a mistake of the person; anything else is one of ours.
            wrongly = error.kind == "ValueError"
            return _fail(
                f"refused: {error.text if wrongly else error}", EXIT_USAGE if wrongly else EXIT_FAILURE
            )
        return 0

    run = select_run(run_dir, changes_it=True)
    return EXIT_FAILURE if run is None else _talk(run, once)


def replay(
    run_dir: Path | None,
    path: Path,
    *,
    speed: float = 1.0,
    max_gpus: int | None = None,
    gpus_per_node: int = 1,
) -> int:
    """Play a trace into the run: by time from now on, or by the run's step; 1 when an event was refused or the run
    ended before the trace did.

    Raises:
        ValueError: the trace, a number, or the two together with the run are wrong; nothing has been played then.
    """
    events = read_trace(path, speed=speed, gpus_per_node=gpus_per_node)
    if speed != 1.0 and any(event.at_step is not None for event in events):
        raise ValueError(f"--speed {speed:g}: {path} goes by the run's steps, which have their own pace")
    if max_gpus is not None:
        if max_gpus < 1:
            raise ValueError(f"--max-gpus {max_gpus}: give at least 1")
        events = at_most(events, max_gpus)
    run = select_run(run_dir, changes_it=True)
    if run is None:
        return EXIT_FAILURE
    player = Player(events, MonotonicClock())
    print(f"playing {path}, {describe(events)}, into {run.run_dir}", flush=True)
    try:
        code = _talk(run, player.play)
    except KeyboardInterrupt:
        print(f"stopped; {player.progress}", file=sys.stderr)
        raise
    print(player.progress, file=sys.stderr if code else sys.stdout)
    return code


def _talk(run: LiveRun, talk: Callable[[CoordinatorClient], Awaitable[int]]) -> int:
    try:
        return with_client(run, talk)
    except SilentError as error:
        return _fail(f"{run.run_dir}: {error}", EXIT_FAILURE)


def _fail(problem: str, code: int) -> int:
    print(f"error: {problem}", file=sys.stderr)
    return code
