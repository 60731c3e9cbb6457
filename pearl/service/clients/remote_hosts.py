"""The hosts that join and leave: which agent serves each, and what it means when one comes, gives notice or goes.

A host whose agent is gone has nothing of ours any more: its lives end, and the core is told once. The coordinator's own
host is not one of these; without it the run ends.
"""

import logging
from collections.abc import Callable, Sequence

import msgspec

from pearl.runtime.rpc_server import PeerGoneError, QueueFullError, RpcServer
from pearl.service.loop.inbox import Inbox
from pearl.service.processes.liveness_monitor import LivenessMonitor
from pearl.service.processes.process_manager import LOCAL_HOST, ProcessManager
from pearl.service.processes.process_specs import ProcessSpecs
from pearl.types.config import ElasticConfig
from pearl.types.events import GpusArrived, GpusReclaimed, HostLost
from pearl.types.ids import GpuId
from pearl.types.messages.control import MAX_RUN_GPUS, AgentReport, GpusReturned, Notice

log = logging.getLogger(__name__)


class Host(msgspec.Struct, eq=False):
    name: str
    agent: str  # its peer
    gpus: tuple[GpuId, ...]
    is_leaving: bool = False  # has given notice


class RemoteHosts:
    def __init__(
        self,
        config: ElasticConfig,
        server: RpcServer,
        liveness: LivenessMonitor,
        specs: ProcessSpecs,
        processes: ProcessManager,
        inbox: Inbox,
        say: Callable[[str], None],
    ) -> None:
        self._config = config
        self._server = server
        self._liveness = liveness
        self._specs = specs
        self._processes = processes
        self._inbox = inbox
        self._announce = say
        self._hosts: dict[str, Host] = {}

    def hosts(self) -> set[str]:
        """Return the hosts on which something can be started now."""
        return {LOCAL_HOST} | {host.name for host in self._hosts.values() if not host.is_leaving}

    # what agents say

    def joined(self, agent: str) -> None:
        """Note an agent's hello; its report follows."""
        self._liveness.add(agent, lambda reason: self.lose(agent, reason))

    def report(self, agent: str, report: AgentReport) -> None:
        """Take the host in, with all its GPUs.

        Raises:
            ValueError: why not.
        """
        self._check(report)
        if (old := self._hosts.get(report.host)) is not None:
            self._make_way(old, agent)
        self._specs.learn(report)
        gpus = tuple(GpuId(gpu.gpu) for gpu in report.gpus)
        self._hosts[report.host] = Host(report.host, agent, gpus)
        self._processes.add_agent(report.host, agent)
        pid = self._server.hello(agent).pid
        self._announce(f"host {report.host} joined with {', '.join(gpus)} (agent {pid})")
        self._inbox.put_urgent(GpusArrived(gpus))

    def notice(self, agent: str, notice: Notice) -> None:
        """Reclaim the agent's GPUs; the core returns those that are not there right away."""
        host = self._of(agent)
        if host is None:
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
        if not self._config.inter:
            raise ValueError(
                "elastic.inter = false: this job uses no GPUs that arrive; start it with elastic.inter = true"
            )
        if host == LOCAL_HOST or not host or "/" in host:
            raise ValueError(f'"{host}" cannot be the name of a host that joins: choose another with --host')
        if not report.preemptible:
            raise ValueError(f"host {host} is not preemptible; only the coordinator's own host is not")
        ours = self._server.installation
        if ours is not None and report.model != ours.model:
            raise ValueError(
                f"the model's files are {report.model or 'not known'} on host {host}, {ours.model} here: both need the "
                "same model under the same path"
            )
        names = [gpu.gpu for gpu in report.gpus]
        if not names:
            raise ValueError(f"host {host} has no GPUs: give it stand-ins with --virtual-gpus N")
        others = sum(len(other.gpus) for other in self._hosts.values() if other.name != host)
        if others + len(names) > MAX_RUN_GPUS:
            raise ValueError(
                f"the run has {others} GPUs of other hosts; with {len(names)} more it has over {MAX_RUN_GPUS}"
            )
        if len(set(names)) < len(names) or any(name.rpartition("/")[0] != host for name in names):
            raise ValueError(f"host {host} names its GPUs wrongly: {', '.join(names[:8])}")

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
                log.warning("host %s was not told of its GPUs: %s", host.name, error)
