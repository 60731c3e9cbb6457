"""The node agent of the coordinator's own host: a child process, through which all workers are started and ended."""

import asyncio
import os
import sys
from pathlib import Path

import pearl
from pearl.runtime import parent_death, process_markers
from pearl.runtime.process_group import log_tail
from pearl.service.processes.process_manager import LOCAL_HOST
from pearl.service.processes.process_specs import num_local_gpus, wants_prepared_process
from pearl.types.config import Config
from pearl.types.messages.control import AgentReport

AGENT_MODULE = "pearl.runtime.agent"
AGENT_NAME = "agent.0.1"
LEASE_S = 1e6
"""Whatever the others' is: the kernel ends it with the coordinator, which may well be stopped for a while (Ctrl-Z)."""

ENDED_ORDERLY = "the node agent of this host was ended (SIGTERM?), and with it all that ran here"


class AgentFailedError(Exception):
    """The node agent did not come up; the text says why and where its log is."""


class LocalAgent:
    def __init__(self, config: Config, run_id: str, logs: Path) -> None:
        self._config = config
        self._run_id = run_id
        self._log_directory = logs / AGENT_NAME
        self._process: asyncio.subprocess.Process | None = None
        self._report: asyncio.Future[AgentReport] = asyncio.get_running_loop().create_future()

    async def launch(self, address: str) -> None:
        """Start its process. OSError when that cannot be."""
        self._log_directory.mkdir(parents=True, exist_ok=True)
        with (self._log_directory / "agent.log").open("ab") as output:
            self._process = await asyncio.create_subprocess_exec(
                *self._command_line(address),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=self._environment(),
                start_new_session=True,  # a terminal's Ctrl-C is for the coordinator, which then ends the rest
            )

    async def report(self) -> AgentReport:
        """Return the agent's report; AgentFailedError when none comes within the limit of a start."""
        limit_s = self._config.runtime.start_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                return await self._report
        except TimeoutError:
            raise AgentFailedError(self._failure(f"gave no answer within {limit_s:g} s")) from None

    def reported(self, report: AgentReport) -> None:
        if not self._report.done():
            self._report.set_result(report)

    async def wait_exited(self) -> str:
        """Wait for its end, which is not wanted before ``end``; returns what to tell the person.

        Raises:
            AgentFailedError: it had not even come up.
        """
        assert self._process is not None
        code = await self._process.wait()
        text = self._failure(f"ended with exit code {code}") if code else ENDED_ORDERLY
        if not self._report.done():
            raise AgentFailedError(text)
        return text

    async def end(self, limit_s: float) -> bool:
        """Wait for it to end after a Shutdown; False when it is still there after ``limit_s``."""
        if self._process is None:
            return True
        try:
            async with asyncio.timeout(limit_s):
                await self._process.wait()
        except TimeoutError:
            return False
        return True

    def _command_line(self, address: str) -> list[str]:
        runtime = self._config.runtime
        options = {
            "--address": address,
            "--run-id": self._run_id,
            "--host": LOCAL_HOST,
            "--heartbeat-period-s": runtime.heartbeat_period_s,
            "--lease-s": LEASE_S,
            "--queue-messages": runtime.queue_messages,
            "--max-frame-bytes": runtime.max_frame_bytes,
        }
        if self._config.model.device == "cpu":
            options["--virtual-gpus"] = num_local_gpus(self._config)
        words = [str(word) for option in options.items() for word in option]
        flags = ["--prepare"] if wants_prepared_process(self._config) else []
        return [sys.executable, "-u", "-m", AGENT_MODULE, *words, *flags]

    def _environment(self) -> dict[str, str]:
        package_root = str(Path(pearl.__file__).resolve().parent.parent)
        paths = [package_root, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
        return {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)),
            process_markers.RUN_VARIABLE: self._run_id,
            process_markers.GROUP_VARIABLE: AGENT_NAME,
            parent_death.PARENT_VARIABLE: str(os.getpid()),
        }

    def _failure(self, what: str) -> str:
        tail = log_tail(self._log_directory)
        text = f"the node agent {what}; its log is in {self._log_directory}"
        return f"{text}\n{tail}" if tail else text
