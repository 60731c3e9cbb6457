"""Tasks on repositories: made of a tiny package, solved with tools, graded by hidden tests in a fresh sandbox."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pearl.envs.fitness import FitnessOptions, examine
from pearl.envs.loader import load_environment
from pearl.envs.protocol import EpisodeLimits
from pearl.envs.repository import RepositoryEnvironment, generate
from pearl.envs.repository.mutations import mutations
from pearl.envs.repository.source import files_of, pack, unpack
from pearl.envs.repository.tasks import Edit, RepositoryTask
from pearl.envs.sandbox import Kind, preflight
from pearl.testing.chat_models import make_directory

SOURCE = '''"""Tiny."""


def clamp(value, low, high):
    """Keep a value within bounds.

    >>> clamp(5, 0, 3), clamp(-1, 0, 3), clamp(2, 0, 3)
    (3, 0, 2)
    """
    if value < low:
        return low
    return high if value > high else value


def hexagonal(n):
    """The n-th: é counts bytes.

    >>> hexagonal(3)
    15
    """
    é = n  # é
    return é * (2 * n - 1)
'''
LIMITS = EpisodeLimits(
    max_turns=4, max_context_tokens=8192, max_new_tokens_per_turn=2048, max_observation_tokens=2048
)


def works(kind: Kind) -> bool:
    try:
        preflight(kind)
    except ValueError:
        return False
    return True


BUBBLEWRAP = works("bubblewrap")
KIND: Kind = "bubblewrap" if BUBBLEWRAP else "subprocess"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of tasks as the generator makes them."""
    root = tmp_path_factory.mktemp("site")
    (root / "tinytiny.py").write_text(SOURCE)
    info = root / "tinytiny-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tinytiny\nVersion: 1\nLicense: MIT\n")
    (info / "top_level.txt").write_text("tinytiny\n")
    (info / "RECORD").write_text("tinytiny.py,,\n")
    out = tmp_path_factory.mktemp("out")
    sys.path.insert(0, str(root))
    try:
        assert generate.main(["tinytiny", "--out", str(out), "--sandbox", KIND, "--tasks", "4"]) == 0
    finally:
        sys.path.remove(str(root))
    return out


def make_environment(made: Path, **more: Any) -> RepositoryEnvironment:
    return RepositoryEnvironment(tasks=str(made / "train.jsonl"), sandbox=KIND, **more)


def test_the_generator_makes_tasks_that_hold(made: Path) -> None:
    tasks = [json.loads(line) for line in (made / "train.jsonl").read_bytes().splitlines()]
    assert len(tasks) == 3, "one a line of code"
    assert {task["edits"][0]["path"] for task in tasks} == {"tinytiny.py"}
    assert (made / "evaluation.jsonl").read_bytes() == b""
    assert sorted(path.name for path in (made / "repositories").rglob("*.*")) == ["tinytiny.py"]


def test_mutations_are_of_one_operator_and_count_characters() -> None:
    found = list(mutations("tinytiny.py", SOURCE))
    assert {(one.edit.old, one.edit.new) for one in found if one.function == "hexagonal"} == {
        ("*", "+"),
        ("-", "+"),
        ("2", "3"),
        ("1", "2"),
    }
    for one in found:
        assert len(one.edit.broken(SOURCE)) == len(SOURCE) + len(one.edit.new) - len(one.edit.old)
        compile(one.edit.broken(SOURCE), "tinytiny.py", "exec")


def test_nothing_scores_nothing_and_the_reference_all(made: Path, tmp_path: Path) -> None:
    model = make_directory(tmp_path / "model", "hermes")
    options = {"tasks": str(made / "train.jsonl"), "sandbox": KIND, "template": "chatml-tools"}
    environment = load_environment("python-repository", options, str(model))
    report = asyncio.run(
        examine("python-repository", environment, environment.describe(), FitnessOptions(2, 0.5, LIMITS))
    )
    assert report.is_fit, [task.problems for task in report.tasks]
    assert [task.reference_reward for task in report.tasks] == [1.0, 1.0]


def call(name: str, **arguments: Any) -> dict[str, Any]:
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {"role": "assistant", "content": "", "tool_calls": [{"id": "c", "function": function}]}


async def played(environment: RepositoryEnvironment, *messages: dict[str, Any]) -> tuple[list[str], float]:
    episode = environment.episode("train", 0)
    try:
        await episode.reset()
        said: list[str] = []
        for message in messages:
            results, _, _ = await episode.step(message)
            said += [result["content"] for result in results]
        _, reward, done = await episode.step({"role": "assistant", "content": "Done."})
        assert done
        return said, reward
    finally:
        await episode.close()


@pytest.mark.parametrize(
    "command",
    [
        "printf 'import os\\nos._exit(0)\\n' > tinytiny.py",
        "printf 'import doctest, sys\\nsys.exit(0)\\n' > tinytiny.py",
        "rm tinytiny.py; ln -s /etc/passwd tinytiny.py",
        "printf 'print(1)' > doctest.py",
        "rm -rf ../repo",
    ],
)
def test_ways_around_the_tests_score_nothing(made: Path, command: str) -> None:
    _, reward = asyncio.run(played(make_environment(made), call("bash", command=command)))
    assert reward == 0.0


def test_tools_answer_mistakes_and_show_no_history(made: Path) -> None:
    said, _ = asyncio.run(
        played(
            make_environment(made, command_timeout_s=1.0),
            call("edit", path="../x", old="a", new="b"),
            call("edit", path="tinytiny.py", old="value", new="b"),
            call("edit", path="moon.py", old="value", new="b"),
            call("bash"),
            call("fly"),
            call("bash", command="ls -a; git log 2>&1 | head -1"),
            call("bash", command="sleep 30"),
        )
    )
    assert "leads out" in said[0]
    assert "times in tinytiny.py" in said[1]
    assert "moon.py" in said[2]
    assert "needs command" in said[3]
    assert "no tool fly" in said[4]
    assert "not a git repository" in said[5]
    assert ".git\n" not in said[5]
    assert "ended after 1 s" in said[6]


def test_rows_in_the_form_of_swe_bench(tmp_path: Path) -> None:
    repository = tmp_path / "owner__tiny"
    repository.mkdir()
    (repository / "tiny.py").write_text("def add(a, b):\n    return a - b\n")
    git = ["git", "-C", str(repository), "-c", "user.name=a", "-c", "user.email=a@b.c"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "one"]):
        subprocess.run([*git, *words], check=True)
    commit = subprocess.run(
        [*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True
    ).stdout.strip()
    (repository / "tiny.py").write_text("def add(a, b):\n    return a + b\n")
    patch = subprocess.run([*git, "diff"], check=True, capture_output=True, text=True).stdout
    test = "from tiny import add\nassert add(2, 3) == 5\n"
    lines = test.splitlines()
    row = {
        "instance_id": "tiny-1",
        "repo": "owner/tiny",
        "base_commit": commit,
        "problem_statement": "add subtracts",
        "patch": patch,
        "test_patch": f"diff --git a/check.py b/check.py\nnew file mode 100644\n--- /dev/null\n+++ b/check.py\n"
        f"@@ -0,0 +1,{len(lines)} @@\n" + "".join(f"+{line}\n" for line in lines),
    }
    (tmp_path / "train.jsonl").write_text(json.dumps(row))
    environment = make_environment(tmp_path, test_command="python3 check.py")
    solution = environment.solve("train", 0)
    assert solution is not None
    assert not isinstance(solution[0], str)
    assert asyncio.run(played(environment)) == ([], 0.0)
    assert asyncio.run(played(environment, solution[0]))[1] == 1.0
    row["repo"] = "owner/moon"
    (tmp_path / "train.jsonl").write_text(json.dumps(row))
    with pytest.raises(ValueError, match="nothing is downloaded"):
        make_environment(tmp_path, test_command="python3 check.py")


def test_a_target_that_is_installed_is_refused(made: Path, tmp_path: Path) -> None:
    task = msgspec.json.decode((made / "train.jsonl").read_bytes().splitlines()[0])
    task |= {"module": "json", "repository": str(made / task["repository"])}
    (tmp_path / "train.jsonl").write_bytes(msgspec.json.encode(task))
    with pytest.raises(ValueError, match="json can be imported in the sandbox"):
        make_environment(tmp_path)
    assert generate.main(["json", "--out", str(tmp_path / "out"), "--sandbox", KIND]) == 2
    assert not (tmp_path / "out").exists()


def test_a_file_without_tasks_is_refused(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text("\n")
    with pytest.raises(ValueError, match="there are no tasks in it"):
        make_environment(tmp_path)


def test_without_bubblewrap_it_is_refused_with_the_alternative(
    made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ValueError, match=r'no program bwrap.*sandbox = "subprocess"'):
        RepositoryEnvironment(tasks=str(made / "train.jsonl"))


def test_archives_are_not_trusted(tmp_path: Path) -> None:
    assert unpack(pack({"a/b.py": b"x", "../up.py": b"y", "/root.py": b"z"})) == {"a/b.py": b"x"}
    (tmp_path / "a.py").write_text("x = 1\n")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "HEAD").write_text("secret")
    (tmp_path / "a.whl").write_text("secret")
    task = RepositoryTask("a", "", str(tmp_path), edits=(Edit("a.py", 4, "1", "2"),))
    assert files_of(task) == {"a.py": b"x = 2\n"}
