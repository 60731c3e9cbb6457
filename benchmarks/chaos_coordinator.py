"""``pearl`` itself, whose server does what it is told on stdin: one JSON line a fault between it and a peer.

    {"fault": "delay", "kind": "rollout", "index": 1, "value": 0.3}

The peer is the one with that index, modulo how many there are, of the sorted peers of that kind; never the agent of
the coordinator's own host, without which a run ends. Used by ``benchmarks/chaos.py``.
"""

import asyncio
import os
import sys
from types import TracebackType
from typing import Literal, Self
from unittest import mock

import msgspec

from pearl.cli import main
from pearl.runtime.rpc_server import RpcServer
from pearl.service import run_loop
from pearl.service.processes.local_agent import AGENT_NAME

STDIN = 0
PIECE_BYTES = 1 << 16


class Fault(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    fault: Literal["drop in", "drop out", "delay", "cut", "heal"]
    kind: Literal["rollout", "training", "environment", "agent"]
    index: int
    value: float = 0.0  # frames to drop, seconds of delay


class FaultyHub(RpcServer):
    _unread = b""

    async def __aenter__(self) -> Self:
        await super().__aenter__()
        asyncio.get_running_loop().add_reader(STDIN, self._read)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        asyncio.get_running_loop().remove_reader(STDIN)
        await super().__aexit__(kind, value, trace)

    def _read(self) -> None:
        piece = os.read(STDIN, PIECE_BYTES)
        if not piece:  # nobody tells any more
            asyncio.get_running_loop().remove_reader(STDIN)
        *lines, self._unread = (self._unread + piece).split(b"\n")
        for line in lines:
            self._commit(msgspec.json.decode(line, type=Fault))

    def _commit(self, fault: Fault) -> None:
        names = sorted(n for n in self.peers() if n.startswith(f"{fault.kind}.") and n != AGENT_NAME)
        if not names:
            print(f"fault: {fault.fault}: no {fault.kind} to hurt", flush=True)
            return
        peer = names[fault.index % len(names)]
        match fault.fault:
            case "drop in":
                self.faults.drop(peer, "in", int(fault.value))
            case "drop out":
                self.faults.drop(peer, "out", int(fault.value))
            case "delay":
                self.faults.delay(peer, fault.value)
            case "cut":
                self.faults.partition(peer)
            case "heal":
                for name in names:  # whichever it was: others have come and gone since
                    self.faults.delay(name, 0.0)
                    self.faults.heal(name)
        print(f"fault: {fault.fault} {fault.value:g} of {peer}", flush=True)


if __name__ == "__main__":
    with mock.patch.object(run_loop, "RpcServer", FaultyHub):
        sys.exit(main(sys.argv[1:]))
