"""The ``pearl`` command. Imports what a command needs when it runs, so that help and mistakes answer at once.

Exit codes: 0 done, 1 it failed, 2 usage error, 130 and 143 stopped by SIGINT and SIGTERM.
"""

import argparse
import errno
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from pearl.cli.numbers import MAX_GPUS, MAX_GPUS_PER_NODE, MAX_WAIT_S, number, whole
from pearl.cli.output import drop_output
from pearl.config.schema import ConfigError
from pearl.types.exit_codes import EXIT_FAILURE, EXIT_INTERRUPTED, EXIT_USAGE

USAGE = """\
usage: pearl COMMAND ...

  run CONFIG [key=value ...]   the job, all processes
  status                       the worker table of a live run; --watch keeps it up to date
  preempt reclaim|arrive|replay
                               take GPUs from a live run, give it some, play a trace into it
  agent --coordinator ADDRESS  this host's GPUs join a run, until they are taken away
  decide --profile F --workers N
                               the allocation of N workers, with all predicted makespans
  check-env ENV|CONFIG         is an environment fit to be trained on? plays it without a model
  simulate CONFIG --policy P[,P...]
                               policies side by side, on a virtual clock
  trace inspect F              what a trace of preemptible GPUs would play
  replay RUN_DIR               check a run's journal against a fresh core
  show RUN_DIR [TRAJECTORY]    trajectories as text: a list, one of them, two side by side
  report RUN_DIR               one static HTML page about a run
  export RUN_DIR OUT           a run's weights as a Hugging Face model directory

pearl COMMAND --help says more."""

MAX_TRAJECTORY = (1 << 63) - 1
SHOWN_CHARACTERS = 2000
"""Of one part of a trajectory, unless all of it is asked for."""
OF_A_PATH = (errno.EACCES, errno.EISDIR, errno.ENAMETOOLONG, errno.ENOENT, errno.ENOTDIR, errno.EROFS)
"""What is wrong with a file or directory that a person named."""


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help", "help"):
        print(USAGE)
        return 0 if words else EXIT_USAGE
    if words[0] == "--version":
        return _version()
    command = COMMANDS.get(words[0])
    if command is None:
        return _fail(_unknown(words[0]), EXIT_USAGE)
    try:
        return command(words[1:])
    except ValueError as error:  # what a person got wrong; a bug of a running job comes as an ExceptionGroup
        return _fail(str(error), EXIT_USAGE)
    except SystemExit as end:
        if end.code != EXIT_USAGE:
            raise
        return EXIT_USAGE  # argparse has said why
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        drop_output()
        return EXIT_FAILURE
    except OSError as error:
        text = f"{error.filename}: {error.strerror}" if error.filename and error.strerror else str(error)
        return _fail(text, EXIT_USAGE if error.errno in OF_A_PATH else EXIT_FAILURE)


def _run(words: Sequence[str]) -> int:
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


def _status(words: Sequence[str]) -> int:
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


def _preempt(words: Sequence[str]) -> int:
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


def _agent(words: Sequence[str]) -> int:
    from pearl.cli.agent import agent

    return agent(words)


def _decide(words: Sequence[str]) -> int:
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


def _simulate(words: Sequence[str]) -> int:
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


def _trace(words: Sequence[str]) -> int:
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


def _replay(words: Sequence[str]) -> int:
    run_dir = _run_dir_argument("pearl replay", "Check a run's journal against a fresh core.", words)
    from pearl.runtime.wal import DamagedError
    from pearl.service import replay

    try:
        difference = replay.check(run_dir)
    except DamagedError as error:
        return _fail(str(error), EXIT_FAILURE)
    if difference is not None:
        return _fail(difference, EXIT_FAILURE)
    torn = replay.torn_bytes(run_dir)
    cut = (
        f"; the journal's end is cut short: {torn} bytes of an unfinished entry were left out" if torn else ""
    )
    print(f"{run_dir}: a fresh core gives the same commands{cut}")
    return 0


def _show(words: Sequence[str]) -> int:
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


def _check_env(words: Sequence[str]) -> int:
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


def _report(words: Sequence[str]) -> int:
    run_dir = _run_dir_argument(
        "pearl report", "Write RUN_DIR/report.html, which needs no network to look at.", words
    )
    from pearl.report.report import build

    print(build(run_dir))
    return 0


def _export(words: Sequence[str]) -> int:
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


def _unknown(name: str) -> str:
    from pearl.config.suggestions import nearest

    guess = nearest(name, COMMANDS)
    return f'"{name}" is no command; ' + (f"did you mean pearl {guess}?" if guess else "see pearl --help")


def _version() -> int:
    from importlib.metadata import PackageNotFoundError, version

    try:
        print(f"pearl {version('pearl')}")
    except PackageNotFoundError:
        print("pearl, not installed as a package")
    return 0


def _fail(message: str, code: int) -> int:
    for line in message.splitlines():
        print(f"error: {line}", file=sys.stderr)
    return code


COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "run": _run,
    "status": _status,
    "preempt": _preempt,
    "agent": _agent,
    "decide": _decide,
    "simulate": _simulate,
    "trace": _trace,
    "replay": _replay,
    "show": _show,
    "check-env": _check_env,
    "report": _report,
    "export": _export,
}
