"""Architectures in SGLang on CPUs: those recorded as right agree with transformers, before and after an update."""

import json
from pathlib import Path

import pytest
import sglang_comparison
import sglang_support
from tiny_models import CONFIGS

OUTCOMES: dict[str, str] = json.loads(sglang_comparison.RECORD.read_text("utf-8"))["outcomes"]


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.skipif(bool(sglang_support.why_not()), reason=sglang_support.why_not())
@pytest.mark.parametrize("name", [name for name, found in OUTCOMES.items() if found == "right"])
def test_what_is_recorded_as_right_agrees_with_transformers(name: str, tmp_path: Path) -> None:
    sglang_comparison.compare(name, tmp_path)


def test_the_record_holds_an_outcome_of_configurations_only() -> None:
    assert set(OUTCOMES) <= set(CONFIGS)
    kinds = {found.partition(":")[0] for found in OUTCOMES.values()}
    assert kinds <= {"right", "differs", "cannot run"}
