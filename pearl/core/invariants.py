"""What holds between any two events, whatever happened: the core's ``check()``."""

from collections import Counter

from pearl.core.pipeline.trajectory import Trajectory
from pearl.core.state import CoreState
from pearl.types.config import Config
from pearl.types.ids import Slot


def check(state: CoreState, config: Config) -> None:
    state.table.check()
    whole, halves, reserved = _check_trajectories(state, config)
    assert len(state.rollout.dispatch.attempts) == whole.total()
    for slot, row in state.table.rows.items():
        assert row.running == whole[slot] + halves[slot], (row, whole, halves)
        assert row.reserved_tokens == reserved[slot], (row, reserved)
    _check_cohorts(state)


def _check_trajectories(
    state: CoreState, config: Config
) -> tuple[Counter[Slot], Counter[Slot], Counter[Slot]]:
    """Returns each slot's running attempts, the prefill stages it has, and the tokens reserved there."""
    rollout = state.rollout
    whole: Counter[Slot] = Counter()
    halves: Counter[Slot] = Counter()
    reserved: Counter[Slot] = Counter()
    in_flight = 0
    for identity, trajectory in rollout.trajectories.items():
        assert identity == trajectory.id
        _check_phase(trajectory, config)
        in_flight += trajectory.phase not in ("finished", "trained")
        if trajectory.attempt:
            assert rollout.dispatch.attempts[trajectory.attempt] == identity
            whole[trajectory.slot] += 1
            reserved[trajectory.slot] += trajectory.reserved_tokens
            if trajectory.prefill_slot is not None:
                halves[trajectory.prefill_slot] += 1
        if trajectory.op:
            assert rollout.ops[trajectory.op] == identity
    assert in_flight == rollout.in_flight, (in_flight, rollout.in_flight)
    return whole, halves, reserved


def _check_phase(trajectory: Trajectory, config: Config) -> None:
    phase = trajectory.phase
    assert (phase == "generating") == (trajectory.attempt != 0), trajectory
    assert (phase in ("opening", "stepping")) == (trajectory.op != 0), trajectory
    counted = sum(turn.new_prompt_tokens + turn.generated_tokens for turn in trajectory.turns)
    assert phase in ("finished", "trained") or counted == trajectory.tokens, trajectory
    if trajectory.start_version is not None and trajectory.evaluation is None:
        staleness = trajectory.cohort - trajectory.start_version.step
        assert staleness <= config.rollout.staleness_bound, trajectory


def _check_cohorts(state: CoreState) -> None:
    finished: dict[int, int] = {}
    for trajectory in state.rollout.trajectories.values():
        if trajectory.phase in ("finished", "trained"):
            finished[trajectory.cohort] = finished.get(trajectory.cohort, 0) + 1
    for cohort in state.rollout.buffer.cohorts.values():
        assert cohort.finished == finished.get(cohort.index, 0), (cohort, finished)
