"""Rollout workers: one task a process, requests and aborts told to them."""

import logging
from collections.abc import Callable, Coroutine
from typing import Any

from pearl.runtime.errors import PeerGoneError, QueueFullError
from pearl.runtime.rpc_server import RpcServer
from pearl.runtime.token_store import TokenStore
from pearl.service.loop.inbox import Inbox
from pearl.service.loop.token_ingest import Attempt, TokenIngest
from pearl.service.processes.process_manager import LOCAL_HOST, ProcessManager
from pearl.service.processes.process_specs import ProcessSpecs
from pearl.service.trajectory_seeds import trajectory_seed
from pearl.types import commands, events
from pearl.types.config import Config
from pearl.types.ids import AttemptId, Incarnation, Slot
from pearl.types.messages import rollout as messages
from pearl.types.trajectory import TokenDelta

log = logging.getLogger(__name__)

Spawn = Callable[[str, Coroutine[Any, Any, None]], object]


def peer_name(slot: int, incarnation: int) -> str:
    return f"rollout.{slot}.{incarnation}"


class RolloutWorkers:
    def __init__(
        self,
        config: Config,
        server: RpcServer,
        specs: ProcessSpecs,
        processes: ProcessManager,
        store: TokenStore,
        tokens: TokenIngest,
        stop_ids: tuple[int, ...],
        inbox: Inbox,
        spawn: Spawn,
    ) -> None:
        self._config = config
        self._server = server
        self._specs = specs
        self._processes = processes
        self._store = store
        self._tokens = tokens
        self._stop_ids = stop_ids
        self._inbox = inbox
        self._spawn = spawn
        self._kv_addresses: dict[str, str] = {}  # of living workers, by peer name

    # lives

    def start(self, command: commands.StartWorker) -> None:
        self._spawn(f"StartWorker {peer_name(command.slot, command.incarnation)}", self._live(command))

    async def _live(self, command: commands.StartWorker) -> None:
        slot, incarnation = command.slot, command.incarnation
        process = self._specs.rollout(slot, incarnation, command.role, command.gpus)
        self._tokens.open_worker(slot, incarnation)
        hello = await self._processes.start(process)
        if hello is not None:
            host = hello.host if process.host == LOCAL_HOST else process.host
            self._kv_addresses[process.name] = hello.kv_address
            ready = events.WorkerReady(command.op, slot, incarnation, host, hello.pid)
            await self._inbox.put(ready)
        loss = await self._processes.wait_exited(process)
        self._kv_addresses.pop(process.name, None)
        # TokenIngest that came before are in front of it in the inbox; later ones are old.
        await self._inbox.put(events.WorkerLost(slot, incarnation, loss.reason, loss.counter, loss.is_final))

    def stop(self, command: commands.StopWorker) -> None:
        """Stop a worker. Its process's task reports the loss; one that has exited already was reported."""
        process = self._processes.find("rollout", command.slot, command.incarnation)
        if process is not None:
            process.terminate(command.reason, command.grace_s)

    def terminate(self, slot: Slot, incarnation: Incarnation, reason: str) -> None:
        self._processes.terminate(peer_name(slot, incarnation), reason)

    # requests

    def generate(self, command: commands.Generate) -> None:
        slot, incarnation = command.slot, command.incarnation
        prefill = None
        if command.prefill_slot is not None:
            prefill = (command.prefill_slot, command.prefill_incarnation)
        attempt = Attempt(command.trajectory, command.turn, slot, incarnation, prefill)
        self._tokens.begin(command.attempt, attempt)
        if prefill is None:
            self._send(command, slot, incarnation, "")
        # The decode stage first, so that it knows of the KV that comes; without it there is nothing to prefill for.
        elif self._send(command, slot, incarnation, peer_name(*prefill)):
            self._send(command, *prefill, self._kv_addresses.get(peer_name(slot, incarnation), ""))

    def _send(self, command: commands.Generate, slot: Slot, incarnation: Incarnation, pair: str) -> bool:
        """Whether the worker was told; otherwise its half of the attempt ends by the way that is begun here."""
        try:
            self._server.notify(peer_name(slot, incarnation), self._request(command, pair))
        except PeerGoneError as error:
            # Its loss, which is coming, ends the attempt; as a failed attempt it would count against the trajectory.
            self.terminate(slot, incarnation, str(error))
            return False
        except QueueFullError as error:
            if slot == command.slot:
                self._tokens.release(command.trajectory)
            self._spawn(f"Generate {command.attempt}", self._refused(command, slot, incarnation, str(error)))
            return False
        return True

    def _request(self, command: commands.Generate, pair: str) -> messages.Generate:
        temperature = 0.0 if command.greedy else self._config.rollout.temperature
        return messages.Generate(
            attempt=command.attempt,
            trajectory=command.trajectory,
            ids=self._store.context(command.trajectory, command.context_tokens),
            params=messages.SamplingParams(command.max_new_tokens, temperature, self._stop_ids),
            seed=trajectory_seed(self._config.run.seed, command.trajectory),
            pair=pair,
        )

    async def _refused(
        self, command: commands.Generate, slot: Slot, incarnation: Incarnation, error: str
    ) -> None:
        delta = TokenDelta(command.attempt, 0, (), 0, "error", error)
        await self._inbox.put(events.TokensStreamed(slot, incarnation, (delta,)))

    def abort(self, slot: Slot, incarnation: Incarnation, attempt: AttemptId) -> None:
        self._tell(slot, incarnation, messages.Abort(attempt))

    def interrupt(self, command: commands.Interrupt) -> None:
        self._tell(command.slot, command.incarnation, messages.Interrupt())

    def _tell(
        self, slot: Slot, incarnation: Incarnation, message: messages.Abort | messages.Interrupt
    ) -> None:
        """A worker that cannot be told is dying, and its loss ends its attempts."""
        try:
            self._server.notify(peer_name(slot, incarnation), message)
        except QueueFullError as error:
            self.terminate(slot, incarnation, f"takes no messages: {error}")
        except PeerGoneError as error:
            log.info("%s needs no telling: %s", message, error)
