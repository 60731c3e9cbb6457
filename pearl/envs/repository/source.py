"""The files of a repository as a model may see them: no history, no build, nothing that is not the source."""

import io
import subprocess
import tarfile
import tempfile
from functools import lru_cache
from pathlib import Path, PurePosixPath

from pearl.envs.protocol import InfrastructureError
from pearl.envs.repository.tasks import RepositoryTask

Files = dict[str, bytes]
HIDDEN_FOLDERS = {".git", ".hg", ".svn", ".venv", "venv", "build", "dist", "__pycache__", "node_modules"}
HIDDEN_SUFFIXES = (".whl", ".pyc", ".egg", ".bundle", ".orig", ".rej")
HIDDEN_PARTS = (".egg-info", ".dist-info")
MAX_BYTES = 64 << 20
GIT_LIMIT_S = 60.0


def files_of(task: RepositoryTask) -> Files:
    """The files at the task's start, broken where the task says so.

    Raises:
        InfrastructureError: they cannot be had.
    """
    files = dict(_read(task.repository, task.base_commit))
    try:
        for edit in task.edits:
            files[edit.path] = edit.broken(files[edit.path].decode()).encode()
    except (KeyError, ValueError) as error:
        raise InfrastructureError(
            f"{task.instance_id}: its edits do not fit {task.repository}: {error}"
        ) from error
    return files


def is_shown(path: str) -> bool:
    parts = PurePosixPath(path).parts
    return not (
        HIDDEN_FOLDERS & set(parts)
        or path.endswith(HIDDEN_SUFFIXES)
        or any(p.endswith(HIDDEN_PARTS) for p in parts)
    )


@lru_cache(maxsize=8)
def _read(repository: str, commit: str) -> Files:
    path = Path(repository)
    try:
        if commit or path.is_file():
            return _archived(path, commit or "HEAD")
        found = {
            file.relative_to(path).as_posix(): file
            for file in sorted(path.rglob("*"))
            if file.is_file() and not file.is_symlink()
        }
        return _bounded(
            {name: file.read_bytes() for name, file in found.items() if is_shown(name)}, repository
        )
    except (OSError, subprocess.SubprocessError, tarfile.TarError) as error:
        said = getattr(error, "stderr", b"") or b""
        raise InfrastructureError(
            f"{repository}: cannot be read: {error} {said.decode(errors='replace')}"
        ) from error


def _archived(path: Path, commit: str) -> Files:
    with tempfile.TemporaryDirectory(prefix="pearl-repository-") as directory:
        if path.is_file():  # a bundle
            _git("clone", "--quiet", "--bare", "--", str(path), directory)
        where = directory if path.is_file() else str(path)
        content = _git("-C", where, "archive", "--format=tar", commit)
    return _bounded({name: data for name, data in unpack(content).items() if is_shown(name)}, str(path))


def _git(*words: str) -> bytes:
    if any(word.startswith("-") for word in words[-1:]):
        raise OSError(f"{words[-1]!r} is no commit")
    command = ["git", "-c", "core.hooksPath=/dev/null", "-c", "safe.directory=*", *words]
    return subprocess.run(
        command, capture_output=True, check=True, timeout=GIT_LIMIT_S, stdin=subprocess.DEVNULL
    ).stdout


def _bounded(files: Files, repository: str) -> Files:
    total = sum(map(len, files.values()))
    if total > MAX_BYTES:
        raise OSError(f"{repository} has {total} bytes of source, at most {MAX_BYTES} can be a task")
    return files


def pack(files: Files) -> bytes:
    """A tar of the files."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(content), 0o644
            archive.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()


def unpack(content: bytes) -> Files:
    """The regular files of a tar that nobody vouches for; links, devices and paths that lead out are left out."""
    files: Files = {}
    with tarfile.open(fileobj=io.BytesIO(content), mode="r:") as archive:
        for entry in archive:
            path = PurePosixPath(entry.name)
            if entry.isreg() and not path.is_absolute() and ".." not in path.parts:
                file = archive.extractfile(entry)
                assert file is not None
                files[str(path)] = file.read()
    return files
