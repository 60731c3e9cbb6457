"""``python -m pearl.workers.export RUN_DIR OUT [--step N]``: a run's weights as a Hugging Face directory.

The files are loaded again before OUT gets its name, and every tensor is compared. An ExportReport as JSON goes to
stdout, whatever happened.
"""

import argparse
import contextlib
import logging
import os
import shutil
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import torch
import xxhash
from transformers import PreTrainedModel

from pearl.types.config import Config, ModelConfig
from pearl.types.export_report import ExportReport
from pearl.workers.disk_space import require_space
from pearl.workers.model import TINY_MODEL, build_empty
from pearl.workers.training.checkpoint import Checkpoint, CheckpointStore, PartReader
from pearl.workers.training.trainer import MODEL, checkpoint_root
from pearl.workers.weight_source import load_whole
from pearl.workers.weight_transfer.checksum import canonical_tensors, tensor_bytes

SHARD_SIZE = "4GB"
EMBEDDING = "lm_head.weight"
"""Of the built-in model, whose embedding and output layer are one tensor, under the first of its names."""
FILES_BESIDE_WEIGHTS = (
    "tokenizer*",
    "vocab.*",
    "merges.txt",
    "*.tiktoken",
    "*.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "additional_chat_templates",
    "generation_config.json",
    "LICENSE*",
    "NOTICE*",
)
"""What a source has that belongs to its model and that training leaves as it is."""

log = logging.getLogger(__name__)


def export(run_dir: Path, out: Path, step: int | None) -> ExportReport:
    """Write the checkpoint of ``step``, the newest one by default, to ``out``, which comes to be whole or not at all.

    Raises:
        ValueError: the run, the checkpoint or ``out`` cannot be used; says what to do.
        OSError: ``out`` cannot be written.
    """
    if out.exists() or out.is_symlink():
        raise ValueError(f"{out}: is there already; name a directory that does not exist, or remove it")
    config = _config(run_dir)
    checkpoint = _checkpoint(run_dir, step)
    with checkpoint.reader(MODEL) as read:
        model = _filled(config.model, read, checkpoint.description.step)
    out.absolute().parent.mkdir(parents=True, exist_ok=True)
    with _hidden_until_whole(out) as directory:
        tensors = canonical_tensors(model)
        require_space(directory, sum(tensor.numel() * tensor.element_size() for _, tensor in tensors))
        model.save_pretrained(directory, max_shard_size=SHARD_SIZE)
        notes = _copy_files(config.model, directory)
        expected = _digests(model)
        dtype = model.dtype
        del model, tensors  # not two models in memory
        _compare(_digests(load_whole(directory, dtype)), expected)
        num_bytes = _share(directory)
    return ExportReport(
        step=checkpoint.description.step, num_tensors=len(expected), num_bytes=num_bytes, notes=notes
    )


def _config(run_dir: Path) -> Config:
    try:
        config = msgspec.json.decode((run_dir / "config.json").read_bytes(), type=Config)
    except FileNotFoundError:
        raise ValueError(f"{run_dir}: is not a run directory (it has no config.json)") from None
    except msgspec.DecodeError as error:
        raise ValueError(f"{run_dir / 'config.json'}: {error}; put it back as the run wrote it") from None
    if config.training.engine == "emulated":
        raise ValueError(f'{run_dir}: was trained with training.engine = "emulated" and has no weights')
    return config


def _checkpoint(run_dir: Path, step: int | None) -> Checkpoint:
    """Find the checkpoint and read every byte of it."""
    store = CheckpointStore(checkpoint_root(run_dir), keep=0)
    if step is None:
        steps = store.steps()
        if not steps:
            raise ValueError(f"{store.root}: holds no complete checkpoint, so there is nothing to export yet")
        step = steps[-1]
    return store.verified(step)


def _filled(config: ModelConfig, read: PartReader, step: int) -> PreTrainedModel:
    """Build the model with the checkpoint's weights, in the dtypes in which it is served."""
    names = read.names()
    # The built-in model is as large as the environment's vocabulary; a directory says its own size.
    rows = len(read(EMBEDDING)) if config.path == TINY_MODEL and EMBEDDING in names else 1
    model = build_empty(config, rows)
    tensors = dict(canonical_tensors(model))
    if names != tensors.keys():
        raise ValueError(_differs(config, step, min(names ^ tensors.keys())))
    with torch.no_grad():
        for name, tensor in tensors.items():
            found = read(name)
            if found.shape != tensor.shape:
                raise ValueError(_differs(config, step, name))
            tensor.copy_(found)
    return model


def _differs(config: ModelConfig, step: int, name: str) -> str:
    return (
        f"the checkpoint of step {step} is not of the model that model.path = {config.path!r} names now: {name!r} "
        "differs; put the model directory back as it was when the run started"
    )


@contextlib.contextmanager
def _hidden_until_whole(out: Path) -> Iterator[Path]:
    """Give a directory beside ``out`` that takes its name at the end, and is removed when that is not reached."""
    directory = out.absolute().with_name(f".exporting-{out.name}-{os.getpid()}")
    directory.mkdir()
    try:
        yield directory
        for path in directory.rglob("*"):
            _sync(path)
        _sync(directory)
        if out.exists():  # since the work began
            raise ValueError(f"{out}: has come to be meanwhile; name another directory")
        directory.rename(out)
        _sync(out.absolute().parent)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _share(directory: Path) -> int:
    """Let others read the files as far as the umask does (safetensors' own are private); returns their bytes."""
    umask = os.umask(0)
    os.umask(umask)
    files = [path for path in directory.rglob("*") if path.is_file()]
    for path in files:
        path.chmod(0o666 & ~umask)
    return sum(path.stat().st_size for path in files)


def _copy_files(config: ModelConfig, directory: Path) -> tuple[str, ...]:
    """Copy what the source has beside its weights; returns what a person should know."""
    if config.path == TINY_MODEL:
        return ("the built-in model has no tokenizer: its ids are the environment's own",)
    source = Path(config.path)
    paths = {path for pattern in FILES_BESIDE_WEIGHTS for path in source.glob(pattern)}
    for path in sorted(paths):
        if path.is_dir():
            shutil.copytree(path, directory / path.name)
        else:
            shutil.copyfile(path, directory / path.name)
    has_tokenizer = any(path.name.startswith(("tokenizer", "vocab")) for path in paths)
    return () if has_tokenizer else (f"{source} has no tokenizer to copy",)


def _digests(model: PreTrainedModel) -> dict[str, str]:
    return {
        name: xxhash.xxh3_128_hexdigest(tensor_bytes(tensor)) for name, tensor in canonical_tensors(model)
    }


def _compare(found: dict[str, str], expected: dict[str, str]) -> None:
    if found != expected:
        names = found.keys() | expected.keys()
        name = min(name for name in names if found.get(name) != expected.get(name))
        raise RuntimeError(f"transformers does not load {name!r} as it was written")


def _end(number: int, _frame: object) -> None:
    sys.exit(128 + number)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m pearl.workers.export")
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--step", type=int)
    options = parser.parse_args(arguments)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _end)  # so that nothing half-written stays
    try:
        report, code = export(options.run_dir, options.out, options.step), 0
    except ValueError as error:
        report, code = ExportReport(problem=str(error)), 2
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        report, code = ExportReport(problem=f"{where}{error.strerror or error}"), 1
    sys.stdout.buffer.write(msgspec.json.encode(report))
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
