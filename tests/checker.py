"""An independent check of what a run says about itself. Imports nothing of PEARL; only the standard library.

Usage: python tests/checker.py RUN_DIR        exit 0: all counters agree; 1: each difference on a line

It reads trajectories.jsonl (one line an ended life of a trajectory), recomputes what summary.json claims, and checks
the rules that every run must keep:

1.  JSON is strict: no NaN, no infinity, no key twice, every line whole.
2.  A line with ``evaluation`` null belongs to training. Its ``trained_step`` k says that it was part of the update
    from version k to k + 1; with null, its tokens were thrown away, and ``discarded`` says why.
3.  summary ``lineages`` lists the restores as [lineage, step]. An update k of lineage l survives unless a later
    lineage was opened at a step <= k. The surviving steps are 0 .. steps - 1, without a hole.
4.  A surviving step k trains cohort k: ``batch_size / group_size`` whole groups in prompt order (fewer only in the
    last step, at the end of the data); trajectory = prompt * group_size + member, each exactly once.
    ``prompts_trained_twice`` and ``prompts_lost`` are recounted from that, and both must be 0.
5.  Masked members (outcome "expired" or "infrastructure") count as masked, not as trained, and not in a reward.
6.  A trajectory never moves to an older version, and no token is newer than the update that used it.
    Staleness = k - step of ``start_version``, over all updates, at most ``staleness_bound``.
7.  Every generated token has a version: a turn's ``versions`` add up to its ``generated_tokens``.
8.  Tokens are conserved: generated = surviving + discarded + unfinished. A life that was trained in a dead lineage
    shows up again, as discarded or as trained by a surviving update, and is counted there.
9.  Prefilled tokens are conserved in the same way, those of evaluations included; reprefilled is what a turn prefilled
    beyond its new prompt tokens.
10. An evaluation round is made with the weights of one step, each task once.
"""

import json
import math
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

Line = dict[str, Any]
MASKED = ("expired", "infrastructure")
NO_EVALUATION = 1 << 40  # ids of training trajectories are below


def check(run_dir: str | Path) -> list[str]:
    """What is wrong with the run, one sentence each; empty when nothing is."""
    run_dir = Path(run_dir)
    problems: list[str] = []
    lines = _read_lines(run_dir / "trajectories.jsonl", problems)
    _read_lines(run_dir / "metrics.jsonl", problems)
    summary = _read_summary(run_dir / "summary.json", problems)
    if problems:
        return problems
    training = [line for line in lines if line["evaluation"] is None]
    evaluation = [line for line in lines if line["evaluation"] is not None]
    for line in lines:
        problems.extend(_check_line(line))
    trained = [line for line in training if line["trained_step"] is not None]
    surviving = [line for line in trained if _survives(line, summary["lineages"])]
    problems.extend(_check_steps(surviving, summary))
    problems.extend(_check_staleness(trained, summary))
    claims = {
        **_count_training(trained, surviving, summary),
        **_count_tokens(lines, surviving, summary),
        **_count_prefill(lines, surviving, summary),
        **_rewards(surviving),
    }
    problems.extend(_compare(claims, summary))
    problems.extend(_check_evaluations(evaluation, summary))
    return problems


# reading


def _read_lines(path: Path, problems: list[str]) -> list[Line]:
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    if not text:
        problems.append(f"{path.name} is missing or empty")
    if text and not text.endswith("\n"):
        problems.append(f"{path.name}: the last line is torn")
    lines = []
    for number, line in enumerate(text.splitlines(), start=1):
        try:
            lines.append(_parse(line))
        except ValueError as error:
            problems.append(f"{path.name}:{number}: {error}")
    return lines


def _read_summary(path: Path, problems: list[str]) -> Line:
    try:
        return _parse(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        problems.append(f"{path.name}: {error}")
        return {}


def _parse(text: str) -> Line:
    value = json.loads(text, parse_constant=_refuse, parse_float=_finite, object_pairs_hook=_unique)
    if not isinstance(value, dict):
        raise ValueError("is not a JSON object")
    return value


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _finite(text: str) -> float:
    if not math.isfinite(float(text)):
        raise ValueError(f"{text} is not finite")
    return float(text)


def _unique(pairs: list[tuple[str, Any]]) -> Line:
    if len(dict(pairs)) != len(pairs):
        raise ValueError(f"a key comes twice in {[key for key, _ in pairs]}")
    return dict(pairs)


# one line


def _check_line(line: Line) -> Iterator[str]:
    name = f"trajectory {line['trajectory']}"
    for number, turn in enumerate(line["turns"]):
        counts = [turn["new_prompt_tokens"], turn["prefilled_tokens"], turn["generated_tokens"]]
        if min([*counts, turn["retained_tokens"]]) < 0 or turn["env_seconds"] < 0:
            yield f"{name} turn {number}: a negative count or time"
        if turn["retained_tokens"] > turn["generated_tokens"]:
            yield f"{name} turn {number}: retains more tokens than it generated"
        if sum(count for _, count, _ in turn["versions"]) != turn["generated_tokens"]:
            yield f"{name} turn {number}: its versions do not add up to its {turn['generated_tokens']} tokens"
    yield from _check_versions(name, line)
    if (line["evaluation"] is None) != (line["trajectory"] < NO_EVALUATION):
        yield f"{name}: evaluation {line['evaluation']} does not fit its id"
    if line["trained_step"] is not None and line["discarded"]:
        yield f"{name}: trained and discarded at once"
    if line["trained_step"] is None and line["evaluation"] is None and not line["discarded"]:
        yield f"{name}: neither trained nor discarded"


def _check_versions(name: str, line: Line) -> Iterator[str]:
    versions = [version for version, _, _ in _runs(line)]
    if versions != sorted(versions):
        yield f"{name}: moves to an older version"
    if any(kv > version for version, _, kv in _runs(line)):
        yield f"{name}: keys and values newer than the weights"
    ends = (versions[0], versions[-1]) if versions else (None, None)
    if ends != (line["start_version"], line["end_version"]):
        yield f"{name}: start or end version is not that of its tokens"
    step = line["trained_step"]
    if step is not None and any(version[1] > step or version[0] > line["lineage"] for version in versions):
        yield f"{name}: has tokens newer than the update that used them"


def _runs(line: Line) -> list[tuple[list[int], int, list[int]]]:
    return [tuple(run) for turn in line["turns"] for run in turn["versions"]]


def _generated(line: Line) -> int:
    return sum(turn["generated_tokens"] for turn in line["turns"])


def _survives(line: Line, restores: list[list[int]]) -> bool:
    return all(step > line["trained_step"] for lineage, step in restores if lineage > line["lineage"])


# the batch of each step


def _check_steps(surviving: list[Line], summary: Line) -> Iterator[str]:
    steps: dict[int, list[Line]] = defaultdict(list)
    for line in surviving:
        steps[line["trained_step"]].append(line)
    if sorted(steps) != list(range(summary["steps"])):
        yield f"trained steps are {_short(sorted(steps))}, summary says 0 .. {summary['steps'] - 1}"
    for step, lines in sorted(steps.items()):
        yield from _check_cohort(step, lines, summary, is_last=step == max(steps))


def _check_cohort(step: int, lines: list[Line], summary: Line, is_last: bool) -> Iterator[str]:
    group_size, batch_size = summary["group_size"], summary["batch_size"]
    if len({line["lineage"] for line in lines}) != 1:
        yield f"step {step}: trained by two lineages"
    first = step * batch_size
    size = len(lines) if is_last and len(lines) < batch_size and len(lines) % group_size == 0 else batch_size
    ids = sorted(line["trajectory"] for line in lines)
    if ids != list(range(first, first + size)):
        yield f"step {step}: trains {_short(ids)}, not {first} .. {first + size - 1} once each"
    for line in lines:
        prompt = line["trajectory"] // group_size
        if (line["prompt"], line["group"], line["cohort"]) != (prompt, prompt, step):
            yield f"step {step}: trajectory {line['trajectory']} has the wrong prompt, group or cohort"


def _check_staleness(trained: list[Line], summary: Line) -> Iterator[str]:
    for line in trained:
        age = _staleness(line)
        if not 0 <= age <= summary["staleness_bound"]:
            yield f"trajectory {line['trajectory']}: staleness {age}, bound {summary['staleness_bound']}"


def _staleness(line: Line) -> int:
    start = line["start_version"]
    return 0 if start is None else int(line["trained_step"] - start[1])


# counters


def _count_training(trained: list[Line], surviving: list[Line], summary: Line) -> Line:
    members = Counter(line["prompt"] for line in surviving)
    group_size, prompts_per_step = summary["group_size"], summary["batch_size"] // summary["group_size"]
    full_steps = max(0, summary["steps"] - 1)  # the last one may be short, at the end of the data
    prompts = set(range(full_steps * prompts_per_step)) | set(members)
    updates = {(line["lineage"], line["trained_step"]) for line in trained}
    kept = {(line["lineage"], line["trained_step"]) for line in surviving}
    return {
        "trajectories_trained": sum(line["outcome"] not in MASKED for line in surviving),
        "trajectories_masked": sum(line["outcome"] in MASKED for line in surviving),
        "prompts_trained_twice": sum(count > group_size for count in members.values()),
        "prompts_lost": sum(members[prompt] < group_size for prompt in prompts),
        "updates_discarded": len(updates - kept),
        "max_staleness": max(map(_staleness, trained), default=0),
    }


def _count_tokens(lines: list[Line], surviving: list[Line], summary: Line) -> Line:
    discarded = [line for line in lines if line["discarded"]]
    of_training = sum(_generated(line) for line in discarded if line["evaluation"] is None)
    evaluated = [line for line in lines if line["evaluation"] is not None]
    counts = {
        "tokens_generated": sum(map(_generated, surviving)) + of_training + summary["tokens_unfinished"],
        "tokens_trained": sum(_generated(line) for line in surviving if line["outcome"] not in MASKED),
        "tokens_discarded": sum(map(_generated, discarded)),
        "trajectories_restarted": len(discarded),
    }
    if summary["complete"]:  # otherwise a round may have been under way
        counts["evaluation_tokens"] = sum(map(_generated, evaluated))
    return counts


def _count_prefill(lines: list[Line], surviving: list[Line], summary: Line) -> Line:
    """A life that was trained in a dead lineage shows up again: it counts there."""
    ended = surviving + [line for line in lines if line["discarded"] or line["evaluation"] is not None]
    lives = {id(line): line for line in ended}.values()  # a discarded evaluation is one line
    turns = [turn for line in lives for turn in line["turns"]]
    prefilled = sum(turn["prefilled_tokens"] for turn in turns)
    again = sum(max(0, turn["prefilled_tokens"] - turn["new_prompt_tokens"]) for turn in turns)
    return {
        "prefilled_tokens": prefilled + summary["prefilled_unfinished"],
        "reprefilled_tokens": again + summary["reprefilled_unfinished"],
    }


def _rewards(surviving: list[Line]) -> Line:
    steps = [line["trained_step"] for line in surviving]
    if not steps:
        return {"reward_first": None, "reward_last": None}
    return {
        "reward_first": _mean_reward(line for line in surviving if line["trained_step"] == 0),
        "reward_last": _mean_reward(line for line in surviving if line["trained_step"] == max(steps)),
    }


def _mean_reward(lines: Iterable[Line]) -> float | None:
    rewards = [line["reward"] for line in lines if line["outcome"] not in MASKED]
    return sum(rewards) / len(rewards) if rewards else None


def _compare(claims: Line, summary: Line) -> Iterator[str]:
    for name, counted in claims.items():
        if name not in summary:
            yield f"summary.json has no {name}"
        elif not _equal(summary[name], counted):
            yield f"{name}: summary says {summary[name]}, the trajectories {counted}"
    for name in ("prompts_trained_twice", "prompts_lost"):
        if claims[name]:
            yield f"{name} is {claims[name]}"


def _equal(claimed: float | None, counted: float | None) -> bool:
    if claimed is None or counted is None:
        return claimed is counted
    return math.isclose(claimed, counted, rel_tol=1e-9, abs_tol=1e-9)


# evaluations


def _check_evaluations(lines: list[Line], summary: Line) -> Iterator[str]:
    rounds: dict[int, list[Line]] = defaultdict(list)
    for line in lines:
        if not line["discarded"]:
            rounds[line["evaluation"]].append(line)
    whole = {
        number: members for number, members in rounds.items() if len(members) == summary["evaluation_tasks"]
    }
    for number, members in rounds.items():
        tasks = Counter(line["trajectory"] for line in members)
        if max(tasks.values()) > 1:
            yield f"evaluation {number}: a task was counted twice"
        if len({version[1] for line in members for version, _, _ in _runs(line)}) > 1:
            yield f"evaluation {number}: made with the weights of several steps"
    yield from _compare_rounds(whole, summary)


def _compare_rounds(whole: dict[int, list[Line]], summary: Line) -> Iterator[str]:
    """The newest whole round at step 0 is the first evaluation, the newest at a later step the last."""
    rewards: dict[str, float | None] = {"eval_reward_start": None, "eval_reward": None}
    for _, members in sorted(whole.items()):
        name = "eval_reward_start" if _step_of(members) == 0 else "eval_reward"
        rewards[name] = _mean_reward(members) or 0.0
    for name, reward in rewards.items():
        if not _equal(summary[name], reward):
            yield f"{name}: summary says {summary[name]}, the evaluations {reward}"
    if summary["complete"] and summary["evaluation_tasks"] and None in rewards.values():
        yield "the run is complete, but an evaluation is missing"


def _step_of(members: list[Line]) -> int:
    return max((version[1] for line in members for version, _, _ in _runs(line)), default=0)


def _short(values: list[int]) -> str:
    return str(values) if len(values) <= 8 else f"{values[:4]} .. {values[-1]} ({len(values)} of them)"


def main() -> int:
    if len(sys.argv) != 2:
        print(__doc__)
        return 2
    problems = check(sys.argv[1])
    print("\n".join(problems) or f"{sys.argv[1]}: all counters agree with the trajectories")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
