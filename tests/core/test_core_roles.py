"""Prefill, decode, colocated: pairs, failing halves, rolling switches and decisions, in virtual time."""

from typing import Any

import pytest
from test_core_elasticity import assert_clean, go_until, local, make_world, of_kind, rows, serving

from pearl.testing.world import World
from pearl.types import commands, events
from pearl.types.config import (
    Config,
    DataConfig,
    ElasticConfig,
    EnvironmentConfig,
    RolloutConfig,
    RunConfig,
    TrainingConfig,
)
from pearl.types.ids import Slot
from pearl.types.reports import line_of

FAST_DECODE = (1e-3, 1e-5, 5e-3)  # A, b, t_prefill: prefill is what takes the time


def roles(world: World) -> str:
    """Of the serving workers, for example "CCD"."""
    return "".join(sorted(row.role[0].upper() for row in rows(world).values() if row.status == "serving"))


def pairs_sent(world: World) -> list[commands.Generate]:
    return [c for c in of_kind(world, commands.Generate) if c.prefill_slot is not None]


def reports(world: World, kind: str) -> list[dict[str, Any]]:
    return [line for line in map(line_of, world.reports) if line["kind"] == kind]


@pytest.mark.parametrize("pd", ["1P1D", "2P1D"])
def test_a_fixed_allocation_serves_every_request_by_a_pair(pd: str) -> None:
    world = make_world(pd=pd)
    summary = assert_clean(world)
    assert {row.role for row in rows(world).values()} == {"prefill", "decode"}
    assert len(pairs_sent(world)) > 0.9 * len(of_kind(world, commands.Generate))
    assert summary["prefilled_tokens"] > 0
    assert summary["tokens_lost"] == 0


def test_arrivals_and_reclaims_change_the_ratio_and_only_who_the_plan_names() -> None:
    world = make_world(num_steps=20, pd="1P1D")
    go_until(world, lambda: roles(world) == "DP")
    world.feed(events.GpusArrived(local(4, 5)))
    go_until(world, lambda: roles(world) == "DDPP")
    before = len(of_kind(world, commands.SetRole))
    world.feed(events.GpusReclaimed(local(4, 5), 5.0, "wanted back"))
    go_until(world, lambda: len(world.returned) == 2 or len(serving(world)) == 2)
    go_until(world, lambda: roles(world) == "DP")
    changed = {c.slot for c in of_kind(world, commands.SetRole)[before:]}
    named = " ".join(str(plan["rebind"]) for plan in reports(world, "plan"))
    assert all(f"{slot}:" in named for slot in changed)
    assert_clean(world)


def test_joiners_that_wait_for_their_group_are_no_part_of_the_decision_for_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = make_world(num_steps=20, pd="1P2D")
    go_until(world, lambda: roles(world) == "DP")
    start = world._start_worker

    def start_slowly(command: commands.StartWorker) -> None:
        world.slow_start_s = 60.0 if command.slot == 4 else 0.0
        start(command)

    monkeypatch.setattr(world, "_start_worker", start_slowly)
    world.feed(events.GpusArrived(local(4, 5, 6)))
    go_until(world, lambda: len(serving(world)) == 5)
    go_until(world, lambda: roles(world) == "DDDPP")
    decided = [d for d in reports(world, "decision") if d["workers"] == 2]
    assert decided
    assert {d["current"] for d in decided} <= {"0C", "2C", "1P1D"}
    assert_clean(world)


def test_a_shrink_that_removes_the_last_decode_worker_falls_back_at_once() -> None:
    world = make_world(num_steps=20, pd="1P1D")
    go_until(world, lambda: roles(world) == "DP")
    decode = next(slot for slot, row in rows(world).items() if row.role == "decode")
    other = 1 - decode
    world.lose_worker(Slot(decode))
    go_until(world, lambda: rows(world)[decode].status != "serving")
    assert rows(world)[other].target_role == "colocated"
    go_until(world, lambda: roles(world) == "C")
    go_until(world, lambda: roles(world) == "DP")
    assert_clean(world)


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.scenario("PD-01")
def test_a_dead_half_sends_its_trajectories_elsewhere(role: str, seed: int) -> None:
    world = make_world(seed, num_steps=8, pd="2P2D")
    world.feed(events.GpusArrived(local(4, 5)))
    go_until(world, lambda: roles(world) == "DDPP" and world.core._state.rollout.dispatch.attempts != {})
    victim = next(slot for slot, row in rows(world).items() if row.role == role and row.running)
    world.lose_worker(Slot(victim))
    go_until(world, lambda: rows(world)[victim].status != "serving")
    assert rows(world)[victim].running == 0
    summary = assert_clean(world)
    assert summary["workers_lost"] == 1
    assert summary["trajectories_masked"] == 0


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.scenario("PD-08")
def test_nothing_is_sent_to_a_worker_that_changes_its_role(seed: int) -> None:
    """There and back, with attempts in flight; the world itself has each worker refuse what its role cannot do."""
    world = make_world(seed, num_steps=30, pd="1P1D")
    changed: set[int] = set()

    def watch(event: events.GpusArrived | events.GpusReclaimed) -> None:
        world.feed(event)
        for _ in range(400):
            first = len(world.entries)
            assert world.step()
            changed.update(slot for slot, row in rows(world).items() if row.status == "switching")
            for _, _, done in world.entries[first:]:
                sent = [c for c in done if isinstance(c, commands.Generate)]
                halves = {c.slot for c in sent} | {c.prefill_slot for c in sent if c.prefill_slot is not None}
                assert {rows(world)[slot].status for slot in halves} <= {"serving"}

    for _ in range(2):
        go_until(world, lambda: roles(world) == "DP")
        watch(events.GpusArrived(local(4, 5)))
        go_until(world, lambda: roles(world) == "DDPP")
        # The one that prefills goes: two of three shall prefill, so one of those that decode has to change.
        prefilling = [gpu for row in rows(world).values() if row.role == "prefill" for gpu in row.gpus]
        first, second = sorted(local(4, 5), key=lambda gpu: gpu not in prefilling)
        watch(events.GpusReclaimed((first,), 5.0, "back"))
        watch(events.GpusReclaimed((second,), 5.0, "back"))
    assert changed
    summary = assert_clean(world)
    assert summary["tokens_lost"] == 0


def test_a_path_stays_while_workers_switch() -> None:
    world = make_world(num_steps=20, pd="adaptive")
    go_until(world, lambda: roles(world) == "CC")
    world.feed(events.GpusArrived(local(4, 5, 6)))
    go_until(world, lambda: len(serving(world)) == 5)
    world.speed = FAST_DECODE
    cut = 0
    while world.finish is None:
        world.step()
        kinds = {
            row.role for row in rows(world).values() if row.status in ("serving", "updating", "verified")
        }
        switching = [row for row in rows(world).values() if row.status == "switching"]
        if switching and not ("colocated" in kinds or {"prefill", "decode"} <= kinds):
            cut += 1
    assert cut == 0
    assert_clean(world)


def test_every_decision_is_logged_with_its_candidates_and_the_step_beside_its_prediction() -> None:
    world = make_world(num_steps=8, pd="adaptive")
    world.speed = (6e-3, 2e-4, 2e-5)
    assert_clean(world)
    decisions = [d for d in reports(world, "decision") if d["predicted_s"] is not None]
    assert decisions
    assert all(str(d["target"]) in str(d["candidates"]) for d in decisions)
    measured = [p for p in reports(world, "profile") if p["predicted_s"] is not None]
    assert measured
    assert all(p["measured_s"] > 0 for p in measured)


def test_a_sticky_trajectory_does_not_wait_for_a_worker_that_sleeps() -> None:
    world = make_world(borrow="always", router="sticky", start="strict")
    assert_clean(world)


# lent training GPUs


def lending_world(seed: int, num_workers: int = 3, num_steps: int = 12, **elastic: Any) -> World:
    """Training GPUs for four workers more, lent in every step. Prefill weighs so much that seven workers had better
    have roles, and two or three had better not."""
    config = Config(
        run=RunConfig(num_steps=num_steps),
        data=DataConfig(batch_size=16, group_size=4),
        environment=EnvironmentConfig(num_evaluation_tasks=0),
        rollout=RolloutConfig(num_workers=num_workers, max_requests_per_worker=3, start="strict"),
        training=TrainingConfig(num_ranks=4),
        elastic=ElasticConfig(**{"borrow": "always", "pd": "adaptive", **elastic}),
    )
    world = World(config, seed=seed)
    world.token_s, world.speed = 0.2, (0.1, 1e-5, 0.02)
    return world


@pytest.mark.parametrize("num_workers", [2, 3])
@pytest.mark.parametrize("seed", range(2))
def test_gpus_that_are_lent_every_step_change_nobodys_role_every_step(seed: int, num_workers: int) -> None:
    world = lending_world(seed, num_workers)
    summary = assert_clean(world)
    assert summary["borrows"] >= 11
    assert summary["mode_switches"] <= 2
    assert summary["role_changes"] <= 2 * (num_workers + 4), "there and back once at most, not in every step"


def test_lent_workers_fill_the_roles_beside_those_that_stay() -> None:
    world = lending_world(0, num_workers=3, num_steps=6, pd="1P1D")
    summary = assert_clean(world)
    assert {d["target"] for d in reports(world, "decision")} == {"2P1D", "4P3D"}
    assert summary["ratio_switches"] == 0
    own = [c.slot for c in of_kind(world, commands.SetRole) if rows(world)[c.slot].zone == "dedicated"]
    assert own == [], "each starts in its role and keeps it"


# gates, from what the run measured itself


def lending(world: World) -> list[bool]:
    return [bool(gate["yes"]) for gate in reports(world, "gate") if gate["gate"] == "lend"]


def test_the_gate_lends_where_it_pays() -> None:
    world = make_world(num_steps=10, borrow="gated", inter=False, start="strict", makespan="closed-form")
    world.speed = (0.05, 0.05, 1e-5)  # slow decoding: four workers are much faster than two
    summary = assert_clean(world)
    assert summary["borrows"] >= 8
    assert all(lending(world))


def test_the_gate_does_not_lend_where_it_costs() -> None:
    world = make_world(num_steps=10, borrow="gated", inter=False, start="strict", makespan="closed-form")
    world.speed = (1e-3, 1e-6, 1e-6)  # nothing to gain beside half a second of moving state
    summary = assert_clean(world)
    assert summary["borrows"] <= 2, "the first, before there is a profile, and perhaps a second look"
    assert lending(world).count(False) >= 6


def test_the_first_batch_is_spread_over_all_workers_that_the_job_starts_with() -> None:
    """With a sticky router, what is sent to the first worker that comes up stays there."""
    world = make_world(num_steps=2, router="sticky")
    go_until(world, lambda: bool(of_kind(world, commands.Generate)))
    assert {c.slot for c in of_kind(world, commands.Generate)} == {0, 1}
    assert_clean(world)


def test_a_first_worker_that_dies_is_not_waited_for() -> None:
    world = make_world(num_steps=2)
    go_until(world, lambda: rows(world)[0].status == "verified")
    world.lose_worker(Slot(1))
    go_until(world, lambda: bool(of_kind(world, commands.Generate)))
    assert rows(world)[1].status != "serving"
    assert_clean(world)


def test_a_fixed_allocation_is_there_from_the_first_request_on() -> None:
    world = make_world(num_steps=2, pd="1P1D")
    go_until(world, lambda: bool(of_kind(world, commands.Generate)))
    assert roles(world) == "DP"
