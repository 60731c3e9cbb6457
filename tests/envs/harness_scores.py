"""Tasks and scoring of ``harness_program``."""

from typing import Any

from pearl.envs.agents.program import ProgramRun

RUNS: list[ProgramRun] = []


def tasks(split: str) -> list[dict[str, Any]]:
    return [
        {"kind": "good"},
        {"kind": "silent"},
        {"kind": "edits"},
        {"kind": "waits"},
        {"kind": "many", "calls": 9},
        {"kind": "stubborn", "calls": 9},
        {"kind": "repeats"},
    ]


async def score(task: dict[str, Any], run: ProgramRun) -> float:
    RUNS.append(run)
    answer = run.directory / "answer.txt"
    return float(answer.read_text() == "42") if answer.exists() else 0.25


def plain_score(task: dict[str, Any], run: ProgramRun) -> float:
    return 0.5
