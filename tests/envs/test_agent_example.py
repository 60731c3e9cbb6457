"""The example of the documentation, as it is shipped, with answers as a model gives them."""

import json
import tomllib
from pathlib import Path

import pytest
from agent_bench import END, AgentBench, agent_bench

from pearl.types.messages.environment import StepEpisodeReply

ROOT = Path(__file__).resolve().parents[2]


def call(code: str) -> str:
    arguments = json.dumps({"code": code})
    return f'<tool_call>\n{{"name": "run_tests", "arguments": {arguments}}}\n</tool_call>{END}'


@pytest.mark.parametrize(
    ("answers", "reward", "seen"),
    [
        ([call("def add(a, b):\n    return a + b\n")], 1.0, ""),
        (
            [call("def add(a, b):\n    return a - b\n"), "I give up." + END],
            0.1,
            "AssertionError: add(3, 4) is not 7",
        ),
        ([call("while True: pass"), "I give up." + END], 0.1, "no end after 0.2 s"),
        ([call("x = bytearray(1 << 40)"), "I give up." + END], 0.1, "MemoryError"),
        (["It is right already." + END], 0.0, ""),
    ],
)
async def test_the_example_rewards_what_passes_the_tests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answers: list[str], reward: float, seen: str
) -> None:
    from examples import python_repairs

    monkeypatch.setattr(python_repairs, "LIMIT_S", 0.2 if "while" in answers[0] else 10.0)
    job = tomllib.loads((ROOT / "examples/python_repairs.toml").read_text())["environment"]
    with agent_bench(tmp_path, job["name"], job["options"]) as bench:
        try:
            last = await play(bench, answers)
        finally:
            await bench.service.stop()
        assert (last.reward, last.done) == (reward, True)
        assert seen in bench.texts[1]


async def play(bench: AgentBench, answers: list[str]) -> StepEpisodeReply:
    assert "def add(a, b):\n    return a - b" in await bench.open(0)
    last = await bench.play(answers)
    assert isinstance(last, StepEpisodeReply), last
    return last
