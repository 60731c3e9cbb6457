"""The paper's evaluation: runs are kept and reused, ratios are paired, and pages are drawn from small results."""

import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable
from html import escape
from pathlib import Path

import msgspec
import pytest

from benchmarks.paper import __main__ as command
from benchmarks.paper import page, runner
from benchmarks.paper.drawing import draw, nice_step
from benchmarks.paper.figure import (
    Chart,
    Figure,
    Scale,
    Series,
    Table,
    estimate,
    step_ratio,
    throughput_ratio,
)
from benchmarks.paper.published import RATIOS
from benchmarks.paper.remarks import COMPUTED, compare
from benchmarks.paper.runner import ROOT, Line, Outcome, Run, Runs, fixed, key_of, load, run_missing
from benchmarks.paper.table2 import selected
from pearl.core.elastic.profile_file import read_profile
from pearl.sim.job import Job, Result, StepLine


def outcome(throughput: float = 1.0, steps: Iterable[float] = (9.0, 10.0, 20.0)) -> Outcome:
    zeros = {f.name: f.type(0) for f in msgspec.structs.fields(Result) if f.type in (int, float)}
    lines = [StepLine(0.0, seconds, 1.0, 5.0) for seconds in steps]
    result = Result(**{**zeros, "throughput_tokens_per_s": throughput}, per_step=lines)
    return Outcome(result, {}, None, 0.5)


def test_throughput_is_compared_in_pairs() -> None:
    found = throughput_ratio([(outcome(2.0), outcome(1.0)), (outcome(9.0), outcome(3.0))])
    assert found is not None
    assert found.mean == pytest.approx(2.5)
    assert found.half_width == pytest.approx(12.71 * 0.5)
    assert throughput_ratio([]) is None


def test_fixed_pools_are_compared_batch_by_batch_without_the_first() -> None:
    found = step_ratio([(outcome(steps=(1.0, 5.0, 5.0)), outcome(steps=(9.0, 10.0, 20.0)))])
    assert found is not None
    assert found.mean == pytest.approx(3.0)
    assert found.half_width == pytest.approx(12.71 * 1.0)
    assert found.percent().mean == pytest.approx(200.0)


def test_one_value_has_no_interval() -> None:
    found = estimate([3.0])
    assert found is not None
    assert found.text() == "3.0"
    assert found.half_width is None


def test_a_run_s_key_tells_settings_hardware_and_seed_apart() -> None:
    runs = [fixed("roll", 4, 2), fixed("roll", 4, 3), fixed("a", 4, 2), fixed("roll", 4, 2, seed=1)]
    runs += [
        fixed("roll", 4, 2, load_bound=False),
        Run(policy="roll", segment=1),
        Run(policy="roll", segment=2),
    ]
    assert len({key_of(run, run.job()) for run in runs}) == len(runs)
    assert key_of(runs[0], runs[0].job()) == key_of(fixed("roll", 4, 2), runs[0].job())


@pytest.fixture
def performed(monkeypatch: pytest.MonkeyPatch) -> list[Run]:
    """Runs that were performed, without simulating anything."""
    seen: list[Run] = []

    def perform(missing: list[Run], jobs: dict[Run, Job], *_: object) -> Iterable[tuple[Run, Outcome]]:
        for run in missing:
            seen.append(run)
            yield run, outcome()

    monkeypatch.setattr(runner, "_performed", perform)
    return seen


def test_what_is_in_the_store_is_not_run_again(tmp_path: Path, performed: list[Run]) -> None:
    store, said = tmp_path / "runs.jsonl", list[str]()
    first, second = fixed("roll", 2, 1), fixed("a", 2, 1)
    run_missing([first, first], store, 1, said.append)
    assert performed == [first]
    with store.open("ab") as file:
        file.write(b'{"key": "cut sh')
    store.write_bytes(store.read_bytes() + b"\n")
    runs = run_missing([first, second], store, 1, said.append)
    assert performed == [first, second]
    assert set(runs.found) == {first, second}
    assert len(load(store)) == 2
    assert "2 runs planned, 1 are there, 1 to do" in said


def test_figures_stand_without_runs_and_say_so() -> None:
    for module in command.MODULES:
        figure = module.evaluate(Runs({}), Scale())
        assert figure.name == module.name
        assert page.render([figure])


def test_plans_name_runs_that_can_be_made() -> None:
    """One of each policy, model and hardware set: settings that do not load would end a long run late."""
    runs = command.planned(command.MODULES, Scale(full=True))
    kinds = {(run.policy, run.model, run.load_bound, run.segment): run for run in runs}
    for run in kinds.values():
        assert run.job().config.rollout.num_workers >= 2
    assert len(command.planned(command.MODULES, Scale())) < len(runs)


FIGURE = Figure(
    name="small",
    title="Fig. <small>",
    parameters="a & b",
    charts=[
        Chart(
            title="bars & co",
            kind="bars",
            labels=["one", "two"],
            series=[
                Series(name="ours", values=[1.0, None], errors=[0.5, None]),
                Series(name="paper", values=[-1.0, 2.0], paper=True),
            ],
        ),
        Chart(title="lines", kind="lines", series=[Series(name="s", x=[0.0, 5.0], values=[1.0, 3.0])]),
        Chart(title="steps", kind="steps", series=[Series(name="s", x=[0.0, 5.0], values=[1.0, 3.0])]),
        Chart(title="nothing yet", kind="lines", series=[Series(name="s", x=[], values=[])]),
    ],
    tables=[Table(header=["policy", "gain"], rows=[["pearl", "1.0 ±0.5 %"]])],
    remarks=["the paper's is < ours"],
)


def test_the_page_holds_everything_escaped() -> None:
    html = page.render([FIGURE])
    for text in ("Fig. &lt;small&gt;", "a &amp; b", "1.0 ±0.5 %", "&lt; ours"):
        assert text in html
    assert html.count("<svg") == 4
    assert "<script" not in html


@pytest.mark.parametrize("chart", FIGURE.charts, ids=lambda chart: chart.title)
def test_charts_are_well_formed_and_inside_their_box(chart: Chart) -> None:
    tree = ElementTree.fromstring(draw(chart))
    width, height = (float(part) for part in tree.attrib["viewBox"].split()[2:])
    for rect in tree.iter("rect"):
        assert 0 <= float(rect.attrib["x"]) <= width
        assert 0 <= float(rect.attrib["y"]) <= height
        assert float(rect.attrib["height"]) >= 0


def test_ticks_are_round() -> None:
    assert nice_step(10.0) == 2.0
    assert nice_step(6.0) == 1.0
    assert nice_step(0.33) == pytest.approx(0.1)


def test_results_are_written_and_read_back(tmp_path: Path) -> None:
    figure = msgspec.structs.replace(FIGURE, name="fig5")
    command.write([figure], tmp_path)
    assert command.read(tmp_path) == [figure]


@pytest.mark.parametrize("workers", RATIOS)
def test_the_shipped_profile_selects_the_paper_s_ratios(workers: int) -> None:
    profile = read_profile((ROOT / "launch" / "profiles" / "qwen3-8b.json").read_bytes(), ())
    assert str(selected(profile, workers, "closed-form")) == RATIOS[workers][2]


def test_a_line_keeps_what_was_measured() -> None:
    line = Line("key", fixed("roll", 2, 1), outcome(3.0))
    assert msgspec.json.decode(msgspec.json.encode(line), type=Line) == line


SHIPPED = {figure.name: figure for figure in command.read(runner.RESULTS)}


@pytest.mark.parametrize("name", sorted(COMPUTED))
def test_the_shipped_sentences_are_those_of_the_tables_beside_them(name: str) -> None:
    computed = COMPUTED[name](SHIPPED[name])
    assert computed, "it compares something"
    assert SHIPPED[name].remarks[: len(computed)] == computed
    html = (runner.RESULTS / "index.html").read_text()
    assert all(escape(remark) in html for remark in SHIPPED[name].remarks)


@pytest.mark.parametrize("name", sorted(COMPUTED))
def test_sentences_that_are_not_computed_compare_nothing(name: str) -> None:
    """A number or a verdict in a fixed sentence would stay when its table changes."""
    computed = COMPUTED[name](SHIPPED[name])
    for remark in SHIPPED[name].remarks[len(computed) :]:
        assert "%" not in remark
        for verdict in (
            "holds",
            "larger than the paper",
            "the paper's in",
            "there is no gain",
            "near the paper",
        ):
            assert verdict not in remark


@pytest.mark.parametrize(
    ("ours", "paper", "verdict"),
    [
        ("8.8 ±5.4 %", "9.8 to 26.5 %", "overlaps"),
        ("40.5 ±10.0 %", "9.8 to 26.5 %", "is above"),
        ("-2.0 ±3.2 %", "-20.6 %", "is above"),
        ("1.75 ±0.05", "2.43 to 2.79", "is below"),
    ],
)
def test_an_interval_is_compared_with_a_value_or_a_range(ours: str, paper: str, verdict: str) -> None:
    assert compare(ours, paper) == f"{ours} {verdict} the paper's {paper}"


def test_nothing_is_compared_with_what_was_not_said() -> None:
    assert compare("1.0 ±0.5 %", "not said") == ""
    assert compare("-", "3 %") == ""
