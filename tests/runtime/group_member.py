"""A process for tests: reports over a Unix socket who it is and keeps the connection, whose end tells its death.

``python -m group_member SOCKET BEHAVIOUR``. A report is one JSON line.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from typing import NoReturn

_connections: list[socket.socket] = []


def report(path: str, who: str, **more: object) -> None:
    """One line, on a connection of this process alone."""
    for connection in _connections:
        connection.close()
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(path)
    connection.sendall(json.dumps({"who": who, "pid": os.getpid(), **more}).encode() + b"\n")
    _connections[:] = [connection]


def stay() -> NoReturn:
    while True:
        time.sleep(3600)


def start_daemon(path: str) -> None:
    """A classic daemon: own session, adopted by init."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            report(path, "daemon")
            stay()
        os._exit(0)
    os.wait()


def try_store() -> bool:
    """The rendezvous store of this torchrun group listens already."""
    with socket.create_connection((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])), timeout=10):
        return os.environ["TORCHELASTIC_USE_AGENT_STORE"] == "True"


def main(path: str, behaviour: str) -> None:
    match behaviour:
        case "exit":
            sys.stderr.write("about to fail\n")
            sys.exit(3)
        case "polite":
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        case "stubborn":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        case "daemon":
            start_daemon(path)
        case "cleared":  # a child without the markers
            subprocess.Popen([sys.executable, __file__, path, "child"], env={})
        case "escape":  # a grandchild without the markers, in a session of its own, whose parent is gone
            code = "import subprocess, sys; subprocess.Popen(sys.argv[1:], env={}, start_new_session=True)"
            escaped = [sys.executable, __file__, path, "escaped"]
            subprocess.run([sys.executable, "-c", code, *escaped], env={}, check=True)
        case "rank":
            port = int(os.environ["MASTER_PORT"])
            report(path, f"rank{os.environ['RANK']}", port=port, agent_store=try_store())
            stay()
    names = (
        "OMP_NUM_THREADS",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING",
        "PEARL_RUN_ID",
        "PEARL_GROUP",
        "CUDA_VISIBLE_DEVICES",
    )
    report(path, behaviour, environment={name: os.environ.get(name) for name in names})
    stay()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
