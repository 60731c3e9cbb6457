"""Commands that start a job or talk to a live one: their arguments. What they do is imported when it runs."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from pearl.cli.numbers import MAX_GPUS, MAX_GPUS_PER_NODE, MAX_WAIT_S, number, whole
from pearl.config.schema import ConfigError


def run_command(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="pearl run",
        usage="pearl run CONFIG [key=value ...] [--run-dir D] [--dry-run] [--resume | --resume-if-there]",
        description="Run a job. Settings come from CONFIG (TOML) and section.key=value overrides, nothing else.",
    )
    parser.add_argument(
        "words", nargs="*", metavar="CONFIG, key=value", help="one file, any number of overrides"
    )
    parser.add_argument(
        "--run-dir", type=Path, help="a new directory for its files (default: a new one in runs/)"
    )
    parser.add_argument("--dry-run", action="store_true", help="print the resolved settings; start nothing")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--resume", action="store_true", help="go on with --run-dir, or with the newest run")
    which.add_argument(
        "--resume-if-there", action="store_true", help="go on with the run in --run-dir, or begin it there"
    )
    options = parser.parse_intermixed_args(words)
    configs = [word for word in options.words if "=" not in word]
    if len(configs) > 1:
        raise ConfigError(
            f"one CONFIG, please, not {len(configs)}: {', '.join(configs)} (settings are key=value)"
        )
    from pearl.cli.run import Request, run

    return run(
        Request(
            config=Path(configs[0]) if configs else None,
            overrides=[word for word in options.words if "=" in word],
            run_dir=options.run_dir,
            dry_run=options.dry_run,
            resume=options.resume,
            if_there=options.resume_if_there,
        )
    )


def status_command(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="pearl status", description="The worker table of a live run.")
    parser.add_argument("--run-dir", type=Path, help="of the run (default: the newest live one)")
    parser.add_argument("--json", action="store_true", help="the answer as it came")
    parser.add_argument(
        "--watch",
        nargs="?",
        const=1.0,
        type=number(0.05, 3600, "seconds"),
        metavar="SECONDS",
        help="again and again, until the run ends (every second by default)",
    )
    options = parser.parse_args(words)
    from pearl.cli.status import status

    return status(options.run_dir, as_json=options.json, every_s=options.watch)


def preempt_command(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="pearl preempt", description="Take preemptible GPUs from a live run, or give it some."
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="reclaim|arrive|replay")
    reclaim = actions.add_parser("reclaim", help="the run must give them back within a grace")
    arrive = actions.add_parser("arrive", help="the run may use them from now on")
    replay = actions.add_parser("replay", help="play a trace of arrivals and reclaims")
    for action in (reclaim, arrive, replay):
        action.add_argument("--run-dir", type=Path, help="of the run (default: the newest live one)")
    for action in (reclaim, arrive):
        action.add_argument(
            "--gpus", required=True, metavar="ID[,ID..]|N", help="ids, or how many: the run chooses"
        )
    grace = number(0, MAX_WAIT_S, "seconds")
    reclaim.add_argument("--grace", type=grace, default=30.0, metavar="S", help="seconds (default: 30)")
    replay.add_argument(
        "trace", type=Path, metavar="TRACE", help="launch/traces/README.md says what it may be"
    )
    replay.add_argument(
        "--speed", type=number(1e-3, 1e6), default=1.0, metavar="X", help="times faster than recorded"
    )
    replay.add_argument(
        "--max-gpus", type=whole(1, MAX_GPUS), metavar="N", help="leave out what goes beyond so many"
    )
    replay.add_argument(
        "--gpus-per-node",
        type=whole(1, MAX_GPUS_PER_NODE),
        default=1,
        metavar="N",
        help="of a trace of nodes (default: 1)",
    )
    options = parser.parse_args(words)
    from pearl.cli import preempt

    if options.action == "replay":
        return preempt.replay(
            options.run_dir,
            options.trace,
            speed=options.speed,
            max_gpus=options.max_gpus,
            gpus_per_node=options.gpus_per_node,
        )
    grace_s = options.grace if options.action == "reclaim" else 30.0
    return preempt.preempt(options.run_dir, options.action, preempt.choose(options.gpus), grace_s)


def agent_command(words: Sequence[str]) -> int:
    from pearl.cli.agent import agent

    return agent(words)
