"""A harness that speaks through the ``openai`` package, in a whole run: it never notices what happens to workers."""

import json
import os
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from pearl.testing.live_run import LiveRun, ended

sys.path.insert(0, str(Path(__file__).parents[1] / "envs"))

from pearl.testing import chat_models

AGENT = """
import json, os
from openai import OpenAI
task = json.load(open(os.environ["PEARL_TASK"]))
client = OpenAI()
messages = [{"role": "user", "content": f"Say more, {task['n']}."}]
for turn in range(3):
    if turn == 1:
        stream = client.chat.completions.create(model="pearl", messages=messages, stream=True)
        text = "".join(part.choices[0].delta.content or "" for part in stream)
        messages.append({"role": "assistant", "content": text})
    else:
        messages.append(client.chat.completions.create(model="pearl", messages=messages).choices[0].message)
    messages.append({"role": "user", "content": "More."})
"""
SCORES = """
def tasks(split):
    return [{"n": number} for number in range(1000 if split == "train" else 4)]

def score(task, run):
    assert run.exit_code == 0, run.output
    return sum(len(message["content"]) for message in run.messages) % 7 / 7
"""


def make_model(directory: Path) -> Path:
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config

    chat_models.make_directory(directory, "hermes")
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=402,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        tie_word_embeddings=True,
        max_position_embeddings=2048,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)  # type: ignore[no-untyped-call]
    return directory


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_harness_never_notices_that_a_worker_dies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "agent.py").write_text(AGENT)
    (tmp_path / "run_scores.py").write_text(SCORES)
    path = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    monkeypatch.setenv("PYTHONPATH", path)
    options = {
        "template": "chatml-tools",
        "command": shlex.join([sys.executable, str(tmp_path / "agent.py")]),
        "score": "run_scores:score",
    }
    settings: dict[str, Any] = {
        "run.num_steps": 5,
        "model.path": str(make_model(tmp_path / "model")),
        "data.batch_size": 8,
        "data.group_size": 4,
        "environment.name": "harness",
        "environment.reset_timeout_s": 120.0,
        "environment.step_timeout_s": 60.0,
        "environment.max_turns": 4,
        "environment.num_evaluation_tasks": 4,
        "environment.options": options,
        "rollout.num_workers": 2,
        "rollout.max_new_tokens_per_turn": 24,
        "rollout.max_context_tokens": 400,
        "warm_start.num_steps": 0,
        "elastic.borrow": "never",
        "elastic.inter": False,
    }
    job = tmp_path / "job.toml"
    job.write_text("".join(_line(key, value) for key, value in settings.items()))
    run = LiveRun(tmp_path / "run", str(job))
    with ended(run):
        run.wait_for_step(0)
        for process in run.ranks("rollout.0.1"):
            process.kill()
        assert run.wait(400) == 0, run.text()[-4000:]
        summary = run.assert_clean()
        assert summary["workers_lost"] == 1
        assert summary["environment_failures"] == summary["trajectories_masked"] == 0
        assert summary["max_logprob_gap"] < 1e-3
        run.assert_nothing_left()


def _line(key: str, value: Any) -> str:
    if isinstance(value, dict):
        value = "{ " + ", ".join(f"{name} = {json.dumps(text)}" for name, text in value.items()) + " }"
        return f"{key} = {value}\n"
    return f"{key} = {json.dumps(value)}\n"
