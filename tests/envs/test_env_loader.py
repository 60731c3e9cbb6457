"""Environments by name: built in, or anybody's class."""

import pytest

from pearl.envs.bugfix import BugfixEnvironment
from pearl.envs.loader import BUILT_IN, load_environment


def test_a_built_in_one_with_its_options() -> None:
    environment = load_environment("bugfix", {"num_lines": 2})
    assert isinstance(environment, BugfixEnvironment)
    assert set(BUILT_IN) == {"bugfix", "emulated", "harness", "jsonl", "python-repository"}


def test_a_class_of_ones_own() -> None:
    assert load_environment("pearl.envs.bugfix:BugfixEnvironment", {}).describe().vocabulary_size == 32


@pytest.mark.parametrize(
    ("name", "way_out"),
    [
        ("bugfx", "built in: bugfix"),
        (":Class", "package.module:Name"),
        ("no_such_package:Class", "PYTHONPATH"),
        ("pearl.envs.bugfix:Bugfix", "it has BugfixEnvironment"),
        ("pearl.envs.loader:load_environment", "is a plain function"),
        ("collections:Counter", "lacks describe, episode"),
    ],
)
def test_a_wrong_name_is_refused_with_key_value_and_way_out(name: str, way_out: str) -> None:
    with pytest.raises(ValueError, match=f'environment.name = "{name}"') as refused:
        load_environment(name, {})
    assert way_out in str(refused.value)


def test_an_unknown_option_is_refused_with_those_that_exist() -> None:
    with pytest.raises(
        ValueError, match=r"environment.options = \{'num_line': 2\}.*num_line.*num_lines, num_symbols"
    ):
        load_environment("bugfix", {"num_line": 2})
