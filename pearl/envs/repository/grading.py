"""Whether a model's changes pass the hidden tests: in a fresh sandbox, never in the one that it worked in."""

import secrets
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

import msgspec

from pearl.envs.protocol import InfrastructureError
from pearl.envs.repository.source import Files, is_shown, pack
from pearl.envs.repository.tasks import RepositoryTask
from pearl.envs.sandbox import ExecResult, Kind, Sandbox, SandboxLimits

RUNNER = (Path(__file__).parent / "runner.py").read_bytes()
STEERING = {"conftest.py", "pytest.ini", "tox.ini", "sitecustomize.py", "usercustomize.py"}
"""Files that change how tests run: a model's are not taken."""
COMMAND_LIMIT_S = 30.0


class Result(msgspec.Struct, frozen=True):
    passed: bool
    output: str


def changes(before: Files, after: Files) -> tuple[Files, list[str]]:
    """Return what a model changed or added, and what it deleted, of the files that count."""
    changed = {path: data for path, data in after.items() if before.get(path) != data and _counts(path)}
    deleted = [path for path in before if path not in after and _counts(path)]
    return changed, deleted


def apply(before: Files, changed: Mapping[str, bytes], deleted: list[str]) -> Files:
    return {path: data for path, data in {**before, **changed}.items() if path not in deleted}


async def grade(
    task: RepositoryTask, files: Files, kind: Kind, limits: SandboxLimits, timeout_s: float
) -> Result:
    """Run the hidden tests on these files.

    Raises:
        InfrastructureError: the tests could not be put there.
    """
    hidden = {path: text.encode() for path, text in task.hidden_files.items()}
    secret = secrets.token_hex(16)
    async with Sandbox(kind, limits) as sandbox:
        await upload(sandbox, {**files, **hidden})
        if task.test_patch:
            await sandbox.write("test.patch", task.test_patch.encode())
            done = await run_in_repository(sandbox, ["git", "apply", "../test.patch"], COMMAND_LIMIT_S)
            if done.exit_code:
                # The model's changes may stand in its way: that is a failed test, and an unfit task otherwise.
                return Result(False, f"the tests' patch does not apply: {_text(done)}")
        if task.test_command:
            done = await run_in_repository(sandbox, list(task.test_command), timeout_s)
            if done.exit_code or done.timed_out or done.exceeded:
                return Result(False, _text(done))
        if not (task.doctests or task.test_files):
            return Result(True, "")
        spec = {
            "secret": secret,
            "doctests": msgspec.to_builtins(task.doctests),
            "files": list(task.test_files),
        }
        await sandbox.write("runner.py", RUNNER)
        await sandbox.write("spec.json", msgspec.json.encode(spec))
        done = await sandbox.exec(
            ["python3", "-I", "-S", "runner.py", "repo", "spec.json"], timeout_s=timeout_s
        )
        lines = done.output.decode(errors="replace").rstrip().splitlines()
        passed = lines[-1:] == [f"{secret} passed"] and not done.timed_out and not done.exceeded
        return Result(passed, "\n".join(line for line in lines if secret not in line))


async def upload(sandbox: Sandbox, files: Files) -> None:
    """Put the files into the directory ``repo``."""
    await sandbox.write("repo.tar", pack(files))
    command = "mkdir repo && tar xf repo.tar -C repo && rm repo.tar"
    done = await sandbox.exec(["bash", "-c", command], timeout_s=COMMAND_LIMIT_S)
    if done.exit_code:
        raise InfrastructureError(f"the repository could not be put into the sandbox: {_text(done)}")


async def run_in_repository(sandbox: Sandbox, argv: list[str], timeout_s: float) -> ExecResult:
    return await sandbox.exec(["bash", "-c", 'cd repo && exec "$@"', "bash", *argv], timeout_s=timeout_s)


def _counts(path: str) -> bool:
    name = PurePosixPath(path).name
    return is_shown(path) and name not in STEERING and not name.endswith(".pth")


def _text(done: ExecResult) -> str:
    why = "timed out. " if done.timed_out else f"exceeded {done.exceeded}. " if done.exceeded else ""
    return why + done.output.decode(errors="replace")
