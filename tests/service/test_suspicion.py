"""Who is blamed for the death of an environment worker: by what was being asked at each death, and of whom."""

import random

from pearl.service.suspicion import DEATHS_TO_REFUSE, Suspicion
from pearl.types.ids import OpId


def die(suspicion: Suspicion, worker: str, *tasks: str) -> tuple[str, list[bool]]:
    """While these were being asked; who is blamed, and which of the ops."""
    for op, task in enumerate(tasks):
        suspicion.begin(worker, OpId(op), task, "StepEpisode")
    guilty = suspicion.judge(worker)
    blamed = [suspicion.is_blamed(worker, OpId(op)) for op in range(len(tasks))]
    for op in range(len(tasks)):
        suspicion.end(worker, OpId(op))
    assert suspicion.judge(worker) == guilty
    return guilty, blamed


def test_the_only_one_being_asked_is_blamed() -> None:
    assert die(Suspicion(), "w.1", "7") == ("7", [True])


def test_all_of_one_task_are_one_suspect() -> None:
    assert die(Suspicion(), "w.1", "7", "7", "7") == ("7", [True, True, True])


def test_one_of_many_is_not_blamed_before_it_was_there_twice() -> None:
    suspicion = Suspicion()
    assert die(suspicion, "w.1", "7", "1", "2") == ("", [False] * 3)
    assert suspicion.must_be_alone("1")
    assert not suspicion.must_be_alone("3")
    assert die(suspicion, "w.2", "3", "7", "4") == ("7", [False, True, False])


def test_a_suspect_that_is_answered_need_not_be_alone_any_more_but_is_remembered() -> None:
    suspicion = Suspicion()
    die(suspicion, "w.1", "7", "1")
    suspicion.answered("7", "OpenEpisode")
    assert suspicion.must_be_alone("7")  # it was brought back; what it died of comes now
    suspicion.answered("7", "StepEpisode")
    assert not suspicion.must_be_alone("7")
    assert die(suspicion, "w.2", "7", "3") == ("7", [True, False])


def test_nobody_is_blamed_for_a_worker_that_was_asked_nothing() -> None:
    suspicion = Suspicion()
    assert suspicion.judge("w.1") == ""
    suspicion.begin("w.1", OpId(1), "7", "StepEpisode")  # after its death
    assert not suspicion.is_blamed("w.1", OpId(1))


def test_a_task_that_is_not_known_is_never_blamed() -> None:
    assert die(Suspicion(), "w.1", "") == ("", [False])


def test_a_task_is_refused_by_name_once_it_was_blamed_often_enough() -> None:
    suspicion = Suspicion()
    for death in range(DEATHS_TO_REFUSE):
        assert suspicion.refusal("7 (train)") == ""
        die(suspicion, f"w.{death}", "7 (train)")
    assert "task 7 (train) has killed its environment worker 3 times" in suspicion.refusal("7 (train)")
    assert suspicion.refusal("8 (train)") == ""
    assert suspicion.described() == "they died under task 7 (train) (3x)"


def test_a_killer_among_many_is_found_and_no_neighbour_is_refused() -> None:
    for seed in range(200):
        chance = random.Random(seed)
        suspicion = Suspicion()
        deaths = 0
        while not suspicion.refusal("killer"):
            others = chance.sample([str(task) for task in range(40)], chance.randrange(12))
            guilty, _ = die(suspicion, f"w.{deaths}", "killer", *others)
            assert guilty in ("", "killer"), (seed, deaths)
            deaths += 1
        assert deaths <= 8
        assert not any(suspicion.refusal(str(task)) for task in range(40))
