"""``python -m pearl.envs.check NAME [key=value ...]``: tries an environment without a run.

It loads the environment, prints what it says of itself, and plays episodes with a player that guesses ids at random.
``pearl run`` starts it with ``--quiet`` before anything else, so that a mistake is known at once and the person's
code never runs inside the coordinator. Exit codes: 0 it works, 2 it does not.
"""

import argparse
import asyncio
import json
import os
import random
import sys
from collections.abc import Sequence
from typing import Any

from pearl.envs.loader import check_demonstrations, describe, load_environment
from pearl.envs.own_reward import Reward, RewardedEpisode, load_reward
from pearl.envs.protocol import Environment, EnvironmentSpec
from pearl.envs.response_validator import BadAnswerError, ResponseValidator
from pearl.envs.sandbox_thread import finished
from pearl.runtime.extensions import describe_error, format_error
from pearl.types.config import EnvironmentConfig

USAGE_ERROR = 2
MAX_CONTEXT_TOKENS = 1 << 20


def main(arguments: Sequence[str]) -> int:
    options = parse(arguments)
    answer = os.fdopen(os.dup(1), "w")
    if options.quiet:
        os.dup2(2, 1)  # what the person's code prints must not be taken for the answer
    try:
        environment = load_environment(options.name, _options(options), options.model_path)
        spec = describe(options.name, environment)
        if options.warm_start:
            check_demonstrations(options.name, environment, options.warm_start)
        reward = load_reward(options.reward)
        if not options.quiet:
            answer.write(f"{spec}\n")
            for task in range(options.episodes):
                answer.write(
                    asyncio.run(play(environment, reward, spec, task, options.turns, options.tokens))
                )
    except (ValueError, BadAnswerError) as error:
        answer.write(f"{error}{_traceback(error.__cause__)}\n")
        return USAGE_ERROR
    except Exception as error:  # noqa: BLE001 - a person's code may raise anything
        answer.write(f"{options.name}: {describe_error(error)}{_traceback(error)}\n")
        return USAGE_ERROR
    finally:
        answer.close()
    return 0


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m pearl.envs.check", description="Try an environment without a run."
    )
    parser.add_argument("name", help='a built-in name or "package.module:Class"')
    parser.add_argument("option", nargs="*", metavar="key=value", help="of environment.options")
    parser.add_argument("--options-json", default="{}", help="environment.options as one JSON object")
    parser.add_argument("--model-path", default="", help="model.path, for environments in text")
    parser.add_argument("--reward", default="", help="environment.reward")
    parser.add_argument("--episodes", type=int, default=2, help="how many to play (default 2)")
    parser.add_argument("--turns", type=int, default=6, help="at most, of an episode (default 6)")
    parser.add_argument("--tokens", type=int, default=4, help="guessed a turn (default 4)")
    parser.add_argument(
        "--warm-start", type=int, default=0, metavar="STEPS", help="demonstrations are needed"
    )
    parser.add_argument("--quiet", action="store_true", help="load only, play nothing")
    return parser.parse_args(arguments)


async def play(
    environment: Environment,
    reward: Reward | None,
    spec: EnvironmentSpec,
    task: int,
    turns: int,
    tokens: int,
) -> str:
    """Play one episode of the train split with random ids; what happened, as text."""
    check = ResponseValidator(spec, MAX_CONTEXT_TOKENS, EnvironmentConfig().max_observation_tokens)
    guess = random.Random(task)
    episode = environment.episode("train", task)
    if reward is not None:
        episode = RewardedEpisode(episode, reward, "train", task)
    prompt = await finished(episode.reset())
    check.prompt(prompt)
    lines = [f"task {task}: prompt {prompt}"]
    for turn in range(turns):
        action = [guess.randrange(spec.vocabulary_size) for _ in range(tokens - 1)] + list(spec.stop_ids[:1])
        seen = await finished(episode.step(action, False))
        observed = check.observation(seen)
        lines.append(
            f"  turn {turn}: {action} -> {seen.ids}, reward {observed.reward:g}, done {observed.done}"
        )
        if observed.done:
            break
    if (close := getattr(episode, "close", None)) is not None:
        await finished(close())
    return "\n".join(lines) + "\n"


def _options(options: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(options.options_json)
    for text in options.option:
        key, _, value = text.partition("=")
        try:
            found[key] = json.loads(value)
        except ValueError:
            found[key] = value
    return found


def _traceback(error: BaseException | None) -> str:
    """Return the traceback of the user's code; empty for a module that does not exist."""
    return "" if error is None or isinstance(error, ModuleNotFoundError) else "\n" + format_error(error)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
