"""The rules of the core, one by one: what happens, and the commands it answers with. Reports are left out.

Every conversation begins with one worker on local/1, training on local/0, and a step of two trajectories.
"""

import pytest
from dialogue import FIRST, PROMPT_TOKENS, Dialogue, all_of, local, one, op, slot

from pearl.core.coordinator import Coordinator
from pearl.types import commands, events
from pearl.types.commands import (
    ActivateWorker,
    CloseEpisode,
    Finish,
    ForgetTokens,
    Generate,
    Interrupt,
    OffloadTraining,
    OpenEpisode,
    RecordTrajectory,
    ReleaseWorker,
    RestoreTraining,
    ReturnGpus,
    StartTrainer,
    StartWorker,
    StepEpisode,
    StopWorker,
    Train,
    TrainSample,
    TruncateTokens,
    UpdateWeights,
    VoidTokens,
)
from pearl.types.ids import Incarnation
from pearl.types.reports import EvaluationReport, GpusReport
from pearl.types.weights import Version

PREEMPTIBLE = {"inter": True, "preemptible_gpus": 1}
SECOND = Incarnation(2)
V0, V1 = Version(0, 0), Version(0, 1)


# beginning


def test_a_run_begins_with_its_workers_and_the_training_world() -> None:
    assert Dialogue().started() == [
        StartWorker(op(1), slot(0), FIRST, "colocated", local(1)),
        StartTrainer(op(2), FIRST, 0, None),
    ]


def test_the_first_version_goes_to_the_workers_and_opens_the_first_episodes() -> None:
    run = Dialogue()
    worker, trainer = run.started()
    assert isinstance(worker, StartWorker)
    assert isinstance(trainer, StartTrainer)
    assert run.ready(worker) == [], "there is no version yet"
    assert run.trainer_ready(trainer) == [
        UpdateWeights(op(3), slot(0), FIRST, V0, "interrupt"),
        OpenEpisode(op(4), run.trajectory(0), False, 0, 0),
        OpenEpisode(op(5), run.trajectory(1), False, 0, 0),
    ]


def test_no_request_is_sent_before_the_weights_are_verified() -> None:
    run = Dialogue()
    worker, trainer = run.started()
    assert isinstance(worker, StartWorker)
    assert isinstance(trainer, StartTrainer)
    run.ready(worker)
    update, opening, _ = run.trainer_ready(trainer)
    assert isinstance(update, UpdateWeights)
    assert isinstance(opening, OpenEpisode)
    assert run.opened(opening) == []
    [request] = run.verified(update)
    assert isinstance(request, Generate)
    assert (request.slot, request.context_tokens) == (0, PROMPT_TOKENS)


def test_a_wrong_checksum_is_taken_again_and_never_served() -> None:
    run = Dialogue()
    worker, trainer = run.started()
    assert isinstance(worker, StartWorker)
    assert isinstance(trainer, StartTrainer)
    run.ready(worker)
    update = one(run.trainer_ready(trainer), UpdateWeights)
    assert run.verified(update, "another sum") == [UpdateWeights(op(6), slot(0), FIRST, V0, "interrupt")]
    assert run.core._state.table.serving() == []


# a turn


def test_a_turn_goes_to_the_environment_and_the_next_one_has_its_answer() -> None:
    run = Dialogue()
    first, _ = run.generating()
    [step] = run.tokens(first, 4)
    assert step == StepEpisode(op(8), first.trajectory, 0, False)
    [following] = run.stepped(one([step], StepEpisode), done=False)
    assert isinstance(following, Generate)
    assert (following.trajectory, following.turn) == (first.trajectory, 1)
    assert following.context_tokens == PROMPT_TOKENS + 4 + 3


def test_a_turn_that_ran_into_its_limit_is_said_to_be_truncated() -> None:
    run = Dialogue()
    first, _ = run.generating()
    assert one(run.tokens(first, finish="length"), StepEpisode).truncated


def test_a_failed_attempt_is_tried_again() -> None:
    run = Dialogue()
    first, _ = run.generating()
    [again] = run.tokens(first, 0, "error")
    assert isinstance(again, Generate)
    assert (again.trajectory, again.context_tokens) == (first.trajectory, PROMPT_TOKENS)
    assert again.attempt != first.attempt


def test_an_episode_that_failed_begins_again_from_nothing() -> None:
    run = Dialogue()
    first, _ = run.generating()
    step = one(run.tokens(first), StepEpisode)
    discarded, void, opening = run.say(
        events.EpisodeFailed(step.op, step.trajectory, "error", "its disk is full")
    )
    assert isinstance(discarded, RecordTrajectory)
    assert discarded.record.outcome == "discarded"
    assert void == VoidTokens(step.trajectory)
    assert opening == OpenEpisode(op(9), step.trajectory, False, 0, 0)


def test_an_environment_that_died_is_opened_again_and_the_tokens_stay() -> None:
    run = Dialogue()
    first, _ = run.generating()
    step = one(run.tokens(first), StepEpisode)
    [opening] = run.say(events.EpisodeFailed(step.op, step.trajectory, "gone", "its worker died"))
    assert opening == OpenEpisode(op(9), step.trajectory, False, 0, 0)
    [again] = run.opened(one([opening], OpenEpisode))
    assert again == StepEpisode(op(10), step.trajectory, 0, False)


# a step


def finish_batch(run: Dialogue, requests: list[Generate]) -> list[commands.AnyCommand]:
    done: list[commands.AnyCommand] = []
    for request in requests:
        done = run.stepped(one(run.tokens(request), StepEpisode))
    return done


def test_a_step_is_trained_when_its_last_trajectory_ends() -> None:
    run = Dialogue()
    first, second = run.generating()
    assert run.stepped(one(run.tokens(first), StepEpisode)) == [CloseEpisode(first.trajectory)]
    sample = [TrainSample(made.trajectory, 0, 1.0, False, PROMPT_TOKENS + 4) for made in (first, second)]
    assert finish_batch(run, [second]) == [
        CloseEpisode(second.trajectory),
        Train(op(10), FIRST, 0, tuple(sample), True),
    ]


def test_a_trained_step_is_recorded_published_and_followed_by_the_next() -> None:
    run = Dialogue()
    done = run.trained(one(finish_batch(run, run.generating()), Train))
    assert [command.record.trained_step for command in all_of(done, RecordTrajectory)] == [0, 0]
    assert done[2:] == [
        UpdateWeights(op(11), slot(0), FIRST, V1, "interrupt"),
        OpenEpisode(op(12), run.trajectory(2), False, 1, 0),
        OpenEpisode(op(13), run.trajectory(3), False, 1, 0),
    ]


def next_batch(run: Dialogue, done: list[commands.AnyCommand]) -> Train:
    """Go on from a trained step to the command of the next one."""
    run.verified(one(done, UpdateWeights))
    requests = [one(run.opened(opening), Generate) for opening in all_of(done, OpenEpisode)]
    return one(finish_batch(run, requests), Train)


@pytest.mark.parametrize(("minutes", "expected"), [(2.0, [False, False, True] * 2), (0.0, [False] * 6)])
def test_minutes_since_the_last_checkpoint_make_the_next_step_one(
    minutes: float, expected: list[bool]
) -> None:
    run = Dialogue(num_steps=9, training={"checkpoint_every": 100, "checkpoint_every_minutes": minutes})
    train = one(finish_batch(run, run.generating()), Train)
    asked = []
    for _ in expected:
        asked.append(train.checkpoint)
        run.now += 70
        train = next_batch(run, run.trained(train, train.step + 1 if train.checkpoint else None))
    assert asked == expected


def test_a_checkpoint_that_failed_is_tried_again_with_the_next_step() -> None:
    run = Dialogue(num_steps=9, training={"checkpoint_every": 100, "checkpoint_every_minutes": 1.0})
    train = one(finish_batch(run, run.generating()), Train)
    run.now += 70
    train = next_batch(run, run.trained(train))
    assert train.checkpoint
    assert next_batch(run, run.trained(train, None)).checkpoint


def test_the_last_step_ends_the_run() -> None:
    run = Dialogue(num_steps=1)
    done = run.trained(one(finish_batch(run, run.generating()), Train))
    finish = one(done, Finish)
    assert (finish.exit_code, finish.error, finish.summary["steps"]) == (0, "", 1)
    assert run.core.finished


@pytest.mark.parametrize(("bound", "opened"), [(0, []), (1, [2])])
def test_staleness_says_whether_the_next_step_may_begin_before_this_one_is_trained(
    bound: int, opened: list[int]
) -> None:
    run = Dialogue(staleness_bound=bound)
    first, _ = run.generating()
    done = run.stepped(one(run.tokens(first), StepEpisode))
    assert [command.trajectory for command in all_of(done, OpenEpisode)] == opened


def test_a_version_that_a_newer_one_superseded_is_not_asked_for_again() -> None:
    run = Dialogue()
    update = one(run.trained(one(finish_batch(run, run.generating()), Train)), UpdateWeights)
    failed = events.WeightsFailed(update.op, update.slot, update.incarnation, "there is a newer one", True)
    assert run.say(failed) == []


def test_an_update_that_failed_is_tried_again() -> None:
    run = Dialogue()
    update = one(run.trained(one(finish_batch(run, run.generating()), Train)), UpdateWeights)
    [again] = run.say(
        events.WeightsFailed(update.op, update.slot, update.incarnation, "a bucket was refused")
    )
    assert isinstance(again, UpdateWeights)
    assert again.version == V1


# evaluation


def test_evaluation_is_greedy_and_its_tokens_are_forgotten() -> None:
    run = Dialogue(evaluation_tasks=1)
    opening = next(command for command in all_of(run.serving(), OpenEpisode) if command.evaluation)
    request = one(run.opened(opening), Generate)
    assert request.greedy
    done = run.stepped(one(run.tokens(request), StepEpisode), reward=0.5)
    assert ForgetTokens(request.trajectory) in done
    report = run.reports[-1].report
    assert isinstance(report, EvaluationReport)
    assert (report.round, report.step, report.reward_mean, report.tokens) == (0, 0, 0.5, 4)


# losses


def test_a_lost_worker_is_replaced_and_another_goes_on_with_what_was_streamed() -> None:
    run = Dialogue(num_workers=2)
    first, _ = run.generating()
    run.tokens(first, 2, None)
    start, taken_over = run.say(events.WorkerLost(first.slot, FIRST, "killed", 2))
    assert start == StartWorker(op(10), first.slot, SECOND, "colocated", local(1))
    assert isinstance(taken_over, Generate)
    assert (taken_over.trajectory, taken_over.slot) == (first.trajectory, 1)
    assert (taken_over.context_tokens, taken_over.max_new_tokens) == (
        first.context_tokens + 2,
        first.max_new_tokens - 2,
    )


def test_what_an_old_incarnation_says_is_counted_and_changes_nothing() -> None:
    run = Dialogue()
    run.generating()
    assert run.say(events.WorkerLost(slot(0), Incarnation(7), "killed", 0)) == []
    assert run.core._state.counters.stale_events == 1


def test_a_training_world_that_died_starts_again_from_its_checkpoint() -> None:
    run = Dialogue()
    run.generating()
    assert run.say(events.TrainerLost(FIRST, "killed")) == [StartTrainer(op(8), SECOND, 1, 0)]


def test_a_resumed_run_cuts_off_what_was_not_journalled_and_starts_everything_again() -> None:
    run = Dialogue()
    first, second = run.generating()
    run.tokens(first, 2, None)
    run.core = Coordinator.restore(run.config, run.core.snapshot())
    assert run.say(events.Resumed()) == [
        TruncateTokens(first.trajectory, PROMPT_TOKENS + 2),
        TruncateTokens(second.trajectory, PROMPT_TOKENS),
        StartWorker(op(8), slot(0), SECOND, "colocated", local(1)),
        StartTrainer(op(9), SECOND, 1, 0),
    ]


def test_a_signal_ends_the_run_with_its_number() -> None:
    run = Dialogue()
    run.generating()
    [finish] = run.say(events.StopRequested(15))
    assert isinstance(finish, Finish)
    assert (finish.exit_code, finish.error) == (143, "stopped by signal 15")
    assert run.say(events.Tick()) == [], "nothing is asked for any more"


# preemptible GPUs


def test_an_arrived_gpu_gets_a_worker_with_the_newest_weights() -> None:
    run = Dialogue(elastic=PREEMPTIBLE)
    run.generating()
    [start] = run.say(events.GpusArrived(local(2)))
    assert start == StartWorker(op(8), slot(1), FIRST, "colocated", local(2))
    [update] = run.ready(one([start], StartWorker))
    assert update == UpdateWeights(op(9), slot(1), FIRST, V0, "interrupt")
    run.verified(one([update], UpdateWeights))
    assert [row.slot for row in run.core._state.table.serving()] == [0, 1]


def test_an_arrival_changes_nothing_where_the_job_does_not_use_it() -> None:
    run = Dialogue()
    run.generating()
    assert run.say(events.GpusArrived(local(2))) == []


def with_joiner() -> tuple[Dialogue, list[Generate]]:
    """Return a run in which a worker on local/2 has joined, each of the two has a request."""
    run = Dialogue(elastic=PREEMPTIBLE)
    openings = all_of(run.serving(), OpenEpisode)
    start = one(run.say(events.GpusArrived(local(2))), StartWorker)
    run.verified(one(run.ready(start), UpdateWeights))
    return run, [one(run.opened(opening), Generate) for opening in openings]


def test_a_reclaim_interrupts_moves_what_was_made_stops_and_gives_back() -> None:
    run, (_, request) = with_joiner()
    assert request.slot == 1
    assert run.say(events.GpusReclaimed(local(2), 10.0, "spot")) == [Interrupt(slot(1), FIRST)]
    stop, moved = run.tokens(request, 2, "abort")
    assert stop == StopWorker(slot(1), FIRST, 8.0, "reclaimed"), "2 s of the grace are kept for killing"
    assert isinstance(moved, Generate)
    assert (moved.slot, moved.context_tokens) == (0, request.context_tokens + 2)
    run.now = 3.0
    assert run.say(events.WorkerLost(slot(1), FIRST, "reclaimed", 2)) == [ReturnGpus(local(2), 3.0)]


def test_gpus_that_come_back_too_late_are_said_to_be_late() -> None:
    run, _ = with_joiner()
    run.say(events.GpusReclaimed(local(2), 10.0, "spot"))
    run.now = 11.0
    assert run.say(events.Tick()) == [StopWorker(slot(1), FIRST, 0.0, "reclaimed, and the grace is over")]
    done = run.say(events.WorkerLost(slot(1), FIRST, "killed", None))
    assert one(done, ReturnGpus) == ReturnGpus(local(2), 11.0)
    returned = [
        r.report for r in run.reports if isinstance(r.report, GpusReport) and r.report.event == "returned"
    ]
    assert [report.on_time for report in returned] == [False]


def test_a_reclaim_cancels_an_expansion_that_has_not_served() -> None:
    run = Dialogue(elastic=PREEMPTIBLE)
    run.generating()
    run.say(events.GpusArrived(local(2)))
    assert run.say(events.GpusReclaimed(local(2), 10.0, "spot")) == [
        StopWorker(slot(1), FIRST, 0.0, "its expansion was cancelled")
    ]


# training GPUs


def test_training_gpus_are_lent_while_training_idles_and_come_back_when_the_batch_is_complete() -> None:
    run = Dialogue(elastic={"borrow": "always"})
    own, overlap = all_of(run.started(), StartWorker)
    assert overlap.gpus == local(0)
    run.ready(own)
    [release] = run.ready(overlap)
    assert isinstance(release, ReleaseWorker), "it sleeps before training takes the memory"
    [trainer] = run.say(events.WorkerReleased(release.op, overlap.slot, FIRST, 0.1))
    done = run.trainer_ready(one([trainer], StartTrainer))
    run.verified(one(done, UpdateWeights))
    offload = one(done, OffloadTraining)
    [activate] = run.say(events.TrainingOffloaded(offload.op, FIRST, 0.1))
    assert isinstance(activate, ActivateWorker)
    assert (activate.slot, activate.version) == (overlap.slot, V0)
    run.verified(activate)
    requests = [one(run.opened(opening), Generate) for opening in all_of(done, OpenEpisode)]
    assert [request.slot for request in requests] == [own.slot, overlap.slot]
    done = finish_batch(run, requests)
    release = one(done, ReleaseWorker)
    assert not all_of(done, Train), "its GPUs are still lent"
    [restore] = run.say(events.WorkerReleased(release.op, overlap.slot, FIRST, 0.1))
    assert isinstance(restore, RestoreTraining)
    [train] = run.say(events.TrainingRestored(restore.op, FIRST, 0.1))
    assert isinstance(train, Train)


# prefill and decode apart


def test_a_pair_serves_a_request_together() -> None:
    run = Dialogue(num_workers=2, elastic={"pd": "1P1D"})
    for request in run.generating():
        assert (request.prefill_slot, request.prefill_incarnation) == (0, FIRST)
        assert (request.slot, request.incarnation) == (1, FIRST)
