"""Commands on files: decisions, simulations, traces, finished runs. What they do is imported when it runs."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from pearl.cli.numbers import MAX_GPUS, MAX_GPUS_PER_NODE, number, whole
from pearl.cli.output import fail
from pearl.config.schema import ConfigError
from pearl.types.exit_codes import EXIT_FAILURE

MAX_TRAJECTORY = (1 << 63) - 1
SHOWN_CHARACTERS = 2000
"""Of one part of a trajectory, unless all of it is asked for."""


def decide_command(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="pearl decide",
        usage="pearl decide --profile F --workers N [section.key=number ...] [--current 4P9D] [--json]",
        description="The allocation that N rollout workers should have, and why.",
    )
    parser.add_argument("overrides", nargs="*", metavar="section.key=number", help="other numbers for F")
    parser.add_argument("--profile", type=Path, metavar="F", help="JSON, as in launch/profiles/")
    parser.add_argument("--workers", type=whole(1, 100_000), metavar="N", help="rollout workers there are")
    parser.add_argument("--current", metavar="4P9D", help="allocation of now: a switch must gain enough")
    parser.add_argument(
        "--makespan", default="closed-form", help="model of the makespan (closed-form, fluid, network)"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object")
    options = parser.parse_intermixed_args(words)
    from pearl.cli import decide

    return decide.run(
        decide.Question(
            profile=options.profile,
            workers=options.workers,
            current=options.current,
            makespan=options.makespan,
            overrides=options.overrides,
            as_json=options.json,
        )
    )


def simulate_command(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="pearl simulate",
        usage="pearl simulate CONFIG [key=value ...] --policy P[,P...] [--trace F [--max-gpus N]] "
        "[--seed N | --seeds A-B] [--workload W] [--hardware H] [--seconds S] [--json F]",
        description="What the job would do under each policy, on a virtual clock.",
    )
    parser.add_argument(
        "words", nargs="+", metavar="CONFIG, key=value", help="overrides go over the policies'"
    )
    parser.add_argument("--policy", required=True, help="names, with commas; ratios are to the first")
    parser.add_argument("--trace", type=Path, help="of preemptible GPUs")
    parser.add_argument(
        "--max-gpus",
        type=whole(1, MAX_GPUS),
        metavar="N",
        help="leave out what of the trace goes beyond so many",
    )
    seeds = parser.add_mutually_exclusive_group()
    seeds.add_argument("--seed", help="default 0")
    seeds.add_argument("--seeds", help="a range, for example 0-9: means, and pairs of equal seed")
    parser.add_argument(
        "--workload", default="swebench", help="swebench (default), a profile, or a run's trajectories"
    )
    parser.add_argument("--hardware", help="a profile's name or file (default: the model's data sheet)")
    parser.add_argument(
        "--seconds",
        type=number(1e-3, 365 * 86_400, "seconds"),
        default=7200.0,
        help="of simulated time (default 7200)",
    )
    parser.add_argument("--json", type=Path, help="also write all figures to this file")
    options = parser.parse_intermixed_args(words)
    configs = [word for word in options.words if "=" not in word]
    if len(configs) != 1:
        raise ConfigError(f"one CONFIG, please, not {len(configs)}: {', '.join(configs) or 'none'}")
    from pearl.cli.simulate import Request, simulate

    return simulate(
        Request(
            config=Path(configs[0]),
            overrides=tuple(word for word in options.words if "=" in word),
            policies=options.policy,
            seeds=next((text for text in (options.seeds, options.seed) if text is not None), "0"),
            trace=options.trace,
            max_gpus=options.max_gpus,
            workload=options.workload,
            hardware=options.hardware,
            seconds=options.seconds,
            json=options.json,
        )
    )


def trace_command(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="pearl trace", description="Traces of preemptible GPUs.")
    actions = parser.add_subparsers(dest="action", required=True, metavar="inspect")
    inspect = actions.add_parser(
        "inspect", help="what a trace would play: figures and a plot; nothing is started"
    )
    inspect.add_argument("trace", type=Path, metavar="F", help="launch/traces/README.md says what it may be")
    inspect.add_argument("--speed", type=number(1e-3, 1e6), default=1.0, metavar="X", help="times faster")
    inspect.add_argument(
        "--max-gpus", type=whole(1, MAX_GPUS), metavar="N", help="leave out what goes beyond"
    )
    inspect.add_argument(
        "--gpus-per-node",
        type=whole(1, MAX_GPUS_PER_NODE),
        default=1,
        metavar="N",
        help="of a trace of nodes or instances (default: 1)",
    )
    inspect.add_argument("--json", action="store_true", help="all figures and levels as one JSON object")
    inspect.add_argument("--html", type=Path, metavar="FILE", help="also write one static page")
    options = parser.parse_args(words)
    from pearl.cli.trace import Request
    from pearl.cli.trace import inspect as show

    return show(
        Request(
            options.trace, options.speed, options.max_gpus, options.gpus_per_node, options.html, options.json
        )
    )


def replay_command(words: Sequence[str]) -> int:
    run_dir = _run_dir_argument("pearl replay", "Check a run's journal against a fresh core.", words)
    from pearl.runtime.wal import DamagedError
    from pearl.service import replay

    try:
        difference = replay.check(run_dir)
    except DamagedError as error:
        return fail(str(error), EXIT_FAILURE)
    if difference is not None:
        return fail(difference, EXIT_FAILURE)
    torn = replay.torn_bytes(run_dir)
    cut = (
        f"; the journal's end is cut short: {torn} bytes of an unfinished entry were left out" if torn else ""
    )
    print(f"{run_dir}: a fresh core gives the same commands{cut}")
    return 0


def show_command(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="pearl show", description="The trajectories of a run as text: a list, or one of them."
    )
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR")
    parser.add_argument("trajectory", type=whole(0, MAX_TRAJECTORY), nargs="?", metavar="TRAJECTORY")
    parser.add_argument(
        "--beside",
        type=whole(0, MAX_TRAJECTORY),
        nargs="?",
        const=-1,
        metavar="N",
        help="with another one beside it (default: the sibling whose reward differs most)",
    )
    parser.add_argument("--step", type=whole(0, MAX_TRAJECTORY), metavar="N", help="list those of this step")
    parser.add_argument(
        "--reward", metavar="LOW..HIGH", help="list those with such a reward, e.g. 0..0.5 or ..0"
    )
    parser.add_argument("--outcome", metavar="NAME", help="list those that ended so; or masked")
    parser.add_argument(
        "--prompt", type=whole(0, MAX_TRAJECTORY), metavar="N", help="list those of this prompt"
    )
    parser.add_argument(
        "--limit", type=whole(1, 1_000_000), default=40, metavar="N", help="the newest N (default: 40)"
    )
    parser.add_argument("--full", action="store_true", help="long texts whole")
    parser.add_argument("--ids", action="store_true", help="token ids as numbers, nothing is decoded")
    options = parser.parse_args(words)
    run_dir = _existing_run(options.run_dir)
    from pearl.cli import show

    if options.beside is not None and options.trajectory is None:
        raise ConfigError("--beside: name the TRAJECTORY that it is put beside")
    filters = show.Filters(options.step, _reward_range(options.reward), options.outcome, options.prompt)
    if options.trajectory is not None and any(given is not None for given in filters):
        raise ConfigError(
            "--step, --reward, --outcome and --prompt filter the list and do not go with TRAJECTORY"
        )
    return show.show(
        show.Request(
            run_dir=run_dir,
            trajectory=options.trajectory,
            beside=options.beside,
            filters=filters,
            limit=options.limit,
            characters=0 if options.full else SHOWN_CHARACTERS,
            as_ids=options.ids,
        )
    )


def check_env_command(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="pearl check-env",
        usage="pearl check-env ENV|CONFIG [key=value ...] [--tasks N] [--pass-mark R] [--limit S] [--json]",
        description="Whether an environment is fit to be trained on. Exit code 1: it is not; 2: it cannot be loaded.",
    )
    parser.add_argument(
        "words",
        nargs="+",
        metavar="ENV|CONFIG, key=value",
        help="an environment's name or a job's TOML; options of the environment, or section.key=value",
    )
    parser.add_argument(
        "--tasks", type=whole(1, 100_000), default=3, metavar="N", help="of each split (default: 3)"
    )
    parser.add_argument(
        "--pass-mark",
        type=number(-1e9, 1e9, "reward"),
        default=0.5,
        metavar="R",
        help="a reference solution reaches it, an agent that says nothing does not (default: 0.5)",
    )
    parser.add_argument(
        "--limit",
        type=number(1, 86_400, "seconds"),
        default=600.0,
        metavar="S",
        help="seconds (default: 600)",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object")
    options = parser.parse_intermixed_args(words)
    names = [word for word in options.words if "=" not in word]
    if len(names) != 1:
        raise ConfigError(f"one ENV or CONFIG, please, not {len(names)}: {', '.join(names) or 'none'}")
    from pearl.cli.check_env import Request, check_env

    return check_env(
        Request(
            name=names[0],
            overrides=[word for word in options.words if "=" in word],
            num_tasks=options.tasks,
            pass_mark=options.pass_mark,
            limit_s=options.limit,
            as_json=options.json,
        )
    )


def _reward_range(text: str | None) -> tuple[float, float] | None:
    if text is None:
        return None
    low, dots, high = text.partition("..")
    try:
        bounds = (float(low or "-inf"), float((high if dots else low) or "inf"))
    except ValueError:
        bounds = (1.0, 0.0)
    if not bounds[0] <= bounds[1]:
        raise ConfigError(f"--reward {text}: give a range LOW..HIGH, for example 0..0.5, ..0 or 1")
    return bounds


def report_command(words: Sequence[str]) -> int:
    run_dir = _run_dir_argument(
        "pearl report", "Write RUN_DIR/report.html, which needs no network to look at.", words
    )
    from pearl.report.report import build

    print(build(run_dir))
    return 0


def export_command(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="pearl export",
        usage="pearl export RUN_DIR [--step N] OUT",
        description="Write a checkpoint's weights as a Hugging Face model directory.",
    )
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR")
    parser.add_argument("out", type=Path, metavar="OUT", help="a directory that does not exist yet")
    parser.add_argument(
        "--step", type=whole(0, 10_000_000), metavar="N", help="of the checkpoint (default: the newest)"
    )
    options = parser.parse_intermixed_args(words)
    from pearl.cli.export import export

    return export(options.run_dir, options.out, options.step)


def _run_dir_argument(program: str, description: str, words: Sequence[str]) -> Path:
    parser = argparse.ArgumentParser(prog=program, description=description)
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR")
    return _existing_run(parser.parse_args(words).run_dir)


def _existing_run(run_dir: Path) -> Path:
    if not (run_dir / "config.toml").is_file():
        raise ConfigError(f"{run_dir}: is no run directory (it has no config.toml)")
    return run_dir
