"""``pearl export``: a run's weights as a Hugging Face directory, written by a process that may import torch."""

import subprocess
import sys
from pathlib import Path

import msgspec

from pearl.cli.probes import probe
from pearl.types.export_report import ExportReport

MODULE = "pearl.workers.export"
LIMIT_S = 4 * 3600.0
"""Hundreds of gigabytes over a slow file system, read twice and written once."""


def export(run_dir: Path, out: Path, step: int | None) -> int:
    """Write ``out``; returns the exit code."""
    arguments = [str(run_dir), str(out), *(() if step is None else ("--step", str(step)))]
    try:
        done = probe(MODULE, arguments, limit_s=LIMIT_S)
    except subprocess.TimeoutExpired:
        return _fail(f"{out}: was not written within {LIMIT_S:g} s", 1)
    try:
        report = msgspec.json.decode(done.stdout.splitlines()[-1], type=ExportReport)
    except (msgspec.DecodeError, IndexError):
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        return _fail(f"{out}: {lines[-1] if lines else f'exit code {done.returncode}'}", 1)
    if report.problem:
        return _fail(report.problem, done.returncode or 1)
    print(f"{out}: step {report.step}, {report.num_tensors} tensors, {report.num_bytes:,} bytes")
    for note in report.notes:
        print(f"note: {note}")
    return 0


def _fail(text: str, code: int) -> int:
    for line in text.splitlines():
        print(f"error: {line}", file=sys.stderr)
    return code
