"""A process for tests: its arguments, a line each, go to its log."""

import sys

if __name__ == "__main__":
    sys.stdout.write("".join(f"{argument}\n" for argument in sys.argv[1:]))
