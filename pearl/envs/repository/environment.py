"""The model works in a sandbox with two tools, bash and edit, and ends by an answer without a call.

The reward is 1 when the hidden tests pass on its changes, 0 otherwise; out of turns is 0, since nothing was handed in.
"""

import asyncio
import json
import shlex
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pearl.envs.protocol import InfrastructureError, Split
from pearl.envs.repository import grading
from pearl.envs.repository.source import Files, files_of, unpack
from pearl.envs.repository.tasks import RepositoryTask, load_repository_tasks
from pearl.envs.sandbox import Kind, Sandbox, SandboxLimits, preflight
from pearl.envs.text import Message, TextEnvironment, TextEpisode, Tool

SYSTEM = (
    "You repair Python code. Use the tools to look and to change files; the current directory is the repository. "
    "When you are done, answer without a tool call."
)
MAX_OUTPUT_CHARACTERS = 8000
READ_LIMIT = 16 << 20


def _tool(name: str, description: str, **properties: str) -> Tool:
    parameters = {
        "type": "object",
        "properties": {key: {"type": "string", "description": text} for key, text in properties.items()},
        "required": list(properties),
    }
    return {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": parameters},
    }


TOOLS = [
    _tool("bash", "Run a command in the repository.", command="the command"),
    _tool(
        "edit",
        "Replace text that occurs once in a file.",
        path="the file",
        old="the text there now, exactly",
        new="the text in its place",
    ),
]


class RepositoryEnvironment(TextEnvironment):
    def __init__(
        self,
        *,
        tasks: str = "",
        evaluation_tasks: str = "",
        repositories: str = "",
        test_command: str = "",
        sandbox: str = "bubblewrap",
        command_timeout_s: float = 20.0,
        test_timeout_s: float = 60.0,
        memory_bytes: int = 1 << 30,
        disk_bytes: int = 256 << 20,
    ) -> None:
        """The keywords are ``environment.options``. ValueError names the one that is wrong."""
        if sandbox not in ("bubblewrap", "subprocess"):
            raise ValueError(
                f'environment.options.sandbox = "{sandbox}": use "bubblewrap", or "subprocess", which is not a sandbox'
            )
        if not tasks:
            raise ValueError(
                "environment.options.tasks: is missing; name a JSONL file of tasks, as "
                "python -m pearl.envs.repository.generate makes them"
            )
        self.kind: Kind = "bubblewrap" if sandbox == "bubblewrap" else "subprocess"
        self.command_timeout_s, self.test_timeout_s = command_timeout_s, test_timeout_s
        self.limits = SandboxLimits(memory_bytes=memory_bytes, disk_bytes=disk_bytes, read_bytes=READ_LIMIT)
        command = tuple(shlex.split(test_command))
        self._tasks = {
            "train": load_repository_tasks(Path(tasks), repositories, command),
            "evaluation": load_repository_tasks(Path(evaluation_tasks), repositories, command)
            if evaluation_tasks
            else [],
        }
        if not self._tasks["train"]:
            raise ValueError(f'environment.options.tasks = "{tasks}": there are no tasks in it')
        self.num_train_tasks = len(self._tasks["train"])
        self.num_evaluation_tasks = len(self._tasks["evaluation"])
        try:
            preflight(self.kind)
        except ValueError as error:
            raise ValueError(
                f'environment.options.sandbox: {error} (environment.options.sandbox = "subprocess" accepts that the '
                "model's commands run with your rights)"
            ) from error
        modules = sorted({task.module for split in self._tasks.values() for task in split if task.module})
        refuse_leaks(modules, self.kind, self.limits)

    def episode(self, split: Split, task: int) -> TextEpisode:
        return RepositoryEpisode(self._tasks[split][task], self)

    def solve(self, split: Split, task: int) -> Sequence[str | Message] | None:
        found = self._tasks[split][task]
        if found.patch:
            command = f"git apply - <<'PATCH_END'\n{found.patch.rstrip()}\nPATCH_END"
            return [_calling("bash", command=command), "Done."]
        if not found.edits:
            return None
        files = files_of(found)
        return [*[_undoing(edit.path, files[edit.path].decode(), edit) for edit in found.edits], "Done."]


class RepositoryEpisode(TextEpisode):
    def __init__(self, task: RepositoryTask, environment: RepositoryEnvironment) -> None:
        self._task = task
        self._environment = environment
        self._sandbox = Sandbox(environment.kind, environment.limits)
        self._files: Files = {}

    async def reset(self) -> tuple[Sequence[Message], Sequence[Tool]]:
        self._files = await asyncio.to_thread(files_of, self._task)
        await self._sandbox.start()
        await grading.upload(self._sandbox, self._files)
        return [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": self._task.instruction},
        ], TOOLS

    async def step(self, message: Message) -> tuple[Sequence[Message], float, bool]:
        calls = message.get("tool_calls", [])
        if not calls:
            return [], await self._reward(), True
        results = [
            {"role": "tool", "tool_call_id": call["id"], "content": await self._call(call["function"])}
            for call in calls
        ]
        return results, 0.0, False

    async def close(self) -> None:
        await self._sandbox.close()

    async def _call(self, function: dict[str, str]) -> str:
        arguments = json.loads(function["arguments"])
        names = {"bash": ("command",), "edit": ("path", "old", "new")}.get(function["name"])
        if names is None:
            return f"Error: there is no tool {function['name']}; there are bash and edit."
        if not all(isinstance(arguments.get(name), str) for name in names):
            return f"Error: {function['name']} needs {', '.join(names)}, each a string."
        if function["name"] == "bash":
            return await self._bash(arguments["command"])
        return await self._edit(arguments["path"], arguments["old"], arguments["new"])

    async def _bash(self, command: str) -> str:
        limit_s = self._environment.command_timeout_s
        if len(command) > 100_000 or "\0" in command:
            return "Error: the command is too long or holds a NUL."
        done = await grading.run_in_repository(self._sandbox, ["bash", "-c", command], limit_s)
        output = done.output.decode(errors="replace")
        if len(output) > MAX_OUTPUT_CHARACTERS:
            half = MAX_OUTPUT_CHARACTERS // 2
            output = f"{output[:half]}\n[... {len(output) - 2 * half} characters ...]\n{output[-half:]}"
        ended = f"ended after {limit_s:g} s" if done.timed_out else f"exit code {done.exit_code}"
        return f"{output}\n[{f'exceeded {done.exceeded}' if done.exceeded else ended}]"

    async def _edit(self, path: str, old: str, new: str) -> str:
        if path.startswith("/") or ".." in path.split("/") or "\0" in path:
            return "Error: the path leads out of the repository."
        try:
            text = (await self._sandbox.read(f"repo/{path}")).decode()
            count = text.count(old) if old else 0
            if count != 1:
                return f"Error: the old text occurs {count} times in {path}; it must occur once."
            await self._sandbox.write(f"repo/{path}", text.replace(old, new).encode())
        except (OSError, UnicodeError) as error:
            return f"Error: {path}: {getattr(error, 'strerror', None) or 'is no text'}"
        return "Done."

    async def _reward(self) -> float:
        environment = self._environment
        after = await self._collected()
        if after is None:
            return 0.0
        files = grading.apply(self._files, *grading.changes(self._files, after))
        result = await grading.grade(
            self._task, files, environment.kind, environment.limits, environment.test_timeout_s
        )
        return float(result.passed)

    async def _collected(self) -> Files | None:
        """The files as the model left them; None when it left nothing that can be read."""
        done = await self._sandbox.exec(
            ["tar", "cf", "changes.tar", "-C", "repo", "."], timeout_s=self._environment.command_timeout_s
        )
        if done.exit_code:
            return None
        try:
            return unpack(await self._sandbox.read("changes.tar"))
        except (OSError, tarfile.TarError):
            return None


def refuse_leaks(modules: list[str], kind: Kind, limits: SandboxLimits) -> None:
    """Refuse packages that are installed where the model can read them; not to be called from a running event loop.

    Raises:
        ValueError: one is; names it.
    """
    if not modules:
        return
    code = "import importlib.util as u, sys; print(*[m for m in sys.argv[1:] if u.find_spec(m)])"

    async def find() -> list[str]:
        async with Sandbox(kind, limits) as sandbox:
            done = await sandbox.exec(["python3", "-c", code, *modules], timeout_s=30)
            if done.exit_code:
                raise InfrastructureError(
                    f"python3 does not run in the sandbox: {done.output.decode(errors='replace')}"
                )
            return done.output.decode().split()

    try:
        found = asyncio.run(find())
    except InfrastructureError as error:
        raise ValueError(f"environment.options.sandbox: {error}") from error
    if found:
        raise ValueError(
            f"{', '.join(found)} can be imported in the sandbox without the task's "
            "repository: the model could read the answer there; uninstall it from the interpreter that the sandbox "
            "shows (PEARL's own packages belong into a virtual environment, which it does not show), or use other "
            "packages"
        )


def _calling(name: str, **arguments: Any) -> Message:
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "", "type": "function", "function": function}],
    }


def _undoing(path: str, source: str, edit: Any) -> Message:
    """An edit that restores what was there, with as much around it as makes it the only such place."""
    start, end = edit.offset, edit.offset + len(edit.new)
    before, after = start, end
    while source.count(source[before:after]) != 1:
        before, after = max(0, before - 20), min(len(source), after + 20)
    return _calling(
        "edit", path=path, old=source[before:after], new=source[before:start] + edit.old + source[end:after]
    )
