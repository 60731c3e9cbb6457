"""``python -m pearl.workers.training.worker`` under torchrun: one rank of the training world.

Rank 0 speaks with the coordinator on its event loop and does all blocking work in one thread, rebroadcasting each
command; the other ranks only wait for commands. A rank that fails ends its process and the launcher the world.
"""

import argparse
import asyncio
import logging
import os
import queue
import socket
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import uvloop

from pearl.runtime.vital_thread import VitalThread
from pearl.runtime.worker_process import exit_now, log_to_stderr, read_config
from pearl.types import tcp_address
from pearl.types.comparison import Comparison
from pearl.types.config import Config
from pearl.types.messages.training import (
    Offload,
    OffloadReply,
    Restore,
    RestoreReply,
    StartTrainingReply,
    TrainStepReply,
)
from pearl.types.weights import Snapshot
from pearl.workers.allocator import return_large_blocks
from pearl.workers.final_errors import final_errors
from pearl.workers.model import resolve_device, use_one_thread
from pearl.workers.training.checkpoint import CheckpointStore
from pearl.workers.training.comparison import compare
from pearl.workers.training.control import ControlChannel
from pearl.workers.training.process import make_peer, parse
from pearl.workers.training.rank_commands import Begin, Command, Progress, Step, Stop
from pearl.workers.training.service import Reply, TrainingService
from pearl.workers.training.state_offload import TrainingResidency, check, slowest
from pearl.workers.training.trainer import Trainer, checkpoint_root
from pearl.workers.weight_transfer.address import advertised_address
from pearl.workers.weight_transfer.sender import LinkServer
from pearl.workers.weight_transfer.snapshot_image import SnapshotStore

log = logging.getLogger(__name__)

LEAVE_LIMIT_S = 2.0
"""For the other ranks to hear that the world ends; after it they learn it from the closed connection."""
MAX_WAITING = 8


class Rank:
    """This process's part of the world. ``execute`` is a collective; everything belongs to one thread."""

    def __init__(self, options: argparse.Namespace, config: Config, progress: Progress) -> None:
        self._options = options
        self._config = config
        self._progress = progress
        self._rank = int(os.environ["RANK"])
        self.checkpoints = CheckpointStore(
            checkpoint_root(Path(options.run_dir)), config.training.keep_checkpoints
        )
        self._store: SnapshotStore | None = None
        self._links: LinkServer | None = None

    def join(self) -> None:
        """Meet the other ranks and build the model."""
        with final_errors():
            device = resolve_device(self._config.model, int(os.environ.get("LOCAL_RANK", "0")))
        if device.type == "cuda":
            torch.cuda.set_device(device)
        else:
            use_one_thread()
            return_large_blocks()
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            timeout=timedelta(seconds=self._config.runtime.train_timeout_s),
        )
        self.channel = ControlChannel()
        with final_errors():
            self._trainer = Trainer(
                self._config, self._options.vocabulary_size, device, self.checkpoints, self._progress
            )
        self._residency = TrainingResidency(
            self._trainer, self.channel, device, self._config.elastic.verify_state
        )
        if self._rank == 0:
            self._open_store()

    def _open_store(self) -> None:
        weights, options = self._config.weights, self._options
        self._store = SnapshotStore(
            options.incarnation, self._rank, socket.gethostname(), weights.bucket_bytes
        )
        coordinator = tcp_address.parse(options.address)
        has_peers_elsewhere = not coordinator.is_loopback
        if weights.transport == "link" or (weights.transport == "auto" and has_peers_elsewhere):
            is_ipv6 = coordinator.is_ipv6
            address = (
                advertised_address(None, peers_elsewhere=True, ipv6=is_ipv6)
                if has_peers_elsewhere
                else "127.0.0.1"
            )
            self._links = LinkServer(
                self._store,
                address=address,
                deadline_s=weights.bucket_deadline_s,
                bind_address="::" if is_ipv6 and has_peers_elsewhere else "0.0.0.0",
            )

    def lead(self, command: Command) -> Reply | None:
        """Have all ranks execute a command; called on rank 0."""
        self.channel.send(command)
        return self.execute(command)

    def execute(self, command: Command) -> Reply | None:
        """The reply on rank 0, None on the others."""
        match command:
            case Begin():
                return self._begin(command)
            case Step():
                return self._step(command)
            case Offload():
                return self._offload()
            case Restore():
                return self._restore()
            case Stop():
                return None

    def _begin(self, command: Begin) -> StartTrainingReply | None:
        metrics: dict[str, float] = {}
        if command.restore_step is None:
            with final_errors():
                metrics = self._trainer.begin(command.lineage, command.demonstrations)
            # What a world that dies before its first step comes back to; the warm start is not done twice.
            if not self._trainer.save():
                raise ValueError(f"no checkpoint can be written to {self.checkpoints.root}; see the log")
        else:
            self._trainer.restore(command.lineage, command.restore_step)
        snapshot = self._trainer.publish(self._store)
        comparison = self._compare(command, snapshot) if command.compare else None
        if snapshot is None:
            return None
        return StartTrainingReply(snapshot, command.restore_step is not None, metrics, comparison)

    def _compare(self, command: Begin, snapshot: Snapshot | None) -> Comparison | None:
        self._progress.busy = "comparison"
        is_untrained = command.restore_step is None and not self._config.warm_start.num_steps
        return compare(
            self._trainer,
            self._config,
            self._options.vocabulary_size,
            snapshot,
            is_untrained=is_untrained,
        )

    def _step(self, command: Step) -> TrainStepReply | None:
        result = self._trainer.train(command.step, command.samples)
        snapshot = self._trainer.publish(self._store)
        is_saved = self._trainer.save() if command.checkpoint else False
        if snapshot is None:
            return None
        metrics = {**result.metrics, "checkpoints_failed": float(command.checkpoint and not is_saved)}
        checkpoint_step = snapshot.version.step if is_saved else None
        return TrainStepReply(
            snapshot, checkpoint_step, metrics, result.max_logprob_gap, result.logprob_gap_tokens
        )

    def _offload(self) -> OffloadReply | None:
        reports = self._residency.offload()
        if self._rank:
            return None
        check(reports, "did not leave")
        return OffloadReply(sum(report.released_bytes for report in reports), slowest(reports))

    def _restore(self) -> RestoreReply | None:
        reports = self._residency.restore()
        if self._rank:
            return None
        check(reports, "did not come back")
        return RestoreReply(slowest(reports))


class WorkThread:
    """Runs blocking calls one after another. A daemon: a thread inside a collective cannot be joined."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._queue: queue.Queue[tuple[Callable[[], Any], asyncio.Future[Any]]] = queue.Queue(MAX_WAITING)
        VitalThread(target=self._work, name="training", daemon=True).start()

    def start(self, call: Callable[[], Any]) -> asyncio.Future[Any]:
        """Queue a call; the service has at most one command and one start under way, so there is room."""
        future: asyncio.Future[Any] = self._loop.create_future()
        self._queue.put_nowait((call, future))
        return future

    def _work(self) -> None:
        while True:
            call, future = self._queue.get()
            try:
                result = call()
            except (Exception, SystemExit) as error:  # noqa: BLE001  it belongs to whoever awaits the future
                self._loop.call_soon_threadsafe(_fail, future, error)
            else:
                self._loop.call_soon_threadsafe(_finish, future, result)


def _finish(future: asyncio.Future[Any], result: Any) -> None:
    if not future.done():
        future.set_result(result)


def _fail(future: asyncio.Future[Any], error: Exception | SystemExit) -> None:
    if future.done():
        return
    if isinstance(error, SystemExit):  # of a library: it would end the loop, and the reason with it
        wrapped = RuntimeError(f"the work ended with SystemExit({error.code})")
        wrapped.__cause__ = error
        future.set_exception(wrapped)
    else:
        future.set_exception(error)


async def serve(options: argparse.Namespace, config: Config) -> str:
    """Rank 0; returns why it ended."""
    progress = Progress()
    rank = Rank(options, config, progress)
    thread = WorkThread()
    joined = thread.start(rank.join)

    async def execute(command: Command) -> Reply:
        await joined  # a failure to build the model is the answer to the first command
        reply: Reply | None = await thread.start(lambda: rank.lead(command))
        assert reply is not None, command
        return reply

    service = TrainingService(config, rank.checkpoints, progress, execute)
    reason = await make_peer(options, config, service).run()
    await _leave(thread, rank, service, joined)
    return reason


async def _leave(
    thread: WorkThread, rank: Rank, service: TrainingService, joined: asyncio.Future[None]
) -> None:
    """Tell the other ranks, unless work is under way: then they learn it from the closed connections."""
    if not joined.done() or joined.exception() is not None or service.heartbeat().pending:
        return
    try:
        async with asyncio.timeout(LEAVE_LIMIT_S):
            await thread.start(lambda: rank.lead(Stop()))
    except (TimeoutError, RuntimeError) as error:
        log.warning("the other ranks did not hear of the end: %s", error)


def follow(options: argparse.Namespace, config: Config) -> None:
    """The other ranks."""
    rank = Rank(options, config, Progress())
    rank.join()
    while not isinstance(command := rank.channel.receive(), Stop):
        rank.execute(command)


def main(arguments: Sequence[str]) -> None:
    options = parse("pearl.workers.training.worker", arguments)
    log_to_stderr()
    config = read_config(options)
    if os.environ["RANK"] == "0":
        log.info("left: %s", uvloop.run(serve(options, config)))
    else:
        follow(options, config)
    # Threads inside collectives or links cannot be joined; memory and connections go with the process.
    exit_now()


if __name__ == "__main__":
    main(sys.argv[1:])
