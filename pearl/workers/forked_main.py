"""What a forked process does before and after its own main function, in place of the interpreter's start and end."""

import atexit
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from typing import NoReturn


def take_environment(environment: Mapping[str, str]) -> None:
    """Replace this process's environment."""
    os.environ.clear()
    os.environ.update(environment)


def reset_signals() -> None:
    """Restore the dispositions of a new interpreter: those of the forking process are its own."""
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            default = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
            signal.signal(number, default)


def end_after(main: Callable[[], None]) -> NoReturn:
    """Run ``main`` and end the process as the interpreter would, never returning into the frames that forked it."""
    code = 1
    try:
        main()
        code = 0
    except SystemExit as error:
        code = _exit_code(error)
    except BaseException:  # noqa: BLE001  # as the interpreter does with whatever ends a program
        traceback.print_exc()
    finally:
        threading._shutdown()  # type: ignore[attr-defined]  # joins what runs, as at the end of any program
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _exit_code(error: SystemExit) -> int:
    if error.code is None:
        return 0
    if isinstance(error.code, int):
        return error.code & 0xFF
    sys.stderr.write(f"{error.code}\n")
    return 1
