"""One life of a run, from the first process to the core's Finish: assembles the parts and routes what is heard."""

import asyncio
import gc
import logging
import signal
from collections.abc import Sequence
from contextlib import ExitStack

from pearl.runtime.clock import MonotonicClock
from pearl.runtime.errors import PeerGoneError, QueueFullError, RemoteError
from pearl.runtime.inbound import Call, Notification, PeerJoined, PeerLost
from pearl.runtime.installation import installation
from pearl.runtime.rpc_server import RpcServer
from pearl.runtime.token_store import TokenStore
from pearl.service.clients.environment_pool import EnvironmentPool
from pearl.service.clients.remote_hosts import RemoteHosts
from pearl.service.clients.rollout_workers import RolloutWorkers
from pearl.service.clients.training_client import TrainingClient
from pearl.service.clients.worker_control import WorkerControl
from pearl.service.console import Console
from pearl.service.loop.command_executor import CommandExecutor
from pearl.service.loop.event_ingest import EventIngest
from pearl.service.loop.event_loop import EventLoop, RunClock
from pearl.service.loop.inbox import Inbox, TokenFrame
from pearl.service.loop.pending_preempts import PendingPreempts
from pearl.service.loop.tasks import Tasks
from pearl.service.loop.token_ingest import TokenIngest
from pearl.service.loop.trace_player import Steps, TracePlayer, rest
from pearl.service.processes.liveness_monitor import LivenessMonitor
from pearl.service.processes.local_agent import AGENT_NAME, LocalAgent
from pearl.service.processes.process_manager import LOCAL_HOST, ProcessManager
from pearl.service.processes.process_specs import ProcessSpecs
from pearl.service.recovery import InitialState
from pearl.service.run_files import RunFiles, strict_json
from pearl.service.samples import SampleWriter
from pearl.service.status_json import StatusJson
from pearl.service.verification import checkpoint_damage
from pearl.types import events
from pearl.types.commands import Finish
from pearl.types.config import Config
from pearl.types.ids import GpuId, Incarnation, Slot
from pearl.types.messages.control import (
    Ack,
    AgentReport,
    GroupExited,
    Heartbeat,
    Leaving,
    Notice,
    Preempt,
    PreemptReply,
    Shutdown,
    StatusReply,
    StatusRequest,
)
from pearl.types.messages.environment import DescribeReply
from pearl.types.messages.rollout import Deltas
from pearl.types.messages.senders import SENDERS
from pearl.types.trace import TraceEvent

log = logging.getLogger(__name__)

END_LIMIT_S = 8.0
"""For the agent to end its groups with their grace of 5 s; what is left then is killed, well within 15 s in all."""


class RunFailedError(Exception):
    """The run cannot go on; the text is for the person."""


class RunLoop:
    def __init__(
        self,
        config: Config,
        run_id: str,
        files: RunFiles,
        console: Console,
        initial_state: InitialState,
        agent: LocalAgent,
        trace: Sequence[TraceEvent] = (),
    ) -> None:
        """``trace`` is played into the run from its beginning."""
        self._config = config
        self._run_id = run_id
        self._files = files
        self._console = console
        self._initial_state = initial_state
        self._clock = MonotonicClock()
        self._inbox = Inbox(config.runtime.queue_messages)
        self._preempts = PendingPreempts()
        self._agent = agent
        self._trace = trace
        self._status = StatusJson(lambda: strict_json(initial_state.core.status()), self._clock)
        self.is_driving = False  # whether the core can be asked for an end
        self._agent_is_silent = False
        self.lost: list[str] = []  # what the disk has lost of what a next life would need
        self.failure = ""  # why the run ends before the core wished it

    # from outside

    def request_stop(self, number: int) -> None:
        """Have the core end the run; only while driving."""
        self._inbox.put_urgent(events.StopRequested(number))

    def fail(self, text: str) -> None:
        """End the run because of ``text``: by way of the core when there is one, so that its summary is written."""
        if self.failure:
            return
        self.failure = text
        log.error("%s", text)
        if not self.is_driving:
            raise RunFailedError(text)
        self.request_stop(signal.SIGTERM)

    # the life

    def make_server(self) -> RpcServer:
        runtime = self._config.runtime
        return RpcServer(
            runtime.address,
            run_id=self._run_id,
            messages=SENDERS,
            queue_messages=runtime.queue_messages,
            max_frame_bytes=runtime.max_frame_bytes,
            clock=self._clock,
            installation=installation(self._config),
            model_path=self._config.model.path,
        )

    async def run(self, server: RpcServer) -> Finish:
        """Run until the core's Finish; then every process has been asked to end and has had its time for it.

        Raises:
            RunFailedError, AgentFailedError, ValueError, OSError: it could not begin or continue; processes may be
            left.
        """
        with ExitStack() as stack:
            async with asyncio.TaskGroup() as group:
                tasks = Tasks(group)
                finish = await self._go(server, tasks, stack)
                self._files.summary({**finish.summary, "error": self.failure or finish.error})
                if profile := self._initial_state.core.profile():
                    self._files.profile(profile)
                tasks.cancel()
            await self._end(server)
        return finish

    async def _go(self, server: RpcServer, tasks: Tasks, stack: ExitStack) -> Finish:
        config, say, inbox = self._config, self._console.announce, self._inbox
        liveness = LivenessMonitor(server, config.runtime, self._clock)
        specs = ProcessSpecs(config, self._files.run_dir, server.address, self._run_id)
        processes = ProcessManager(server, liveness, config.runtime.start_timeout_s)
        pools = self._initial_state.core.host_pools()
        hosts = RemoteHosts(config, server, liveness, specs, processes, inbox, say, pools, self.fail)
        stack.callback(hosts.close)
        tasks.spawn("receive", self._receive(server, processes, liveness, hosts))
        tasks.spawn("watch", liveness.run())
        await self._start_agent(server, tasks, liveness, specs, processes)
        store = TokenStore(self._files.tokens)
        stack.callback(store.close)
        environments = EnvironmentPool(config, server, processes, store, inbox, tasks.spawn, say)
        described = await self._start_environments(environments, specs, tasks)
        specs.set_vocabulary(described.vocabulary_size)

        try:
            await hosts.wait_reserved()
        except TimeoutError as error:
            raise RunFailedError(str(error)) from None
        core, now = self._initial_state.core, self._initial_state.now
        clock = RunClock(self._clock, now)
        tokens = TokenIngest(store, described.vocabulary_size)
        workers = RolloutWorkers(
            config, server, specs, processes, store, tokens, described.stop_ids, inbox, tasks.spawn
        )
        steps = Steps(self._step())
        trainer = TrainingClient(
            config, server, specs, processes, store, environments, inbox, tasks.spawn, say, steps.reach
        )
        worker_control = WorkerControl(
            config, server, inbox, workers.terminate, trainer.await_liveness_known, tasks.spawn
        )
        samples = SampleWriter(
            self._files.run_dir, config.run.num_samples, store, environments.decode, tasks.spawn
        )
        executor = CommandExecutor(
            store,
            tokens,
            environments,
            workers,
            worker_control,
            hosts,
            trainer,
            self._preempts,
            self._files,
            self._console,
            samples,
        )
        ingest = EventIngest(
            store,
            tokens,
            environments,
            hosts.hosts,
            described.vocabulary_size,
            self._clock,
            workers.terminate,
            workers.abort,
        )
        event_loop = EventLoop(
            core, clock, inbox, ingest, executor, store, self._initial_state.journal, self._files
        )
        is_new = self._initial_state.is_new
        if trace := self._trace if is_new else rest(self._trace, now, self._step()):
            player = TracePlayer(
                trace, self._clock, self._clock.now() - now, steps, inbox, self._preempts, say
            )
            tasks.spawn("trace", player.play())
        _freeze_gc(stack)
        self.is_driving = True
        reserved = hosts.begin()
        event_loop.handle([_started(described, reserved) if is_new else events.Resumed(reserved)])
        if not is_new:
            executor.forget_the_rest()
        finish = await event_loop.run()
        await samples.drain()
        self.lost += self._find_lost(finish, store, trainer)
        log.info("not taken from frames: %s; the server counted %s", tokens.dropped, server.counters)
        return finish

    def _find_lost(self, finish: Finish, store: TokenStore, trainer: TrainingClient) -> list[str]:
        """List what is missing of tokens and of the newest checkpoint; the first matter only when the run can be
        resumed."""
        damages = [store.damage()] if finish.exit_code else []
        if trainer.checkpoint_step is not None and self._config.training.engine == "fsdp":
            damages.append(checkpoint_damage(self._files.run_dir / "checkpoints", trainer.checkpoint_step))
        return [f"{damage}, while the run needed it: it cannot be resumed" for damage in damages if damage]

    def _step(self) -> int:
        step = self._initial_state.core.status()["step"]
        assert isinstance(step, int)
        return step

    async def _start_agent(
        self,
        server: RpcServer,
        tasks: Tasks,
        liveness: LivenessMonitor,
        specs: ProcessSpecs,
        processes: ProcessManager,
    ) -> None:
        await self._agent.launch(server.address)
        tasks.spawn("node agent", self._wait_for_agent())
        report = await self._agent.report()
        self._watch_agent(liveness)
        processes.add_agent(LOCAL_HOST, AGENT_NAME)
        if note := specs.use(report):
            self._console.announce(f"note: {note}")

    def _watch_agent(self, liveness: LivenessMonitor) -> None:
        """Report a silent agent, and no more: its workers continue without it, and its end is known from its
        process."""

        def note_silence(reason: str) -> None:
            liveness.remove(AGENT_NAME)
            self._agent_is_silent = True
            self._console.announce(
                f"the node agent of this host is {reason}; the run goes on, but nothing can be started or ended here "
                "until it is heard again (is it stopped?)"
            )

        liveness.add(AGENT_NAME, note_silence)

    def _hear_agent(self, liveness: LivenessMonitor) -> None:
        if self._agent_is_silent:
            self._agent_is_silent = False
            self._console.announce("the node agent of this host is heard again")
            self._watch_agent(liveness)

    async def _wait_for_agent(self) -> None:
        self.fail(await self._agent.wait_exited())

    async def _start_environments(
        self, environments: EnvironmentPool, specs: ProcessSpecs, tasks: Tasks
    ) -> DescribeReply:
        settings = self._config.environment
        self._console.announce(f"environment: starting {settings.name}, {settings.num_workers} worker(s)")
        for slot in range(settings.num_workers):
            tasks.spawn(f"environment {slot}", self._keep_environment(environments, specs, slot))
        try:
            return await environments.describe()
        except (RemoteError, QueueFullError, TimeoutError) as error:
            raise RunFailedError(
                f"environment {settings.name} does not describe itself: {error or 'no answer'}. "
                f"Its logs are in {self._files.logs}"
            ) from None

    async def _keep_environment(self, environments: EnvironmentPool, specs: ProcessSpecs, slot: int) -> None:
        self.fail(
            await environments.keep(
                lambda incarnation: specs.environment(slot, incarnation), self._console.announce
            )
        )

    # what is heard

    async def _receive(
        self, server: RpcServer, processes: ProcessManager, liveness: LivenessMonitor, hosts: RemoteHosts
    ) -> None:
        while True:
            match await server.receive():
                case PeerJoined(peer, hello):
                    if hello.kind == "agent" and peer != AGENT_NAME:
                        hosts.joined(peer)
                    processes.on_hello(hello)
                case Notification(peer, Heartbeat() as heartbeat):
                    if peer == AGENT_NAME:
                        self._hear_agent(liveness)
                    liveness.beat(peer, heartbeat)
                case Notification(peer, Deltas() as deltas):
                    _, slot, incarnation = peer.split(".")
                    await self._inbox.put(TokenFrame(Slot(int(slot)), Incarnation(int(incarnation)), deltas))
                case Notification(peer, GroupExited() as exited):
                    processes.on_exit(peer, exited)
                case Notification(peer, AgentReport() as report) if peer == AGENT_NAME:
                    self._agent.reported(report)
                case Notification(peer, Notice() as notice):
                    hosts.notice(peer, notice)
                case Notification(peer, Leaving(reason)):
                    hosts.lose(peer, reason)
                case PeerLost(peer, reason) if peer == AGENT_NAME:
                    self.fail(f"the node agent is lost: {reason}")
                case PeerLost(peer, reason):
                    hosts.lose(peer, reason)
                    processes.terminate(peer, reason)
                case Call(_, _, _, _) as call:
                    await self._answer(call, hosts)
                case Notification(peer, message):
                    log.warning("%s sent an unexpected %s", peer, type(message).__name__)

    async def _answer(self, call: Call, hosts: RemoteHosts) -> None:
        peer, message, reply, fail = call
        match message:
            case StatusRequest():
                try:
                    reply(StatusReply(self._status.json()))
                except QueueFullError as error:
                    log.warning("%s: %s", peer, error)
            case AgentReport() as report:
                try:
                    hosts.report(peer, report)
                    reply(Ack())
                except ValueError as error:
                    log.warning("%s is not taken in: %s", peer, error)
                    fail(error)
            case Preempt() as request if self.is_driving:

                def accept(gpus: tuple[GpuId, ...]) -> None:
                    log.info("%s: %s of %s", peer, request.action, ", ".join(gpus))
                    reply(PreemptReply(gpus))

                self._inbox.put_urgent(self._preempts.add(request, accept, fail))
            case Preempt():
                fail(ValueError("the run is still starting: try again in a moment"))
            case _:
                fail(ValueError(f"the coordinator does not answer {type(message).__name__}"))

    # the end

    async def _end(self, server: RpcServer) -> None:
        # Its first line: the rest is of this host's logs, which is no news for theirs.
        reason = (self.failure or "the run is over").partition("\n")[0]
        # The agents last: they end the groups that do not end by themselves.
        for peer in sorted(server.peers(), key=lambda name: name.startswith("agent.")):
            try:
                server.notify(peer, Shutdown(reason))
            except (PeerGoneError, QueueFullError) as error:
                log.warning("%s could not be asked to end: %s", peer, error)
        if not await self._agent.end(END_LIMIT_S):
            log.warning("the node agent has not ended within %g s", END_LIMIT_S)


def _freeze_gc(stack: ExitStack) -> None:
    """Exclude what is there by now from collections: one that looked at all of it would take tens of milliseconds,
    in which nothing is received."""
    gc.collect()
    gc.freeze()
    stack.callback(gc.unfreeze)


def _started(described: DescribeReply, reserved: tuple[GpuId, ...]) -> events.Started:
    return events.Started(
        described.num_train_tasks, described.num_evaluation_tasks, described.can_restore, reserved
    )
