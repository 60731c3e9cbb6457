"""Every legal order of events, with failures and late answers: invariants hold after each, and the run still ends."""

from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

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
from pearl.types.ids import GpuId, Slot

PREEMPTIBLE = [
    GpuId(f"{host}/{index}")
    for host, first in (("local", 5), ("far", 0))
    for index in range(first, first + 3)
]


class CoreMachine(RuleBasedStateMachine):
    world: World

    @initialize(
        seed=st.integers(0, 10_000),
        bound=st.integers(0, 2),
        start=st.sampled_from(["early", "strict"]),
        router=st.sampled_from(["sticky", "least-loaded", "cache-aware"]),
        mode=st.sampled_from(["interrupt", "drain", "in_place"]),
        partial=st.booleans(),
        checkpoint_every=st.integers(1, 3),
        can_restore=st.booleans(),
        speed=st.sampled_from([None, (6e-3, 2e-4, 2e-5), (1e-2, 1e-5, 1e-3), (1e-3, 5e-3, 1e-5)]),
        pd=st.sampled_from(["colocated", "1P1D", "2P1D", "adaptive"]),
        borrow=st.sampled_from(["never", "always", "gated"]),
        num_ranks=st.integers(1, 3),
        gpus_per_worker=st.integers(1, 2),
    )
    def begin(
        self,
        seed: int,
        bound: int,
        start: Any,
        router: Any,
        mode: Any,
        partial: bool,
        checkpoint_every: int,
        can_restore: bool,
        speed: tuple[float, float, float] | None,
        pd: str,
        borrow: Any,
        num_ranks: int,
        gpus_per_worker: int,
    ) -> None:
        config = Config(
            run=RunConfig(num_steps=3),
            data=DataConfig(batch_size=4, group_size=2),
            environment=EnvironmentConfig(num_evaluation_tasks=3),
            rollout=RolloutConfig(
                num_workers=2,
                gpus_per_worker=gpus_per_worker,
                max_requests_per_worker=3,
                staleness_bound=bound,
                start=start,
                router=router,
                update_mode="interrupt" if not partial else mode,
                partial_rollout=partial,
            ),
            training=TrainingConfig(checkpoint_every=checkpoint_every, num_ranks=num_ranks),
            elastic=ElasticConfig(inter=True, borrow=borrow, pd=pd, preemptible_gpus=3),
        )
        self.world = World(config, seed=seed, can_restore=can_restore)
        self.world.speed = speed
        self.world.start()

    def alive(self) -> bool:
        return self.world.finish is None

    @precondition(alive)
    @rule(count=st.integers(1, 40))
    def recover(self, count: int) -> None:
        for _ in range(count):
            if self.world.finish is None:
                assert self.world.step(), f"stalled: {self.world.core.status()}"

    @precondition(alive)
    @rule(gpus=st.sets(st.sampled_from(PREEMPTIBLE), min_size=1))
    def arrive(self, gpus: set[GpuId]) -> None:
        self.world.feed(events.GpusArrived(tuple(sorted(gpus))))

    @precondition(alive)
    @rule(
        gpus=st.sets(st.sampled_from(PREEMPTIBLE), min_size=1), grace_s=st.sampled_from([0.0, 0.01, 0.5, 5.0])
    )
    def reclaim(self, gpus: set[GpuId], grace_s: float) -> None:
        self.world.feed(events.GpusReclaimed(tuple(sorted(gpus)), grace_s, "wanted back"))

    @precondition(alive)
    @rule()
    def lose_host(self) -> None:
        self.world.lose_host("far")

    @precondition(alive)
    @rule(slot=st.integers(0, 6))
    def kill_worker(self, slot: int) -> None:
        self.world.lose_worker(Slot(slot))

    @precondition(alive)
    @rule()
    def kill_trainer(self) -> None:
        self.world.lose_trainer()

    @precondition(alive)
    @rule()
    def kill_environments(self) -> None:
        self.world.lose_environments()

    @precondition(alive)
    @rule(
        env=st.floats(0, 0.3),
        attempt=st.floats(0, 0.05),
        update=st.floats(0, 0.3),
        start=st.floats(0, 0.3),
        stuck=st.floats(0, 0.5),
    )
    def set_rates(self, env: float, attempt: float, update: float, start: float, stuck: float) -> None:
        self.world.start_failure_rate, self.world.stuck_rate = start, stuck
        self.world.env_failure_rate = env
        self.world.attempt_error_rate = attempt
        self.world.update_failure_rate = update

    @precondition(alive)
    @rule()
    def crash_and_resume(self) -> None:
        self.world.crash()

    @precondition(alive)
    @rule()
    def stop_and_resume(self) -> None:
        self.world.feed(events.StopRequested(15))
        assert self.world.finish is not None
        assert self.world.finish.exit_code == 143
        self.world.finish = None
        self.world.crash()

    @precondition(alive)
    @rule(back=st.integers(1, 30))
    def late_answer(self, back: int) -> None:
        """An answer given before comes again: the core must not count it twice."""
        answers = [e for _, e, _ in self.world.entries[-back:] if not isinstance(e, _ONCE)]
        if answers:
            self.world.core.handle(answers[0], self.world.now)
            self.world.core.check()

    @rule()
    def ask_for_status(self) -> None:
        """Possible at any time, also when the run is over."""
        assert self.world.core.status()["step"] == self.world.core._state.trainer.step

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        world = self.world
        world.env_failure_rate = world.attempt_error_rate = world.update_failure_rate = 0.0
        world.start_failure_rate = world.stuck_rate = 0.0
        finish = world.run()
        if finish.exit_code == 0:
            assert finish.summary["steps"] == 3
            assert finish.summary["prompts_lost"] == finish.summary["prompts_trained_twice"] == 0
            counted = finish.summary["trajectories_trained"] + finish.summary["trajectories_masked"]  # type: ignore[operator]
            assert counted == 3 * 4
            assert finish.summary["returns"] <= finish.summary["borrows"]  # type: ignore[operator]
        else:
            assert "runtime.max_restarts" in finish.error
        assert all(not isinstance(c, commands.Generate) for c in world.entries[-1][2])


_ONCE = (events.Started, events.Resumed, events.Tick, events.StopRequested, events.TokensStreamed)
TestCoreMachine = CoreMachine.TestCase
TestCoreMachine.settings = settings(
    max_examples=60,
    stateful_step_count=20,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
