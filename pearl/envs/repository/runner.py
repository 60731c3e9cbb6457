"""``python3 -I -S runner.py REPOSITORY SPEC``: runs hidden tests inside a sandbox; imports nothing of PEARL.

Its last line is a secret word and "passed" when all tests passed: a program that ends early has passed nothing. The
code under test runs in this process, so a model that goes through its memory could find the word.
"""

import doctest
import inspect
import json
import os
import runpy
import sys
import traceback
import unittest
from importlib import import_module
from typing import Any


def run_doctest(module: str, text: str) -> int:
    """Return the number of failures."""
    names = dict(vars(import_module(module)))
    test = doctest.DocTestParser().get_doctest(text, names, module, None, 0)
    results = doctest.DocTestRunner(verbose=False).run(test)
    return results.failed if results.attempted else 1


def run_file(path: str) -> int:
    """Return the number of failures of test functions without arguments, and of unittest cases."""
    names = runpy.run_path(path, run_name="hidden_tests")
    failed = count = 0
    for name, found in names.items():
        if inspect.isclass(found) and issubclass(found, unittest.TestCase):
            result = unittest.TextTestRunner(stream=sys.stdout).run(
                unittest.defaultTestLoader.loadTestsFromTestCase(found)
            )
            failed += len(result.failures) + len(result.errors)
            count += result.testsRun
        elif name.startswith("test") and inspect.isfunction(found):
            count += 1
            try:
                found()
            except BaseException:  # noqa: BLE001 - tests raise anything
                failed += 1
                traceback.print_exc(file=sys.stdout)
    return failed if count else 1


def main(repository: str, spec_path: str) -> None:
    with open(spec_path, encoding="utf-8") as file:
        spec: dict[str, Any] = json.load(file)
    os.unlink(spec_path)
    secret = spec.pop("secret")
    os.chdir(repository)
    sys.path.insert(0, os.getcwd())
    failed = 0
    try:
        for test in spec["doctests"]:
            failed += run_doctest(test["module"], test["text"])
        for path in spec["files"]:
            failed += run_file(path)
    except BaseException:  # noqa: BLE001 - what is imported raises anything
        failed += 1
        traceback.print_exc(file=sys.stdout)
    sys.stdout.write(f"\n{failed} failed\n{secret} {'failed' if failed else 'passed'}\n")
    sys.stdout.flush()
    os._exit(0)  # nothing that the tests registered runs after this


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
