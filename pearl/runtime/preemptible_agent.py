"""A node agent of a host that joins a run by its coordinator's address and may be taken away at any time.

On a signal it gives notice and stays until its GPUs are given back or the grace is over. When the coordinator is lost
its groups have ended, and it tries to join again for a while, as a new incarnation.
"""

import asyncio
import logging
import os
import secrets
import tempfile
from pathlib import Path

import msgspec

from pearl.runtime import coordinator_file
from pearl.runtime.installation import installation
from pearl.runtime.node_agent import NodeAgent
from pearl.runtime.rpc_client import RpcClient
from pearl.runtime.signals import watch_signals
from pearl.runtime.worker_process import make_client
from pearl.types.messages.control import AgentReport, ControlMessage, Hello

RETRY_S = 1.0
"""Between two tries to join: a coordinator that drops it again and again is not kept busy by it."""
FILE_TRY_S = 5.0
"""For one try at an address from a file, which may have another one by then."""
MIN_TRY_S = 2.0
"""For one try, however short the time for all of them."""

log = logging.getLogger(__name__)


class GivenUpError(Exception):
    """It is not let in, or lost the coordinator for too long; the text is for the person."""


class NoRunError(GivenUpError):
    """No run was there for as long as it waits: nothing is wrong with this host."""


class JoinOptions(msgspec.Struct, frozen=True, kw_only=True):
    """On which a host joins."""

    address: str = ""  # of the coordinator; "" = as the file says
    file: Path | None = None  # the run directory's, read again at each try
    run_id: str = ""  # "" = whichever run is there
    grace_s: float
    rejoin_s: float  # for how long it tries to join, at first and again
    lifetime_s: float | None = None  # the host is taken away then, counted from now; None = nobody knows
    log_directory: Path | None = None  # None = the run's own where it is shared, else a new temporary one
    lease_s: float
    heartbeat_period_s: float
    queue_messages: int
    max_frame_bytes: int


class PreemptibleAgent:
    """Runs once."""

    def __init__(self, terms: JoinOptions, report: AgentReport, *, adopts_orphans: bool = False) -> None:
        assert report.pool != "local"
        self._adopts_orphans = adopts_orphans
        self._terms = terms
        self._report = report
        self._run_id = terms.run_id
        # A name of its own for each process: who else joined, or was here before, is not known on this host.
        self._slot = 1 + secrets.randbelow(2**31 - 1)
        self._agent: NodeAgent | None = None
        self._called_off = asyncio.Event()  # it was told to leave
        self._logs = terms.log_directory

    async def run(self) -> str:
        """Run until it leaves as it was asked to; returns why."""
        loop = asyncio.get_running_loop()
        watch_signals(self.call_off)
        lifetime_s = self._terms.lifetime_s
        if lifetime_s is not None:
            loop.call_later(max(0.0, lifetime_s - self._terms.grace_s), self.call_off, "end of its lifetime")
        give_up_at = loop.time() + self._terms.rejoin_s
        incarnation = 0
        while True:
            found = self._find()
            if found == "over":
                return "the run is over"
            if not found:
                if loop.time() >= give_up_at:
                    raise NoRunError(self._nobody_there("the file names no live run"))
                if await self._is_called_off(RETRY_S):
                    return "asked to leave"
                continue
            incarnation += 1
            agent = self._agent = NodeAgent(
                self._report, self._terms.lease_s, self._choose_logs, adopts_orphans=self._adopts_orphans
            )
            peer = self._make_peer(found, agent, incarnation)
            limits = [loop.call_at(max(give_up_at, loop.time() + MIN_TRY_S), self._lose_patience, agent)]
            if self._terms.file is not None:
                limits.append(loop.call_later(FILE_TRY_S, self._lose_address, agent, peer))
            reason = await agent.run(peer)
            for limit in limits:
                limit.cancel()
            if self._terms.file is None:
                self._run_id = peer.run_id
            if agent.survivors:
                raise GivenUpError(
                    f"{reason}; these processes do not end on SIGKILL, and hold what they had of this host: "
                    + ", ".join(agent.survivors)
                )
            if self._called_off.is_set() or (agent.cause == "asked" and self._terms.file is None):
                return reason
            if agent.cause == "refused":
                raise GivenUpError(reason)
            if agent.has_joined:
                give_up_at = loop.time() + self._terms.rejoin_s
                log.warning("%s; trying to join again for %g s", reason, self._terms.rejoin_s)
            if loop.time() >= give_up_at:
                raise NoRunError(self._nobody_there(reason))
            if await self._is_called_off(RETRY_S):
                return "asked to leave"

    def _lose_patience(self, agent: NodeAgent) -> None:
        if not agent.has_joined:
            agent.leave(f"no answer from {self._terms.file or self._terms.address} in that time", "lost")

    def _lose_address(self, agent: NodeAgent, peer: RpcClient) -> None:
        """Read the file again: perhaps another life of the run is elsewhere."""
        if not peer.has_joined:
            agent.leave(f"no answer from {peer.address} in {FILE_TRY_S:g} s", "lost")

    def _find(self) -> str:
        """Return the coordinator's address: "" while there is none, and "over" when there will be none any more."""
        if self._terms.file is None:
            return self._terms.address
        said = coordinator_file.read(self._terms.file)
        if said is None or (self._terms.run_id and said.run_id != self._terms.run_id):
            return ""
        self._run_id = said.run_id
        return {"running": f"tcp://{said.address}", "stopped": "", "over": "over"}[said.state]

    def _nobody_there(self, last: str) -> str:
        address, limit_s = self._terms.file or self._terms.address, self._terms.rejoin_s
        return (
            f"no coordinator let it in at {address} for {limit_s:g} s, last: {last}. A run that was resumed listens "
            "at a new address unless runtime.address names a port"
        )

    def call_off(self, reason: str) -> None:
        """Give notice that the host is taken away and leave; a second call leaves at once."""
        self._called_off.set()
        if self._agent is not None:
            self._agent.give_notice(self._terms.grace_s, reason)

    async def _is_called_off(self, limit_s: float) -> bool:
        """Whether it is told to leave within the limit."""
        try:
            async with asyncio.timeout(limit_s):
                await self._called_off.wait()
        except TimeoutError:
            return False
        return True

    def _make_peer(self, address: str, agent: NodeAgent, incarnation: int) -> RpcClient:
        terms = self._terms
        hello = Hello(
            "agent",
            self._slot,
            incarnation,
            self._report.host,
            os.getpid(),
            self._run_id,
            installation=installation(),
        )
        return make_client(address, terms, hello, ControlMessage, agent)

    def _choose_logs(self, wanted: Path, run_id: str) -> Path:
        """The run's own directory for logs where this host shares it; another run's, or a stranger's, is left alone."""
        if self._logs is None and _is_of_run(wanted.parent, run_id):
            return wanted
        if self._logs is None:
            self._logs = Path(tempfile.mkdtemp(prefix=f"pearl-{self._report.host}-"))
        return self._logs


def _is_of_run(run_dir: Path, run_id: str) -> bool:
    try:
        known = (run_dir / "run_id").read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return False
    return known == run_id and os.access(run_dir / "logs", os.W_OK)
