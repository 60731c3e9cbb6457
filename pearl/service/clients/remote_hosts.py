"""The hosts that join: which agent serves each, and what it means when one comes, gives notice or goes.

A host whose agent is gone has nothing of ours any more: its lives end, and the core is told once. The coordinator's own
host is not one of these; without it the run ends.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence

import msgspec

from pearl.runtime.errors import PeerGoneError, QueueFullError
from pearl.runtime.rpc_server import RpcServer
from pearl.service.loop.inbox import Inbox
from pearl.service.processes.liveness_monitor import LivenessMonitor
from pearl.service.processes.process_manager import LOCAL_HOST, ProcessManager
from pearl.service.processes.process_specs import ProcessSpecs
from pearl.types.config import Config
from pearl.types.events import GpusArrived, GpusReclaimed, HostLost
from pearl.types.gpu_table import AWAITED_HOST
from pearl.types.ids import GpuId
from pearl.types.messages.control import MAX_RUN_GPUS, AgentReport, GpusReturned, HostPool, Notice

log = logging.getLogger(__name__)


class Host(msgspec.Struct, eq=False):
    name: str
    agent: str  # its peer
    gpus: tuple[GpuId, ...]
    pool: HostPool = "spot"
    is_leaving: bool = False  # has given notice


class RemoteHosts:
    def __init__(
        self,
        config: Config,
        server: RpcServer,
        liveness: LivenessMonitor,
        specs: ProcessSpecs,
        processes: ProcessManager,
        inbox: Inbox,
        say: Callable[[str], None],
        pools: Mapping[str, str],
        fail: Callable[[str], None],
    ) -> None:
        """``pools``: of the hosts that took part in the run before. ``fail`` ends the run, with the reason."""
        self._config = config
        self._pools = dict(pools)
        self._fail = fail
        self._changed = asyncio.Event()
        self._has_begun = False
        self._patience: asyncio.TimerHandle | None = None  # while a reserved host that was lost is awaited
        self._server = server
        self._liveness = liveness
        self._specs = specs
        self._processes = processes
        self._inbox = inbox
        self._announce = say
        self._hosts: dict[str, Host] = {}

    def hosts(self) -> set[str]:
        """Return the hosts where processes can be started now, the coordinator's own included."""
        return {LOCAL_HOST} | {host.name for host in self._hosts.values() if not host.is_leaving}

    # what agents say

    def joined(self, agent: str) -> None:
        """Note an agent's hello; its report follows."""
        self._liveness.add(agent, lambda reason: self.lose(agent, reason))

    def report(self, agent: str, report: AgentReport) -> None:
        """Register a host: a spot host brings all its GPUs, a reserved one only as many as are still awaited, in
        whole workers.

        Raises:
            ValueError: the host cannot join, with the reason.
        """
        self._check(report)
        if (old := self._hosts.get(report.host)) is not None:
            self._make_way(old, agent)
        self._specs.learn(report)
        gpus = self._taken(report)
        self._hosts[report.host] = Host(report.host, agent, gpus, report.pool)
        self._pools[report.host] = "rollout" if report.pool == "rollout" else "spot"
        self._processes.add_agent(report.host, agent)
        pid = self._server.hello(agent).pid
        as_reserved = " as a reserved host" if report.pool == "rollout" else ""
        self._announce(f"host {report.host} joined{as_reserved} with {', '.join(gpus)} (agent {pid})")
        if report.pool == "spot":
            self._inbox.put_urgent(GpusArrived(gpus))
            return
        if self._has_begun:
            self._inbox.put_urgent(GpusArrived(gpus, reserved=True))
        self._note_reserved()

    def notice(self, agent: str, notice: Notice) -> None:
        """Handle a preemption notice: a spot host's GPUs are reclaimed within the grace period; a reserved host is
        dropped at once."""
        host = self._of(agent)
        if host is None:
            return
        if host.pool == "rollout":
            self.lose(agent, notice.reason)
            return
        host.is_leaving = True
        self._announce(f"host {host.name} leaves within {notice.grace_s:g} s: {notice.reason}")
        event = GpusReclaimed(host.gpus, max(notice.grace_s, 0.0), f"host {host.name}: {notice.reason}")
        self._inbox.put_urgent(event)

    def lose(self, agent: str, reason: str) -> None:
        """Note that an agent is gone; does nothing when it was given up before."""
        self._liveness.remove(agent)
        self._server.drop(agent, reason)
        host = self._of(agent)
        if host is None:
            return
        del self._hosts[host.name]
        self._announce(f"host {host.name} has left: {reason}")
        # First the host, then its workers: the core must not try to start them again there.
        self._inbox.put_urgent(HostLost(host.name, reason))
        self._processes.lose_agent(host.name, f"its host {host.name} has left: {reason}")
        if host.pool == "rollout":
            self._note_reserved()

    # reserved hosts

    async def wait_reserved(self) -> None:
        """Wait until as many reserved GPUs are there as the job awaits.

        Raises:
            TimeoutError: not in time; the text says who is there.
        """
        wanted, limit_s = self._config.rollout.reserved_gpus, self._config.runtime.reserved_timeout_s
        if self._num_missing():
            self._announce(
                f"waiting for {self._num_missing()} of {wanted} reserved GPUs, for {limit_s:g} s at most"
            )
        try:
            async with asyncio.timeout(limit_s):
                while self._num_missing():
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise TimeoutError(self._shortage()) from None

    def begin(self) -> tuple[GpuId, ...]:
        """Return the reserved GPUs with which this life of the run begins; later ones are told as they arrive."""
        self._has_begun = True
        self._note_reserved()
        return tuple(gpu for host in self._hosts.values() if host.pool == "rollout" for gpu in host.gpus)

    def close(self) -> None:
        """Cancel the timeout for lost reserved hosts."""
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None

    def _note_reserved(self) -> None:
        """Wake who waits for reserved hosts, and limit how long one that was lost is awaited."""
        self._changed.set()
        missing = self._num_missing()
        if not missing:
            self.close()
        elif self._has_begun and self._patience is None:
            limit_s = self._config.runtime.reserved_timeout_s
            self._announce(f"warning: {missing} reserved GPU(s) are gone, and awaited for {limit_s:g} s")
            self._patience = asyncio.get_running_loop().call_later(limit_s, self._give_up)

    def _give_up(self) -> None:
        self._patience = None
        self._fail(self._shortage())

    def _shortage(self) -> str:
        wanted = self._config.rollout.reserved_gpus
        there = [f"{h.name}: {len(h.gpus)}" for h in self._hosts.values() if h.pool == "rollout"]
        return (
            f"{wanted - self._num_missing()} of rollout.reserved_gpus = {wanted} were there after "
            f"runtime.reserved_timeout_s = {self._config.runtime.reserved_timeout_s:g} "
            f"({', '.join(there) or 'no host'}): start pearl agent --pool rollout on the other hosts, or await fewer"
        )

    def _num_missing(self, but: str = "") -> int:
        """Count the reserved GPUs that are awaited; those of host ``but`` are, too."""
        hosts = (host for host in self._hosts.values() if host.pool == "rollout" and host.name != but)
        return self._config.rollout.reserved_gpus - sum(len(host.gpus) for host in hosts)

    def _taken(self, report: AgentReport) -> tuple[GpuId, ...]:
        """Return the GPUs of a host that the run uses: of a reserved one no more than are awaited, in whole workers."""
        gpus = tuple(GpuId(gpu.gpu) for gpu in report.gpus)
        if report.pool == "spot":
            return gpus
        size = self._config.rollout.gpus_per_worker
        used = gpus[: min(len(gpus) // size * size, self._num_missing(but=report.host))]
        if len(used) < len(gpus):
            self._announce(
                f"note: of the {len(gpus)} GPUs of reserved host {report.host} {len(used)} are used"
            )
        return used

    def _make_way(self, old: Host, agent: str) -> None:
        """Drop the former connection of the same agent, or of another one with its name that has no connection any
        more."""
        hello = self._server.hello(old.agent)
        if hello.slot != self._server.hello(agent).slot and self._server.is_connected(old.agent):
            raise ValueError(
                f"host {old.name} has joined already, by agent {hello.pid}: give this one another name with --host"
            )
        self.lose(old.agent, "another agent has joined for it")

    def _check(self, report: AgentReport) -> None:
        host = report.host
        if host in (LOCAL_HOST, AWAITED_HOST) or not host or "/" in host:
            raise ValueError(f'"{host}" cannot be the name of a host that joins: choose another with --host')
        self._check_pool(report)
        ours = self._server.installation
        if ours is not None and report.model != ours.model:
            raise ValueError(
                f"the model's files are {report.model or 'not known'} on host {host}, {ours.model} here: both need the "
                "same model under the same path"
            )
        names = [gpu.gpu for gpu in report.gpus]
        if not names:
            raise ValueError(f"host {host} has no GPUs: offer virtual ones with --virtual-gpus N")
        others = sum(len(other.gpus) for other in self._hosts.values() if other.name != host)
        if others + len(names) > MAX_RUN_GPUS:
            raise ValueError(
                f"the run has {others} GPUs of other hosts; with {len(names)} more it has over {MAX_RUN_GPUS}"
            )
        if len(set(names)) < len(names) or any(name.rpartition("/")[0] != host for name in names):
            raise ValueError(f"host {host} gives its GPUs invalid names: {', '.join(names[:8])}")

    def _check_pool(self, report: AgentReport) -> None:
        host = report.host
        if report.pool == "local":
            raise ValueError(f"host {host} names no pool; only the coordinator's own host has none")
        if (former := self._pools.get(host, report.pool)) != report.pool:
            raise ValueError(
                f"host {host} took part in this run with --pool {former}: keep the pool, or choose another name with "
                "--host"
            )
        if report.pool == "spot":
            if not self._config.elastic.inter:
                raise ValueError(
                    "elastic.inter = false: this job uses no GPUs that arrive; start it with elastic.inter = true"
                )
            return
        wanted, size = self._config.rollout.reserved_gpus, self._config.rollout.gpus_per_worker
        if not wanted:
            raise ValueError(
                "rollout.reserved_gpus = 0: this job awaits no reserved host; join with --pool spot"
            )
        if not self._num_missing(but=host):
            raise ValueError(
                f"the {wanted} reserved GPUs that the job awaits are there: join with --pool spot"
            )
        if len(report.gpus) < size:
            raise ValueError(
                f"host {host} offers {len(report.gpus)} GPU(s), and a worker needs rollout.gpus_per_worker = {size}"
            )

    def _of(self, agent: str) -> Host | None:
        return next((host for host in self._hosts.values() if host.agent == agent), None)

    # what agents are told

    def return_gpus(self, gpus: Sequence[GpuId]) -> None:
        """Confirm to the agent that nothing of the run uses its GPUs any more."""
        for host in self._hosts.values():
            mine = tuple(gpu for gpu in host.gpus if gpu in gpus)
            if not mine:
                continue
            try:
                self._server.notify(host.agent, GpusReturned(mine))
            except (PeerGoneError, QueueFullError) as error:
                log.warning("host %s could not be sent its GPUs: %s", host.name, error)
