"""``pearl run`` in full: one coordinator with all its processes, from the settings to the exit code.

Whatever happens in between, on return no process of the run is left, its results are in the run directory, and
the person has been told what went wrong and what to do.
"""

import asyncio
import logging
import os
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import uvloop

from pearl.runtime import coordinator_file, process_markers, run_registry
from pearl.runtime.fd_limit import check_fd_limit
from pearl.runtime.stop_signals import (
    STOP_SIGNALS,
    exit_on_stop_signals,
    hold_stop_signals,
    release_stop_signals,
)
from pearl.runtime.subreaper import adopt_orphans
from pearl.runtime.wal import DamagedError
from pearl.service import recovery
from pearl.service.console import Console, describe_elasticity
from pearl.service.log_file import log_to
from pearl.service.own_router import RouterError
from pearl.service.processes.local_agent import AgentFailedError, LocalAgent
from pearl.service.recovery import FinishedError, InitialState
from pearl.service.run_files import RunFiles
from pearl.service.run_lock import claim
from pearl.service.run_loop import RunFailedError, RunLoop
from pearl.service.verification import verify
from pearl.traces import at_most, read_trace
from pearl.types import tcp_address
from pearl.types.commands import Finish
from pearl.types.config import Config
from pearl.types.exit_codes import EXIT_FAILURE, EXIT_USAGE
from pearl.types.trace import TraceEvent

log = logging.getLogger(__name__)

EXPLAINED = (RunFailedError, AgentFailedError, DamagedError, ValueError, OSError, RouterError)
"""Errors whose text tells the person what to do; others are bugs."""


def run(config: Config, run_dir: Path, *, resume: bool) -> int:
    """Run or resume the job. The exit code: 0 done, 1 failed, 2 usage error, 128 + N stopped by signal N."""
    exit_on_stop_signals()
    console = Console(sys.stdout, config.rollout.num_workers)
    try:
        _check_model(config)
        trace = load_trace(config, console.announce)
        with (
            _stop_signals_last(),
            claim(run_dir) as (run_id, copied_from),
            log_to(run_dir / "coordinator.log"),
            asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
        ):
            if copied_from:
                console.announce(
                    f"{run_dir} is a copy of run {copied_from}: it goes on as a run of its own, {run_id}"
                )
            service = Service(config, run_dir, run_id, console, resume=resume, trace=trace)
            return runner.run(service.main())
    except ValueError as error:
        return _complain(str(error), EXIT_USAGE)
    except EXPLAINED as error:
        code = _complain(_with_place(error, run_dir), EXIT_FAILURE)
        _offer_resume(run_dir, console)
        return code


@contextmanager
def _stop_signals_last() -> Iterator[None]:
    """Hold back stop signals while the event loop and its handlers go, until there are others."""
    try:
        yield
    finally:
        exit_on_stop_signals()
        release_stop_signals()


class Service:
    """One life of a run, with its signals and its end."""

    def __init__(
        self,
        config: Config,
        run_dir: Path,
        run_id: str,
        console: Console,
        *,
        resume: bool,
        trace: Sequence[TraceEvent],
    ) -> None:
        self._config = config
        self._run_dir = run_dir
        self._run_id = run_id
        self._console = console
        self._resume = resume
        self._trace = trace
        self._session: RunLoop | None = None
        self._owns_descendants = False
        self._lost: list[str] = []  # of what the run claims to have written
        self._task: asyncio.Task[int] | None = None
        self._signals: list[int] = []

    async def main(self) -> int:
        loop = asyncio.get_running_loop()
        for number in STOP_SIGNALS:
            loop.add_signal_handler(number, self._on_signal, number)
        self._owns_descendants = adopt_orphans()
        code = EXIT_FAILURE
        try:
            # A task of its own: signals may cancel it as often as they like, and what follows still happens.
            async with asyncio.TaskGroup() as tasks:
                self._task = tasks.create_task(self._run(), name="run")
            code = self._task.result()
        except asyncio.CancelledError:
            if not self._signals:
                raise
            # Cancelled by our own signal handler: the end of the run, not of whoever called it.
            self._console.announce(f"stopped by signal {self._signals[0]}")
        except Exception as error:
            # The boundary: whatever happened, the person gets a word and no process is left behind.
            log.exception("the run failed")
            if not (self._signals and self._task is not None and self._task.cancelling()):
                raise _explained(error, self._run_dir) from error
            # It was cancelled, by our own signal handler, and did not take it well.
            self._console.announce(f"stopped by signal {self._signals[0]}")
        finally:
            code = self._final_code(code, await self._kill_all())
            hold_stop_signals()
        return code

    async def _kill_all(self) -> tuple[str, ...]:
        """Kill whatever is left of the run on this host; returns who did not end, in words."""
        own = psutil.Process()

        def remaining() -> list[int]:
            children = [child.pid for child in own.children()] if self._owns_descendants else []
            return process_markers.with_descendants([*process_markers.find_marked(self._run_id), *children])

        return (await process_markers.kill_all(remaining)).survivors

    def _final_code(self, code: int, survivors: tuple[str, ...]) -> int:
        if survivors:
            _complain(
                f"these processes do not end on SIGKILL and hold what they have, GPUs too: {', '.join(survivors)}; "
                "the kernel does not release them, perhaps until the host is rebooted",
                EXIT_FAILURE,
            )
        if self._signals and (code == 0 or (self._task is not None and self._task.cancelling())):
            return 128 + self._signals[0]
        return code or (EXIT_FAILURE if survivors else 0)

    def _on_signal(self, number: int) -> None:
        """The first asks for an orderly end, when there is something to put in order; the second kills everything."""
        self._signals.append(number)
        if len(self._signals) == 1 and self._session is not None and self._session.is_driving:
            self._console.announce(f"signal {number}: stopping; once more kills everything at once")
            self._session.request_stop(number)
        elif len(self._signals) <= 2 and self._task is not None:
            self._task.cancel()

    async def _run(self) -> int:
        # What a killed coordinator may have left.
        if self._resume and (survivors := (await process_markers.kill_run(self._run_id)).survivors):
            self._console.announce(
                f"warning: of the run's last life these do not end: {', '.join(survivors)}"
            )
        self._console.announce(f"run directory: {self._run_dir}")
        if text := describe_elasticity(self._config.elastic):
            self._console.announce(text)
        if warning := check_fd_limit(_needed_fds(self._config)):
            self._console.announce(f"warning: {warning}")
        files = RunFiles(self._run_dir)
        try:
            initial_state = self._begin(files)
            try:
                finish = await self._live(files, initial_state)
                self._lost += verify(files, initial_state.journal, self._console.announce)
            except Exception:
                self._remove_files(files)
                raise
            finally:
                initial_state.journal.close()
        except FinishedError as finished:
            self._console.announce("the run has finished already: nothing to resume")
            files.summary({**finished.finish.summary, "error": finished.finish.error})
            return 0
        finally:
            files.close()
        await self._kill_all()
        self._write_report()
        return self._conclude(finish)

    def _begin(self, files: RunFiles) -> InitialState:
        if self._resume and recovery.has_journal(files):
            initial_state = recovery.recover(self._config, files)
            files.write_config(self._config)  # the workers read it, whatever has become of the copies on disk
            return initial_state
        if self._resume:
            recovery.refuse_without_journal(files)
        files.write_config(self._config)
        return recovery.fresh(self._config, files)

    def _remove_files(self, files: RunFiles) -> None:
        """A run that never began leaves its logs, and its directory to the next try."""
        if not self._resume and (self._session is None or not self._session.is_driving):
            files.remove()

    async def _live(self, files: RunFiles, initial_state: InitialState) -> Finish:
        agent = LocalAgent(self._config, self._run_id, files.logs)
        run_loop = RunLoop(
            self._config, self._run_id, files, self._console, initial_state, agent, self._trace
        )
        async with run_loop.make_server() as server:
            if self._config.elastic.inter or self._config.rollout.reserved_gpus:
                self._console.announce(how_to_join(server.address))
            entry = run_registry.register(self._run_dir, server.address, self._run_id, os.getpid())
            self._session = run_loop
            announced = coordinator_file.publish(self._run_dir, reachable(server.address), self._run_id)
            try:
                return await run_loop.run(server)
            finally:
                coordinator_file.close(self._run_dir, announced, "stopped" if self._signals else "over")
                run_registry.unregister(entry)

    def _write_report(self) -> None:
        try:
            from pearl.report.report import build

            build(self._run_dir)
        except Exception as error:  # the run is done and safe, whatever is wrong with its page
            log.warning("no report.html", exc_info=True)
            self._console.announce(f"warning: no report.html: {error}")

    def _conclude(self, finish: Finish) -> int:
        assert self._session is not None
        lost = [*self._session.lost, *self._lost]
        if lost:
            _complain("\n".join(lost), EXIT_FAILURE)
        error = self._session.failure or finish.error
        if not error:
            return finish.exit_code or (EXIT_FAILURE if lost else 0)
        if lost:
            return (
                finish.exit_code
                if finish.exit_code >= 128
                else _complain(error, finish.exit_code or EXIT_FAILURE)
            )
        if not self._session.failure and finish.exit_code >= 128:
            self._console.announce(f"{error}; pearl run --resume --run-dir {self._run_dir} continues it")
            return finish.exit_code
        code = _complain(error, finish.exit_code if finish.exit_code < 128 else EXIT_FAILURE)
        _offer_resume(self._run_dir, self._console)
        return code


def _offer_resume(run_dir: Path, console: Console) -> None:
    if (run_dir / "config.toml").is_file() and recovery.has_entries(run_dir):
        console.announce(f"pearl run --resume --run-dir {run_dir} continues it once the cause is removed")


def _with_place(error: Exception, run_dir: Path) -> str:
    """The system's own errors do not always say what they are about."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename or run_dir}: {error.strerror}"
    if isinstance(error, DamagedError):
        return f"{error}; restore the file, or begin another run in a new directory"
    return str(error)


def _check_model(config: Config) -> None:
    path = Path(config.model.path)
    if config.model.path != "tiny-qwen3" and not (path / "config.json").is_file():
        raise ValueError(
            f"model.path = {config.model.path!r} is no model directory (it has no config.json); give the path of a "
            'transformers model, or "tiny-qwen3" for the built-in one'
        )


def load_trace(config: Config, say: Callable[[str], None]) -> list[TraceEvent]:
    """Load elastic.trace, limited to the preemptible GPUs of this host where it has any. ValueError when it cannot
    be used."""
    elastic = config.elastic
    if not elastic.trace:
        return []
    size = config.rollout.gpus_per_worker
    try:
        trace = read_trace(Path(elastic.trace), speed=elastic.trace_speed, gpus_per_node=size)
    except ValueError as error:
        raise ValueError(f"elastic.trace: {error}") from None
    if not elastic.preemptible_gpus:
        return trace
    fitting = at_most(trace, elastic.preemptible_gpus)
    if fitting != trace:
        pool = f"elastic.preemptible_gpus = {elastic.preemptible_gpus}"
        say(f"note: {elastic.trace} goes beyond {pool}; what is more neither arrives nor is reclaimed")
    return fitting


def how_to_join(address: str) -> str:
    """Return how other hosts that can reach ``address`` join."""
    command = f"pearl agent --coordinator {reachable(address)}"
    if tcp_address.parse(address).is_loopback:
        return (
            f"agents of this host join with: {command} (runtime.address=tcp://HOST:PORT lets other hosts in)"
        )
    return f"other hosts join with: {command}"


def reachable(address: str) -> str:
    """Return HOST:PORT under which other hosts reach ``address``: this host's name, where it is all interfaces."""
    where = tcp_address.parse(address)
    is_any = where.ip is not None and where.ip.is_unspecified
    return tcp_address.join(socket.gethostname() if is_any else where.host, where.port)


def check_address(config: Config) -> None:
    """ValueError when runtime.address is none on which this host can listen."""
    address = config.runtime.address
    host = tcp_address.parse(address).host
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ValueError(
            f'runtime.address: "{address}": {host} cannot be resolved ({error.strerror})'
        ) from None
    # A name may have addresses of a family that this host does not use.
    if not any(_can_listen(family, where) for family, *_, where in found):
        raise ValueError(
            f'runtime.address: "{address}": {host} is no address of this host; name one of its own, or '
            "tcp://0.0.0.0:PORT for all of them (tcp://[::]:PORT with IPv6)"
        )


def _can_listen(family: int, where: tuple[Any, ...]) -> bool:
    """``where`` as ``getaddrinfo`` gives it: of an IPv6 address its scope too."""
    try:
        with socket.socket(family) as probe:
            probe.bind((where[0], 0, *where[2:]))
    except OSError:
        return False
    return True


def _needed_fds(config: Config) -> int:
    """Return the file descriptors that the coordinator needs: a connection a worker and its files, with plenty to
    spare."""
    return 256 + 8 * (config.rollout.num_workers + config.training.num_ranks + config.environment.num_workers)


def _explained(error: Exception, run_dir: Path) -> Exception:
    """The first error, when it tells the person what to do; otherwise one that says where the trace is."""
    first: BaseException = error
    while isinstance(first, BaseExceptionGroup):
        first = first.exceptions[0]
    if isinstance(first, EXPLAINED):
        return first
    return RunFailedError(f"internal error: {first!r}; the trace is in {run_dir / 'coordinator.log'}")


def _complain(text: str, exit_code: int) -> int:
    sys.stderr.write("".join(f"error: {line}\n" for line in text.splitlines()))
    return exit_code
