"""The elastic scheduler looks at everything only when something has changed: nobody may be able to tell."""

from typing import Any

import pytest
from test_core_elasticity import make_world

from pearl.core.coordinator import Coordinator
from pearl.testing.world import World
from pearl.types import events
from pearl.types.ids import GpuId

FAULTS = {"update_failure_rate": 0.05, "attempt_error_rate": 0.03, "start_failure_rate": 0.1}


def eventful(seed: int, **elastic: Any) -> World:
    """A run in which GPUs come and go, workers and the training world die, and little works at the first try."""
    world = make_world(seed=seed, num_steps=8, **elastic)
    for name, value in FAULTS.items():
        setattr(world, name, value)
    local, far = (GpuId("local/4"), GpuId("local/5")), (GpuId("far/0"), GpuId("far/1"))
    for at_s, event in (
        (2.0, events.GpusArrived(local)),
        (9.0, events.GpusReclaimed(local[:1], 4.0, "spot")),
        (12.0, events.GpusArrived(far)),
        (16.0, events.GpusArrived(local)),
        (30.0, events.PreemptRequested(1, "reclaim", (), 2, 0.0)),
    ):
        world.post(event, at_s)
    world.post(lambda: world.lose_worker(next(iter(world.workers))), 7.0)
    world.post(world.lose_trainer, 14.0)
    world.post(lambda: world.lose_host("far"), 25.0)
    world.run()
    return world


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    "elastic",
    [{}, {"borrow": "always"}, {"borrow": "gated", "pd": "adaptive"}, {"pd": "1P1D"}],
    ids=["plain", "lending", "gated", "pairs"],
)
def test_looking_at_everything_after_each_event_changes_no_command(
    elastic: dict[str, Any], seed: int
) -> None:
    world = eventful(seed, **elastic)
    thorough = Coordinator(world.config)
    for number, (now, event, done) in enumerate(world.entries):
        thorough._changes.mark()
        assert thorough.handle(event, now) == done, (number, now, event)
    assert thorough.snapshot() == world.core.snapshot()
