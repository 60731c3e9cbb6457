"""Tasks on repositories: lines of a JSONL file, made by the generator or in the form of SWE-bench."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec


class Edit(msgspec.Struct, frozen=True):
    """A replacement that breaks the source: ``old`` at ``offset`` (characters) becomes ``new``."""

    path: str
    offset: int
    old: str
    new: str

    def broken(self, source: str) -> str:
        """ValueError when the source is not the one that the edit was made for."""
        end = self.offset + len(self.old)
        if source[self.offset : end] != self.old:
            raise ValueError(f"{self.path}: does not have {self.old!r} at {self.offset}")
        return source[: self.offset] + self.new + source[end:]


class Doctest(msgspec.Struct, frozen=True):
    module: str
    text: str  # a docstring with its examples


class RepositoryTask(msgspec.Struct, frozen=True):
    instance_id: str
    instruction: str
    repository: str  # a directory or a git bundle
    base_commit: str = ""  # "" = the directory as it is
    edits: tuple[Edit, ...] = ()  # what is broken before the model sees it
    module: str = ""  # top-level module that must not be importable from elsewhere
    doctests: tuple[Doctest, ...] = ()  # hidden
    hidden_files: dict[str, str] = {}  # written over the model's files before grading
    test_files: tuple[str, ...] = ()  # of those, with test functions or unittest cases
    test_patch: str = ""  # applied before grading
    test_command: tuple[str, ...] = ()  # run in the repository; exit code 0 = the tests pass
    patch: str = ""  # a reference solution

    @property
    def has_tests(self) -> bool:
        return bool(self.doctests or self.test_files or self.test_command)


def load_repository_tasks(
    path: Path, repositories: str, test_command: tuple[str, ...]
) -> list[RepositoryTask]:
    """Read the tasks; relative repositories count from the file, or from ``repositories`` where that is given.

    Raises:
        ValueError: a line is no task, or its repository is not on this host; nothing is downloaded.
    """
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from None
    root = Path(repositories) if repositories else path.parent
    return [
        _task(line, f"{path}: line {number}", root, test_command)
        for number, line in enumerate(lines, start=1)
        if line.strip()
    ]


def _task(line: bytes, where: str, root: Path, test_command: tuple[str, ...]) -> RepositoryTask:
    try:
        row = msgspec.json.decode(line)
        task = msgspec.convert(_in_our_form(row), RepositoryTask)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise ValueError(f"{where}: {error}") from None
    repository = root / task.repository
    if (not repository.is_dir() and repository.suffix != ".bundle") or not repository.exists():
        raise ValueError(
            f"{where}: {repository} is neither a directory nor a git bundle on this host, and nothing is downloaded; "
            "environment.options.repositories names the directory that holds the repositories"
        )
    if task.test_patch and not task.test_command:
        task = msgspec.structs.replace(task, test_command=test_command)
    if not task.has_tests:
        raise ValueError(
            f"{where}: {task.instance_id} has no tests (doctests, test_files or test_command); "
            'environment.options.test_command gives one to rows without, e.g. "python3 -m unittest"'
        )
    return msgspec.structs.replace(task, repository=str(repository.resolve()))


def _in_our_form(row: Any) -> Any:
    """SWE-bench's names for the same things: repo or repo_path, problem_statement."""
    if not isinstance(row, Mapping) or "problem_statement" not in row:
        return row
    repository = row.get("repository") or row.get("repo_path") or str(row.get("repo", "")).replace("/", "__")
    given = {key: row[key] for key in ("instance_id", "base_commit", "test_patch", "patch") if key in row}
    return {**given, "repository": repository, "instruction": row["problem_statement"]}
