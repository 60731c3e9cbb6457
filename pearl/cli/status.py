"""``pearl status``: asks a live run's coordinator for its worker table and prints it, once or again and again."""

import asyncio
import sys
from pathlib import Path

import msgspec

from pearl.cli.coordinator_client import CoordinatorClient, EndedError, SilentError, select_run, with_client
from pearl.cli.output import wide_console
from pearl.cli.tables import Status, view
from pearl.runtime.run_registry import LiveRun
from pearl.types.exit_codes import EXIT_FAILURE


def status(run_dir: Path | None, *, as_json: bool, every_s: float | None = None) -> int:
    """Print the status of ``run_dir``'s run, or of the newest live one; 1 when there is none or it is silent.

    With ``every_s`` again and again, until the run ends: in place on a terminal, one after the other elsewhere.
    """
    run = select_run(run_dir)
    if run is None:
        return EXIT_FAILURE
    try:
        return with_client(run, lambda client: _show(run, client, as_json, every_s))
    except EndedError as error:
        if every_s is None:
            return _fail(run, str(error))
        print(f"{run.run_dir}: {error}")
        return 0
    except SilentError as error:
        return _fail(run, str(error))


def _fail(run: LiveRun, problem: str) -> int:
    print(f"error: {run.run_dir}: {problem}", file=sys.stderr)
    return EXIT_FAILURE


async def _show(run: LiveRun, client: CoordinatorClient, as_json: bool, every_s: float | None) -> int:
    if as_json:
        await _print_json(client, every_s)
    elif every_s is None or not sys.stdout.isatty():
        await _print_tables(run, client, every_s)
    else:
        await _watch(run, client, every_s)
    return 0


async def _print_json(client: CoordinatorClient, every_s: float | None) -> None:
    while True:
        print((await client.status()).decode(), flush=True)
        if every_s is None:
            return
        await asyncio.sleep(every_s)


async def _print_tables(run: LiveRun, client: CoordinatorClient, every_s: float | None) -> None:
    console = wide_console()
    while True:
        console.print(view(run, _decode(await client.status()), console.width), soft_wrap=False)
        if every_s is None:
            return
        await asyncio.sleep(every_s)


async def _watch(run: LiveRun, client: CoordinatorClient, every_s: float) -> None:
    from rich.live import Live

    with Live(auto_refresh=False) as live:
        while True:
            answer = _decode(await client.status())
            live.update(view(run, answer, live.console.width), refresh=True)
            await asyncio.sleep(every_s)


def _decode(answer: bytes) -> Status:
    found: Status = msgspec.json.decode(answer)
    return found
