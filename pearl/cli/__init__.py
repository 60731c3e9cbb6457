"""The ``pearl`` command. Imports what a command needs when it runs, so that help and mistakes answer at once.

Exit codes: 0 done, 1 it failed, 2 usage error, 130 and 143 stopped by SIGINT and SIGTERM.
"""

import errno
import sys
from collections.abc import Callable, Sequence

from pearl.cli import live_commands, offline_commands
from pearl.cli.output import drop_output, fail
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
        return fail(_unknown(words[0]), EXIT_USAGE)
    try:
        return command(words[1:])
    except ValueError as error:  # what a person got wrong; a bug of a running job comes as an ExceptionGroup
        return fail(str(error), EXIT_USAGE)
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
        return fail(text, EXIT_USAGE if error.errno in OF_A_PATH else EXIT_FAILURE)


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


COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "run": live_commands.run_command,
    "status": live_commands.status_command,
    "preempt": live_commands.preempt_command,
    "agent": live_commands.agent_command,
    "decide": offline_commands.decide_command,
    "simulate": offline_commands.simulate_command,
    "trace": offline_commands.trace_command,
    "replay": offline_commands.replay_command,
    "show": offline_commands.show_command,
    "check-env": offline_commands.check_env_command,
    "report": offline_commands.report_command,
    "export": offline_commands.export_command,
}
