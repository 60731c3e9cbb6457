"""The example of the documentation, as it is shipped, with answers as a model gives them."""

import tomllib
from pathlib import Path

import pytest
from agent_bench import END, AgentBench, agent_bench

from pearl.types.messages.environment import StepEpisodeReply

ROOT = Path(__file__).resolve().parents[2]


def code(text: str) -> str:
    return f"```python\n{text}\n```{END}"


@pytest.mark.parametrize(
    ("answers", "reward", "seen"),
    [
        ([code("def add(a, b):\n    return a + b")], 1.0, ""),
        (
            [code("def add(a, b):\n    return a - b"), code("def add(a, b): return b + a")],
            0.5,
            "add(3, 4) is not 7",
        ),
        ([code("def add(a, b):\n    while True: pass"), "I give up." + END], 0.1, "no end after 0.2 s"),
        ([code("x = bytearray(1 << 40)"), "I give up." + END], 0.0, "MemoryError"),
        (["It is right already." + END] * 2, 0.0, "there is no python code block"),
    ],
)
async def test_the_example_rewards_what_passes_the_tests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answers: list[str], reward: float, seen: str
) -> None:
    from examples import python_repairs

    monkeypatch.setattr(python_repairs, "LIMIT_S", 0.2 if "while" in answers[0] else 10.0)
    job = tomllib.loads((ROOT / "examples/python_repairs.toml").read_text())["environment"]
    with agent_bench(tmp_path, job["name"], job.get("options", {})) as bench:
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
