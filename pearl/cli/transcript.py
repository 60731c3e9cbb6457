"""One trajectory of a run directory in parts of text: from its tokens where they are kept, else from its sample."""

import subprocess
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from pearl.cli.probes import probe
from pearl.report.run_data import Line, read_object, read_samples
from pearl.report.samples import part_text
from pearl.runtime.token_store import read_tokens
from pearl.runtime.trajectory_tokens import ID_BYTES, TrajectoryTokens
from pearl.runtime.wal import DamagedError

DECODER = "pearl.envs.decoding"
DECODE_LIMIT_S = 60.0
"""For the environment to be loaded and to decode; a tokenizer takes a second or two."""


class Part(NamedTuple):
    kind: str
    turn: int
    num_tokens: int
    text: str


class Transcript(NamedTuple):
    parts: list[Part]
    note: str  # where it is from, and what is missing


def read_transcripts(run_dir: Path, trajectories: list[int], *, as_ids: bool) -> list[Transcript]:
    """Read some trajectories; all of them are decoded by one process."""
    tokens, damage = _tokens(run_dir, trajectories)
    samples = read_samples(run_dir)
    texts, why = (None, "ids were asked for") if as_ids else _decode(run_dir, list(tokens.values()))
    found = []
    for number in trajectories:
        if number in tokens and (texts is not None or as_ids or number not in samples):
            view = tokens[number]
            decoded = None if texts is None else [texts.pop(0) for _ in view.spans]
            note = f"from its tokens{'' if decoded is not None else f', as ids: {why}'}"
            found.append(Transcript(_parts(view, decoded), note))
        elif number in samples:
            found.append(_from_sample(samples[number]))
        else:
            kept = f"; samples.jsonl has {len(samples)} trajectories as text" if samples else ""
            found.append(
                Transcript([], f"its tokens are not kept any more, nor is a sample of it{kept}{damage}")
            )
    return found


def _tokens(run_dir: Path, trajectories: list[int]) -> tuple[dict[int, TrajectoryTokens], str]:
    directory = run_dir / "tokens"
    if not directory.is_dir():
        return {}, ""
    try:
        found = read_tokens(directory, trajectories)
    except DamagedError as error:
        return {}, f" ({error})"
    # A live run may delete a segment while it is read.
    except FileNotFoundError:
        return {}, " (the run was deleting old tokens meanwhile; try again)"
    return {number: found[number] for number in trajectories if number in found}, ""


def _decode(run_dir: Path, views: list[TrajectoryTokens]) -> tuple[list[str] | None, str]:
    """The texts of all spans of all views in order, or why there are none."""
    environment = read_object(run_dir / "config.json").get("environment")
    model = read_object(run_dir / "config.json").get("model")
    if not views or not isinstance(environment, dict) or not isinstance(model, dict):
        return None, "the run directory has no config.json"
    question = {
        "name": environment.get("name", ""),
        "options": environment.get("options", {}),
        "model_path": model.get("path", ""),
        "parts": [ids for view in views for ids in _split(view)],
    }
    try:
        done = probe(DECODER, limit_s=DECODE_LIMIT_S, question=msgspec.json.encode(question))
        answer = msgspec.json.decode(done.stdout)
    except subprocess.TimeoutExpired:
        return None, f"the environment did not decode them within {DECODE_LIMIT_S:g} s"
    except msgspec.DecodeError:
        return None, "the environment's process ended without an answer"
    if answer["error"]:
        return None, f"the environment cannot be loaded here: {answer['error']}"
    if answer["texts"] is None:
        return None, f"the environment {question['name']} has no decode"
    return answer["texts"], ""


def _split(view: TrajectoryTokens) -> list[list[int]]:
    found, start = [], 0
    for span in view.spans:
        end = start + span.count * ID_BYTES
        found.append(np.frombuffer(view.ids[start:end], "<i4").tolist())
        start = end
    return found


def _parts(view: TrajectoryTokens, texts: list[str] | None) -> list[Part]:
    if texts is None:
        texts = ["ids " + " ".join(map(str, ids)) for ids in _split(view)]
    return [
        Part(span.kind, span.turn, span.count, text) for span, text in zip(view.spans, texts, strict=True)
    ]


def _from_sample(sample: Line) -> Transcript:
    parts = [
        Part(str(part.get("kind")), int(part.get("turn", 0)), int(part.get("tokens", 0)), part_text(part))
        for part in sample.get("parts", [])
    ]
    left_out = sample.get("parts_left_out")
    return Transcript(parts, "from samples.jsonl" + (f"; {left_out} parts are left out" if left_out else ""))
