"""What rollout workers are asked besides requests: to take weights or a role, to wake, to let go of device memory.

One task a command; its outcome is an event. A worker that does not let go in its limit is condemned: its loss is then
the answer.
"""

import logging
from collections.abc import Callable, Coroutine
from typing import Any, NamedTuple

import msgspec

from pearl.runtime.errors import PeerGoneError, QueueFullError, RemoteError
from pearl.runtime.rpc_server import RpcServer
from pearl.service.clients.rollout_workers import peer_name
from pearl.service.loop.inbox import Inbox
from pearl.types import commands, events
from pearl.types.config import Config
from pearl.types.ids import Incarnation, Slot
from pearl.types.messages import rollout as messages
from pearl.types.plan import Role
from pearl.types.weights import Snapshot, SourceLostError, SupersededVersionError

log = logging.getLogger(__name__)

Spawn = Callable[[str, Coroutine[Any, Any, None]], object]
Terminate = Callable[[Slot, Incarnation, str], None]
AwaitLiveness = Callable[[Snapshot], Coroutine[Any, Any, None]]
WeightsCommand = commands.UpdateWeights | commands.ActivateWorker
Proof = messages.UpdateWeightsReply | messages.ActivateReply


class Failure(NamedTuple):
    """Why there is no proof."""

    reason: str
    superseded: bool = False
    source_lost: bool = False


class WorkerControl:
    def __init__(
        self,
        config: Config,
        server: RpcServer,
        inbox: Inbox,
        terminate: Terminate,
        await_liveness_known: AwaitLiveness,
        spawn: Spawn,
    ) -> None:
        """``await_liveness_known`` returns once it is plain whether the training world of a snapshot lives."""
        self._config = config
        self._server = server
        self._inbox = inbox
        self._terminate = terminate
        self._await_liveness_known = await_liveness_known
        self._spawn = spawn
        # Until one engine has been compared, each is, so that no token comes before the first comparison.
        self._is_comparing = config.agreement.at_start and config.rollout.engine != "emulated"

    # weights

    def update(self, command: commands.UpdateWeights, snapshot: Snapshot | None) -> None:
        self._spawn(f"UpdateWeights {command.op}", self._bring(command, snapshot))

    def activate(self, command: commands.ActivateWorker, snapshot: Snapshot | None) -> None:
        self._spawn(f"ActivateWorker {command.op}", self._bring(command, snapshot))

    async def _bring(self, command: WeightsCommand, snapshot: Snapshot | None) -> None:
        """The command's version, which is ``snapshot`` unless a newer one has come out."""
        op, slot, incarnation = command.op, command.slot, command.incarnation
        if snapshot is None or snapshot.version != command.version:
            newest = "none" if snapshot is None else snapshot.version
            reason = f"{command.version} is superseded, the newest is {newest}"
            await self._inbox.put(events.WeightsFailed(op, slot, incarnation, reason))
            return
        began = self._server.clock.now()
        outcome = await self._ask_proof(command, snapshot)
        if isinstance(outcome, Failure):
            if outcome.source_lost:
                # A world's loss is to be known before what comes of it, which is no worker's fault.
                await self._await_liveness_known(snapshot)
            name = f"{type(command).__name__} of {peer_name(slot, incarnation)}"
            log.warning("%s to %s failed: %s", name, command.version, outcome.reason)
            await self._inbox.put(
                events.WeightsFailed(op, slot, incarnation, outcome.reason, outcome.superseded)
            )
            return
        seconds = self._server.clock.now() - began
        if outcome.comparison is not None:
            self._is_comparing = False
            await self._inbox.put(events.Compared("rollout", outcome.comparison, slot, incarnation))
        proven = events.WeightsVerified(
            op, slot, incarnation, outcome.version, outcome.checksum, seconds, _parts(outcome)
        )
        await self._inbox.put(proven)

    async def _ask_proof(self, command: WeightsCommand, snapshot: Snapshot) -> Proof | Failure:
        """The proof, or why there is none."""
        limit_s, bucket_s = self._config.runtime.update_timeout_s, self._config.weights.bucket_deadline_s
        peer = peer_name(command.slot, command.incarnation)
        reply: Proof
        compare = self._is_comparing
        limit_s *= 2 if compare else 1
        try:
            if isinstance(command, commands.UpdateWeights):
                update = messages.UpdateWeights(snapshot, command.mode, bucket_s, compare)
                reply = await self._server.call(
                    peer, update, deadline_s=limit_s, reply_type=messages.UpdateWeightsReply
                )
            else:
                activate = messages.Activate(snapshot, bucket_s, compare)
                reply = await self._server.call(
                    peer, activate, deadline_s=limit_s, reply_type=messages.ActivateReply
                )
        except TimeoutError:
            return Failure(f"no answer within {limit_s:g} s (runtime.update_timeout_s)")
        except RemoteError as error:
            superseded = error.kind == SupersededVersionError.__name__
            return Failure(str(error), superseded, error.kind == SourceLostError.__name__)
        except (PeerGoneError, QueueFullError) as error:
            return Failure(str(error))
        if reply.version != snapshot.version:
            return Failure(f"serves {reply.version}, asked for {snapshot.version}")
        return reply

    # memory

    def release(self, command: commands.ReleaseWorker) -> None:
        self._spawn(f"ReleaseWorker {command.op}", self._release(command))

    async def _release(self, command: commands.ReleaseWorker) -> None:
        slot, incarnation = command.slot, command.incarnation
        began = self._server.clock.now()
        try:
            reply = await self._server.call(
                peer_name(slot, incarnation),
                messages.Release(),
                deadline_s=command.limit_s,
                reply_type=messages.ReleaseReply,
            )
        except TimeoutError:
            limit = f"elastic.release_limit_s = {command.limit_s:g} s"
            self._terminate(slot, incarnation, f"did not release its memory within {limit}")
            return
        except (PeerGoneError, QueueFullError, RemoteError) as error:
            self._terminate(slot, incarnation, f"did not release its memory: {error}")
            return
        seconds = self._server.clock.now() - began
        # Its attempts' last frames came before the answer and must be in front of the event too.
        await self._server.caught_up()
        await self._inbox.put(events.WorkerReleased(command.op, slot, incarnation, seconds, reply.parts))

    # roles

    def set_role(self, command: commands.SetRole) -> None:
        self._spawn(f"SetRole {command.op}", self._set_role(command))

    async def _set_role(self, command: commands.SetRole) -> None:
        slot, incarnation = command.slot, command.incarnation
        began = self._server.clock.now()
        limit_s = self._config.runtime.update_timeout_s
        request = messages.SetRole(msgspec.convert(command.role, Role), limit_s)
        try:
            reply = await self._server.call(
                peer_name(slot, incarnation), request, deadline_s=limit_s, reply_type=messages.SetRoleReply
            )
        except (TimeoutError, PeerGoneError, QueueFullError, RemoteError) as error:
            self._terminate(slot, incarnation, f"did not become a {command.role} worker: {error}")
            return
        if reply.role != command.role:
            self._terminate(slot, incarnation, f"became a {reply.role} worker, not a {command.role} one")
            return
        await self._server.caught_up()
        await self._inbox.put(events.RoleSet(command.op, slot, incarnation, self._server.clock.now() - began))


def _parts(proof: Proof) -> dict[str, float]:
    if isinstance(proof, messages.ActivateReply):
        return proof.parts
    return {"transfer": proof.transfer_seconds, "load": proof.load_seconds}
