"""What a sandbox allows, and what one command in it gave."""

from typing import Literal

import msgspec

from pearl.envs.protocol import InfrastructureError

Kind = Literal["bubblewrap", "subprocess"]
"""bubblewrap: namespaces of its own, nothing of the host but programs to read, no network.
subprocess: a directory and limits on each process; it isolates nothing, whoever runs in it has the worker's rights."""


class SandboxError(InfrastructureError):
    """The sandbox itself is gone or does not answer: no word about the command in it."""


class SandboxLimits(msgspec.Struct, frozen=True):
    memory_bytes: int = 1 << 30  # of each process, and with bubblewrap of all together
    disk_bytes: int = 256 << 20  # of one file; with bubblewrap of all files, which lie in memory
    processes: int = 64  # with bubblewrap
    output_bytes: int = 64 << 10  # of one command; its beginning and its end are kept
    read_bytes: int = 16 << 20  # of a file that is read


class ExecResult(msgspec.Struct, frozen=True):
    exit_code: int  # 128 + N: ended by signal N; 127: there is no such program
    output: bytes  # standard output and error as they came
    timed_out: bool = False
    exceeded: str = ""  # "memory" or "processes" when it was ended for that
    cut_bytes: int = 0  # of the output, left out in its middle
