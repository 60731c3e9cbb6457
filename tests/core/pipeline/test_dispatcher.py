"""Who gets the requests that wait while workers take new weights one after the other."""

from typing import Any

import pytest

from pearl.core.pipeline.dispatcher import Dispatcher, DispatchState
from pearl.core.pipeline.trajectory import Trajectory
from pearl.types.command_buffer import CommandBuffer
from pearl.types.commands import Generate
from pearl.types.config import RolloutConfig
from pearl.types.ids import GpuId, PromptId, Slot, TrajectoryId
from pearl.types.lineage import Lineages
from pearl.types.trajectory import Turn
from pearl.types.weights import Version
from pearl.types.worker_table import WorkerTable

NEW, OLD = Version(1, 1), Version(1, 0)


class Waiting:
    """Workers that served ``OLD``, and trajectories that wait for one with ``NEW``."""

    def __init__(self, num_workers: int, num_trajectories: int, roles: str = "", **settings: Any) -> None:
        self.table = WorkerTable()
        for slot in range(num_workers):
            row = self.table.add((GpuId(f"a/{slot}"),))
            row.status, row.version, row.target = "updating", OLD, NEW
            if roles:
                row.role = row.target_role = "prefill" if roles[slot] == "P" else "decode"
        lineages = Lineages()
        lineages.open(OLD)
        self.commands_out = CommandBuffer(1)
        config = RolloutConfig(**settings)
        self.dispatcher = Dispatcher(DispatchState(), config, self.table, lineages, self.commands_out)
        self.trajectories: dict[TrajectoryId, Trajectory] = {}
        for number in range(num_trajectories):
            trajectory = Trajectory(TrajectoryId(number), PromptId(0), 1, 0, tokens=10, turns=[Turn(10)])
            self.trajectories[trajectory.id] = trajectory
            self.dispatcher.push(trajectory, 0.0)

    def serve(self, *slots: int) -> list[int]:
        """These have the new weights now; which slots are sent a request on that."""
        for slot in slots:
            row = self.table.rows[Slot(slot)]
            row.status, row.version, row.target = "serving", NEW, None
        self.dispatcher.dispatch(self.trajectories, None, 0.0)
        return [c.slot for c in self.commands_out.take() if isinstance(c, Generate)]


def test_the_first_to_have_new_weights_takes_only_its_share() -> None:
    waiting = Waiting(4, 10)
    assert waiting.serve(0) == [0, 0, 0]
    assert waiting.serve(1) == [1, 1, 1]
    assert sorted(waiting.serve(2, 3)) == [2, 2, 3, 3]


def test_a_worker_that_never_comes_back_holds_nobody_up_for_good() -> None:
    waiting = Waiting(4, 10)
    waiting.serve(0, 1, 2)
    assert len(waiting.dispatcher.state.ready) == 1
    waiting.table.rows[Slot(3)].status = "gone"
    assert len(waiting.serve()) == 1


def test_room_that_is_free_is_taken_while_one_is_awaited() -> None:
    waiting = Waiting(2, 4)
    assert waiting.serve(0) == [0, 0]
    waiting.table.rows[Slot(0)].running -= 2
    assert waiting.serve() == [0], "a share of what is left"


def test_workers_that_never_served_are_not_waited_for() -> None:
    waiting = Waiting(4, 8)
    for slot in (1, 2, 3):
        waiting.table.rows[Slot(slot)].version = None
    assert waiting.serve(0) == [0] * 8


@pytest.mark.parametrize("router", ["sticky", "cache-aware"])
def test_a_trajectory_may_always_go_home(router: Any) -> None:
    waiting = Waiting(4, 6, router=router)
    for trajectory in waiting.trajectories.values():
        trajectory.home, trajectory.prefix_version = Slot(0), NEW
        trajectory.cached_tokens = 9
    assert waiting.serve(0) == [0] * 6


def test_pairs_share_what_waits_among_their_own_kind() -> None:
    waiting = Waiting(4, 6, roles="PDDD")
    assert waiting.serve(0, 1) == [1, 1], "two of six for the first of three that decode"
    assert waiting.serve(2) == [2, 2]
    assert waiting.serve(3) == [3, 3]
