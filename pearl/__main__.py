"""``python -m pearl`` is ``pearl``."""

import sys

from pearl.runtime.stop_signals import exit_on_stop_signals, hold_stop_signals, restore_stop_signals


def main() -> int:
    """Run the command; ``pearl run`` answers a stop signal with its exit code at any moment."""
    exit_on_stop_signals()  # before the imports, which take a while
    from pearl.cli import main as run_command

    if sys.argv[1:2] != ["run"]:
        restore_stop_signals()
        return run_command()
    code = run_command()
    hold_stop_signals()  # the interpreter's own end would take one as it comes
    return code


if __name__ == "__main__":
    sys.exit(main())
