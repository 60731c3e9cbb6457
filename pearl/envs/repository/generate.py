"""``python -m pearl.envs.repository.generate PACKAGE ... --evaluation PACKAGE ... --out DIR``: makes repair tasks.

A task is a function of an installed, permissively licensed package with one operator or number changed, such that
examples in its docstring passed before and fail after. Packages are for training or for evaluation, never for both.
"""

import argparse
import asyncio
import shutil
import sys
from collections.abc import Sequence
from importlib import metadata
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path

import msgspec

from pearl.envs.repository.environment import refuse_leaks
from pearl.envs.repository.grading import grade
from pearl.envs.repository.mutations import Mutation, mutations
from pearl.envs.repository.source import Files, files_of, is_shown
from pearl.envs.repository.tasks import Doctest, RepositoryTask
from pearl.envs.sandbox import Kind, SandboxLimits, preflight
from pearl.types.exit_codes import EXIT_FAILURE, EXIT_USAGE

PERMISSIVE = ("mit", "bsd", "apache", "isc", "psf", "python software foundation", "unlicense", "zlib")
NOT_PERMISSIVE = ("gpl", "mpl", "mozilla", "epl", "cddl", "proprietary")
TEST_LIMIT_S = 20.0


def main(arguments: Sequence[str]) -> int:
    options = parse(arguments)
    splits = {"train": options.packages, "evaluation": options.evaluation}
    both = sorted(set(options.packages) & set(options.evaluation))
    try:
        if both:
            raise ValueError(f"{', '.join(both)}: is for training or for evaluation, not for both")
        kind: Kind = "subprocess" if options.sandbox == "subprocess" else "bubblewrap"
        preflight(kind)
        refuse_leaks(sorted({*options.packages, *options.evaluation}), kind, SandboxLimits())
        for packages in splits.values():
            for package in packages:
                copy_package(package, options.out / "repositories" / package)
    except ValueError as error:
        sys.stderr.write(f"error: {error}\n")
        return EXIT_USAGE
    counts = {}
    for split, packages in splits.items():
        made = [
            task
            for package in packages
            for task in asyncio.run(make_tasks(options.out, package, kind, options.tasks))
        ]
        (options.out / f"{split}.jsonl").write_bytes(msgspec.json.Encoder().encode_lines(made))
        counts[split] = len(made)
    sys.stdout.write(
        f"{counts['train']} tasks to train on, {counts['evaluation']} to evaluate, in {options.out}\n"
    )
    return 0 if counts["train"] else EXIT_FAILURE


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m pearl.envs.repository.generate",
        description="Make repair tasks of installed packages.",
    )
    parser.add_argument("packages", nargs="+", metavar="PACKAGE", help="modules to train on")
    parser.add_argument(
        "--evaluation", nargs="*", default=[], metavar="PACKAGE", help="modules to evaluate on"
    )
    parser.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="a directory for tasks and sources"
    )
    parser.add_argument(
        "--tasks", type=int, default=200, metavar="N", help="of a package, at most (default: 200)"
    )
    parser.add_argument("--sandbox", choices=("bubblewrap", "subprocess"), default="bubblewrap")
    return parser.parse_args(arguments)


def copy_package(package: str, target: Path) -> None:
    """Copy the Python sources of an installed top-level module.

    Raises:
        ValueError: it is not installed, or its licence is not known to be permissive.
    """
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        raise ValueError(f"{package}: is not installed in this interpreter; pip install it first")
    _check_licence(package)
    shutil.rmtree(target, ignore_errors=True)
    origin = Path(spec.origin)
    if origin.name != "__init__.py":
        target.mkdir(parents=True)
        shutil.copy(origin, target / origin.name)
        return
    for file in sorted(origin.parent.rglob("*.py")):
        name = file.relative_to(origin.parent.parent)
        if is_shown(name.as_posix()):
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, target / name)


async def make_tasks(out: Path, package: str, kind: Kind, limit: int) -> list[RepositoryTask]:
    """Make at most ``limit`` tasks, one a line of code, each tried in a sandbox."""
    repository = f"repositories/{package}"
    whole = RepositoryTask(package, "", str((out / repository).resolve()))
    files = files_of(whole)
    found: list[RepositoryTask] = []
    for path, content in files.items():
        try:
            candidates = list(mutations(path, content.decode()))
        except (SyntaxError, UnicodeError):
            continue
        by_function = groupby(candidates, key=lambda mutation: mutation.function)
        for _, group in by_function:
            found += await _of_function(whole, files, list(group), kind, limit - len(found))
            if len(found) >= limit:
                return [msgspec.structs.replace(task, repository=repository) for task in found]
    return [msgspec.structs.replace(task, repository=repository) for task in found]


async def _of_function(
    whole: RepositoryTask, files: Files, candidates: list[Mutation], kind: Kind, limit: int
) -> list[RepositoryTask]:
    found: list[RepositoryTask] = []
    if not await _passes(_task(whole, candidates[0]), files, kind):
        return found
    lines: set[int] = set()
    for mutation in candidates:
        if len(found) >= limit or mutation.line in lines:
            continue
        task = _task(whole, mutation)
        source = files[mutation.edit.path].decode()
        broken = {**files, mutation.edit.path: mutation.edit.broken(source).encode()}
        if not await _passes(task, broken, kind):
            lines.add(mutation.line)
            found.append(task)
    return found


async def _passes(task: RepositoryTask, files: Files, kind: Kind) -> bool:
    return (await grade(task, files, kind, SandboxLimits(), TEST_LIMIT_S)).passed


def _task(whole: RepositoryTask, mutation: Mutation) -> RepositoryTask:
    edit = mutation.edit
    module = edit.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    return RepositoryTask(
        instance_id=f"{whole.instance_id}-{mutation.function}-{edit.offset}-{edit.new.replace(' ', '_')}",
        instruction=(
            f"The function {mutation.function} in {edit.path} has a bug: it does not do what its docstring says. "
            "Repair it."
        ),
        repository=whole.repository,
        edits=(edit,),
        module=whole.instance_id,
        doctests=(Doctest(module, mutation.examples),),
    )


def _check_licence(package: str) -> None:
    names = metadata.packages_distributions().get(package, [])
    if not names:
        raise ValueError(f"{package}: belongs to no installed distribution, so its licence is not known")
    found = metadata.metadata(names[0])
    values = [
        *(found.get_all("License-Expression") or [""]),
        *(found.get_all("License") or [""]),
        *(found.get_all("Classifier") or []),
    ]
    said = " ".join(str(value)[:200] for value in values[:2] if value) + " ".join(
        str(value) for value in values[2:] if str(value).startswith("License")
    )
    text = said.lower()
    if any(word in text for word in NOT_PERMISSIVE) or not any(word in text for word in PERMISSIVE):
        raise ValueError(
            f"{package}: its licence is not known to be permissive ({said[:100] or 'none is stated'})"
        )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
