"""The order of tests: files that wait longest come first, so that the others fill the gaps they leave."""

import pytest

LONGEST = (
    "test_run.py",
    "test_sglang_engine.py",
    "test_sglang_pairs.py",
    "test_elastic_run.py",
    "test_chaos.py",
    "test_roles_run.py",
    "test_pd_workers.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: LONGEST.index(item.path.name) if item.path.name in LONGEST else len(LONGEST))
