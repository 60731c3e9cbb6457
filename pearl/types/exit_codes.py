"""Exit codes of PEARL's commands. A signal's is 128 and its number."""

EXIT_FAILURE = 1  # the run or the command failed
EXIT_USAGE = 2  # what the user asked for cannot be: settings, options, a path
EXIT_INTERRUPTED = 130  # SIGINT
