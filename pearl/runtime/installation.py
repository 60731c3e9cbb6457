"""What this host would compute with, to be compared when a process joins: sources, versions, files of the model.

Two hosts with another sampler, another torch or another checkpoint under one path would train on tokens of a model that
nobody has. Nothing heavy is imported: versions are read from the packages' metadata, and of large files only their
sizes, headers and some samples.
"""

import os
import platform
import sys
from collections.abc import Iterator
from functools import cache
from hashlib import blake2b
from importlib import metadata
from pathlib import Path

import pearl
from pearl.types.config import Config
from pearl.types.messages.control import Installation, PeerKind

PACKAGES = ("torch", "transformers")
CHECKED: tuple[PeerKind, ...] = ("agent", "rollout", "training")
MODEL_SUFFIXES = {".json", ".safetensors", ".bin", ".pt", ".model", ".txt", ".jinja"}
WHOLE_BYTES = 1 << 20
"""Up to this size, and at the start of larger ones, a file of the model is read whole."""
SAMPLES, SAMPLE_BYTES = 16, 4096
DIGEST_BYTES = 8
NO_DIRECTORY = "none"


def installation(config: Config | None = None) -> Installation:
    """Describe this host's installation; with ``config`` also its SGLang, where the job uses it, and its model."""
    versions = {"python": ".".join(platform.python_version_tuple()[:2])}
    versions |= {name: _version(name, None) for name in PACKAGES}
    if config is None:
        return Installation(sources_digest(), versions)
    if config.rollout.engine == "sglang":
        versions["sglang"] = _version("sglang", _site_packages(config.sglang.python or sys.executable))
    return Installation(sources_digest(), versions, model_digest(config.model.path))


def differences(ours: Installation, theirs: Installation | None) -> str:
    """Why a process that runs ``theirs`` cannot be part of a run with ``ours``; "" = it can."""
    if theirs is None:
        return "it does not say what it runs; install the same PEARL there as here"
    pairs = [("PEARL's sources", theirs.sources, ours.sources)]
    pairs += [
        (name, theirs.versions[name], ours.versions[name])
        for name in sorted(theirs.versions.keys() & ours.versions.keys())
    ]
    if ours.model and theirs.model:
        pairs.append(("the model's files", theirs.model, ours.model))
    return "; ".join(
        f"{name}: {there or 'not installed'} there, {here or 'not installed'} here"
        for name, there, here in pairs
        if there != here
    )


@cache
def sources_digest() -> str:
    """Digest all Python sources of this package, and what it puts into SGLang's processes."""
    root = Path(pearl.__file__).resolve().parent
    digest = blake2b(digest_size=DIGEST_BYTES)
    for path in sorted(root.rglob("*.py")):
        digest.update(f"{path.relative_to(root)}\0".encode())
        digest.update(blake2b(path.read_bytes()).digest())
    return digest.hexdigest()


@cache
def model_digest(path: str) -> str:
    """Digest the files of a model directory; "none" when there is no such directory, as for the built-in model."""
    directory = Path(path)
    if not directory.is_dir():
        return NO_DIRECTORY
    digest = blake2b(digest_size=DIGEST_BYTES)
    for file in sorted(directory.iterdir()):
        if file.suffix in MODEL_SUFFIXES and file.is_file():
            size = file.stat().st_size
            digest.update(f"{file.name}\0{size}\0".encode())
            for piece in _pieces(file, size):
                digest.update(piece)
    return digest.hexdigest()


def _pieces(file: Path, size: int) -> Iterator[bytes]:
    with file.open("rb") as stream:
        yield stream.read(WHOLE_BYTES)
        rest = size - WHOLE_BYTES
        if rest <= 0:
            return
        for sample in range(1, SAMPLES + 1):
            stream.seek(max(WHOLE_BYTES, WHOLE_BYTES + rest * sample // SAMPLES - SAMPLE_BYTES), os.SEEK_SET)
            yield stream.read(SAMPLE_BYTES)


def _site_packages(python: str) -> list[str]:
    """Return where the packages of another interpreter, of a virtual environment, are."""
    prefix = Path(python).parent.parent
    return [str(path) for path in sorted(prefix.glob("lib/python3*/site-packages"))]


def _version(name: str, paths: list[str] | None) -> str:
    """ "" = not installed. ``paths`` None = this interpreter's."""
    if paths is None:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            return ""
    found = list(metadata.distributions(name=name, path=paths))
    return found[0].version if found else ""
