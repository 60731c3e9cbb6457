"""``python -m pearl.envs.check_env``: what ``pearl check-env`` runs, so that a person's code has a process of its own.

Exit codes: 0 it is fit to be trained on, 1 it is not, 2 it cannot be loaded.
"""

import argparse
import asyncio
import json
import os
import sys
from collections.abc import Sequence

import msgspec

from pearl.envs.fitness import FitnessOptions, FitnessReport, TaskReport, examine
from pearl.envs.loader import describe, load_environment
from pearl.envs.own_reward import load_reward
from pearl.envs.protocol import EpisodeLimits, LimitedEnvironment
from pearl.runtime.extensions import describe_error
from pearl.runtime.parent_death import watch_parent
from pearl.types.config import Config
from pearl.types.exit_codes import EXIT_FAILURE, EXIT_USAGE


def main(arguments: Sequence[str]) -> int:
    watch_parent()
    options = parse(arguments)
    answer = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what the person's code prints must not be taken for the answer
    config = msgspec.json.decode(sys.stdin.buffer.read(), type=Config)
    name = config.environment.name
    fitness = FitnessOptions(
        options.tasks,
        options.pass_mark,
        EpisodeLimits(
            config.environment.max_turns,
            config.rollout.max_context_tokens,
            config.rollout.max_new_tokens_per_turn,
            config.environment.max_observation_tokens,
        ),
        config.environment.reset_timeout_s,
        config.environment.step_timeout_s,
    )
    with answer:
        try:
            environment = load_environment(name, config.environment.options, config.model.path)
            if isinstance(environment, LimitedEnvironment):
                environment.set_limits(fitness.limits)
            spec = describe(name, environment)
            fitness = msgspec.structs.replace(fitness, reward=load_reward(config.environment.reward))
        except Exception as error:  # noqa: BLE001 - a person's code may raise anything
            text = str(error) if isinstance(error, ValueError) else f"{name}: {describe_error(error)}"
            sys.stderr.write(f"error: {text}\n")
            return EXIT_USAGE
        try:
            report = asyncio.run(examine(name, environment, spec, fitness))
        except Exception as error:  # noqa: BLE001 - of what the environment does beside its episodes
            sys.stderr.write(f"error: {name}: {describe_error(error)}\n")
            return EXIT_FAILURE
        if options.json:
            answer.write(json.dumps(msgspec.to_builtins(report), indent=2) + "\n")
        else:
            answer.write(as_text(report))
    return 0 if report.is_fit else EXIT_FAILURE


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m pearl.envs.check_env")
    parser.add_argument("--tasks", type=int, required=True)
    parser.add_argument("--pass-mark", type=float, required=True)
    parser.add_argument("--json", action="store_true")
    return parser.parse_args(arguments)


def as_text(report: FitnessReport) -> str:
    rows = ["task            nothing  reference  prompt  observation  context  seconds"]
    rows += [_row(task) for task in report.tasks]
    rows += [f"note: {note}" for note in report.notes]
    mebibytes = report.peak_memory_bytes / (1 << 20)
    rows.append(f"{report.seconds_per_episode:.3g} s an episode, at most {mebibytes:.0f} MiB of memory")
    rows += [f"problem: {problem}" for problem in report.problems]
    rows += [f"problem: {task.split} {task.task}: {text}" for task in report.tasks for text in task.problems]
    rows.append(f"{report.name} is {'fit' if report.is_fit else 'not fit'} to be trained on")
    return "\n".join(rows) + "\n"


def _row(task: TaskReport) -> str:
    nothing, reference = (
        "-" if reward is None else f"{reward:.3g}" for reward in (task.null_reward, task.reference_reward)
    )
    return (
        f"{task.split + ' ' + str(task.task):<15} {nothing:>7}  {reference:>9}  {task.prompt_tokens:>6}  "
        f"{task.largest_observation_tokens:>11}  {task.context_tokens:>7}  {task.seconds:>7.3f}"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
