"""Measures what decisions are computed from (paper §4.1, §4.3.2): the workload of a batch and the platform's speed.

Fed with every engine frame's iteration sums and, when a step's batch is complete, with its trajectories. Averages move
slowly within the noise that they have seen and jump when a step is far outside of it, so that noise moves no decision
and a change of the workload moves it at once. A fit that cannot be physical is refused and the last good one stays.
"""

from collections.abc import Sequence

import msgspec

from pearl.core.elastic.closed_network import closed_network
from pearl.core.elastic.iteration_fit import NOTHING, IterationFit, add, fade, fit
from pearl.core.elastic.makespan import Model, closed_form
from pearl.core.elastic.trajectory_classes import averaged, classify
from pearl.types.config import Config
from pearl.types.plan import Allocation, Role
from pearl.types.profile import IterationSums, Platform, Profile, TrajectoryClass, Workload
from pearl.types.trajectory import Turn

DAMPING = 3.0
"""Within the noise an average moves by a third of ``smoothing``: 5 % of noise a step then leaves 1.2 % in the average,
well below the thresholds of a switch."""
JUMP_DEVIATIONS = 6.0
"""A step this many mean absolute deviations off is a change: for Gaussian noise, one step in a million."""
JUMP_RATIO = 0.1
"""And at least by this part, since a deviation that was never seen to vary would jump at anything."""
MAX_UNSTEADY_STEPS = 2
"""A change is felt in the step it falls in and by what was under way then. Where it recurs, steps are like that."""
MAX_BUBBLE_RATIO = 1e6
"""For a batch in which next to nothing was generated: theta stays a finite number."""
ENOUGH_STEPS = 4
"""Whose mean overhead is believed: that of one step may be noise."""
MODEL_ERROR = 0.15
"""Of its makespan: so much of an overhead may be no overhead but the model's error, which the other mode has too."""
DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
LOOPBACK_BYTES_PER_S = 1e9
"""Prior of the bandwidth between two torch engines, which is one TCP connection."""


Served = Sequence[tuple[Allocation, float]]
"""Allocations and the seconds for which each served a step."""


class TrajectorySample:
    """A trajectory that was trained: its turns, and the seconds it spent with an engine and waiting for one."""

    __slots__ = ("env_seconds", "generate_seconds", "live_seconds", "turns")

    def __init__(self, turns: Sequence[Turn], generate_seconds: float, queue_seconds: float = 0.0) -> None:
        self.turns = turns
        self.generate_seconds = generate_seconds
        self.env_seconds = sum([turn.env_seconds for turn in turns])
        self.live_seconds = generate_seconds + queue_seconds + self.env_seconds


class PlatformPriors(msgspec.Struct, frozen=True):
    """What the settings say and no telemetry tells."""

    kv_bytes_per_token: float  # K
    kv_capacity_bytes: float  # H_max, a worker
    kv_bandwidth_bytes_per_s: float  # BW


class Averages(msgspec.Struct, frozen=True):
    """Of a step's trajectories, or moving over steps."""

    num_turns: float  # S
    mean_turns: float
    turn_input_tokens: float  # Delta L
    turn_output_tokens: float  # r
    decoding_ratio: float  # f
    env_seconds: float  # T_env
    context_tokens: float  # of a trajectory at its end: prompts, and the response tokens that are retained
    new_prompt_tokens: float  # a turn
    retained_tokens: float  # a turn
    slowest_seconds: float  # that the slowest trajectory lived


class TrackerState(msgspec.Struct):
    averages: Averages | None = None
    deviations: Averages | None = None  # mean absolute ones, of a step from the averages
    num_steps: int = 0  # behind the averages
    serving: IterationSums = NOTHING  # of finished steps, fading; colocated and decode workers
    prefilling: IterationSums = NOTHING
    new_serving: IterationSums = NOTHING  # since the last step
    new_prefilling: IterationSums = NOTHING
    decode_fixed_seconds: float | None = None  # of the last good fit, as the next two
    decode_seconds_per_seq: float | None = None
    prefill_seconds_per_token: float | None = None
    overhead_seconds: float = 0.0  # T_over: a mean before it is clipped, so that noise does not bias it
    num_overheads: int = 0  # steps behind it
    pair_overhead_seconds: float = 0.0  # the same of disaggregated steps
    num_pair_overheads: int = 0
    modelled_turn_seconds: float = 0.0  # of the newest step that they were fitted to
    unsteady_steps: int = 0  # in a row
    classes: tuple[TrajectoryClass, ...] = ()  # of a step's trajectories, moving over steps
    decode_seconds_per_context_token: float = 0.0  # of the last good fit, as the next
    decode_context_tokens: float = 0.0
    refusal: str = ""  # why the newest fit is not used; "" when it is


def platform_priors(config: Config) -> PlatformPriors:
    """K from the model where the settings describe it, else from the emulated engine's section."""
    model, emulated = config.model, config.emulated
    per_token, bandwidth = emulated.kv_bytes_per_token, emulated.kv_bandwidth_bytes_per_s
    if config.rollout.engine != "emulated":
        bandwidth = LOOPBACK_BYTES_PER_S
        if model.path == "tiny-qwen3":
            values = 2 * model.num_layers * model.num_kv_heads * model.head_dim
            per_token = float(values * DTYPE_BYTES[model.dtype])
    return PlatformPriors(per_token, config.rollout.kv_capacity_tokens * per_token, bandwidth)


class RuntimeTracker:
    def __init__(
        self,
        state: TrackerState,
        batch_size: int,
        smoothing: float,
        priors: PlatformPriors,
        model: Model = closed_form,
        in_flight: int = 0,
    ) -> None:
        """``smoothing``: weight of the newest step. ``model``: that decides, for T_over is what it leaves.
        ``in_flight``: trajectories at all times where batches overlap; 0 = they do not."""
        self._state = state
        self._batch_size = batch_size
        self._smoothing = smoothing
        self._priors = priors
        self._model = model
        self._in_flight = in_flight

    @property
    def refusal(self) -> str:
        """Why the newest fit of the platform is not used; "" when it is."""
        return self._state.refusal

    def on_iterations(self, role: Role, sums: IterationSums) -> None:
        if role == "prefill":
            self._state.new_prefilling = add(self._state.new_prefilling, sums)
        else:
            self._state.new_serving = add(self._state.new_serving, sums)

    def on_step(
        self,
        samples: Sequence[TrajectorySample],
        makespan_s: float | None = None,
        served: Served = (),
        *,
        steady: bool = True,
    ) -> None:
        """A step's batch is complete.

        Args:
            samples: its trajectories; those without a turn tell nothing.
            makespan_s: measured; by default what the slowest trajectory lived, which is the same where all of a batch
                start together and the nearest thing to it where they do not.
            served: which allocations did, and how long. The overhead of their mode is fitted where all have the same.
            steady: False when workers came, left or changed roles meanwhile. Contexts are prefilled anew and wait
                where they go on, which says nothing of how it will be: those averages stay, unless it goes on so.
        """
        samples = [sample for sample in samples if sample.turns]
        if not samples:
            self._refit()
            return
        newest, classes = measure(samples), classify(samples)
        self._state.unsteady_steps = 0 if steady else self._state.unsteady_steps + 1
        is_usual = not 0 < self._state.unsteady_steps <= MAX_UNSTEADY_STEPS
        self._average(newest if is_usual else self._calmed(newest))
        if is_usual or not self._state.classes:
            self._state.classes = averaged(self._state.classes, classes, self._weight)
        self._refit()
        if is_usual and not (self._in_flight and self._model is closed_network):
            # What a step of overlapping batches takes is no trajectory's life, which is all that is measured here.
            measured_s = newest.slowest_seconds if makespan_s is None else makespan_s
            self._fit_overhead(classes, measured_s, served)

    @property
    def _weight(self) -> float:
        """Return the weight of the newest step, once it is counted: the first ones count alike."""
        return max(self._smoothing / DAMPING, 1.0 / max(self._state.num_steps, 1))

    def _calmed(self, newest: Averages) -> Averages:
        """Restore the values that moving trajectories distort."""
        before = self._state.averages
        if before is None:
            return newest
        return msgspec.structs.replace(
            newest,
            turn_input_tokens=before.turn_input_tokens,
            decoding_ratio=before.decoding_ratio,
            slowest_seconds=before.slowest_seconds,
        )

    def _average(self, newest: Averages) -> None:
        """The first steps count alike, later ones as ``_follow`` has it."""
        state = self._state
        state.num_steps += 1
        if state.averages is None or state.deviations is None:
            state.averages, state.deviations = newest, Averages(*[0.0] * len(Averages.__struct_fields__))
            return
        weight = self._weight
        settled = state.num_steps > 3
        columns = map(msgspec.structs.astuple, (state.averages, state.deviations, newest))
        followed = [
            _follow(average, deviation, value, weight, settled=settled)
            for average, deviation, value in zip(*columns, strict=True)
        ]
        state.averages = Averages(*(average for average, _ in followed))
        state.deviations = Averages(*(deviation for _, deviation in followed))

    def _refit(self) -> None:
        state, keep = self._state, 1.0 - self._smoothing
        state.serving = fade(state.serving, keep, state.new_serving)
        state.prefilling = fade(state.prefilling, keep, state.new_prefilling)
        state.new_serving = state.new_prefilling = NOTHING
        found = fit(state.serving, state.prefilling)
        if isinstance(found, str):
            state.refusal = found
        else:
            state.refusal = ""
            self._accept(found)

    def _accept(self, found: IterationFit) -> None:
        """Take over a fit. What was not observed keeps its value; b is that of a sequence of mean context."""
        state, serving = self._state, self._state.serving
        context = serving.context / serving.decoding if serving.decoding else 0.0
        per_seq = found.decode_seconds_at(context)
        if found.decode_fixed_seconds is not None:
            state.decode_fixed_seconds = found.decode_fixed_seconds
        if per_seq is not None:
            state.decode_seconds_per_seq = per_seq
            state.decode_seconds_per_context_token = found.decode_seconds_per_context_token
            state.decode_context_tokens = context
        if found.prefill_seconds_per_token is not None:
            state.prefill_seconds_per_token = found.prefill_seconds_per_token

    def _fit_overhead(self, classes: tuple[TrajectoryClass, ...], makespan_s: float, served: Served) -> None:
        """Fit what a step took beyond the model without overhead, per turn: T_over where it was colocated."""
        state, profile = self._state, self._profile(self._state.averages, classes, 0.0, 0.0)
        modes = {allocation.is_colocated for allocation, _ in served if allocation.is_whole}
        if profile is None or len(modes) != 1:
            return
        predicted_s = self._mean_makespan(profile, served)
        state.modelled_turn_seconds = predicted_s / profile.workload.num_turns
        residual = makespan_s / profile.workload.num_turns - state.modelled_turn_seconds
        is_colocated = modes == {True}
        count = 1 + (state.num_overheads if is_colocated else state.num_pair_overheads)
        weight = max(self._smoothing / DAMPING, 1.0 / count)
        if is_colocated:
            state.num_overheads = count
            state.overhead_seconds += weight * (residual - state.overhead_seconds)
        else:
            state.num_pair_overheads = count
            state.pair_overhead_seconds += weight * (residual - state.pair_overhead_seconds)

    def _mean_makespan(self, profile: Profile, served: Served) -> float:
        """Return the makespan of a batch that each allocation serves for its share of the time."""
        whole = [(allocation, seconds) for allocation, seconds in served if allocation.is_whole]
        batches = sum(seconds / self._model(profile, allocation).seconds for allocation, seconds in whole)
        return sum(seconds for _, seconds in whole) / batches

    def profile(self) -> Profile | None:
        """None until a batch and the platform's three coefficients have been measured."""
        return self._profile(self._state.averages, self._state.classes, *self._overheads())

    def _overheads(self) -> tuple[float, float]:
        """T_over, and that of pairs, as far as it is known.

        Steps that a mode has too few of count as the other mode's, since what a step took beyond the model may be the
        model's own error, and no difference that was not measured is a reason to switch. A mode that was never tried
        is, in the end, charged with no more than such an error: else it never would be.
        """
        state = self._state
        colocated, pairs = state.overhead_seconds, state.pair_overhead_seconds
        num_colocated, num_pairs = state.num_overheads, state.num_pair_overheads
        doubtful = MODEL_ERROR * state.modelled_turn_seconds
        return (
            _believed(colocated, num_colocated, pairs, num_pairs, doubtful),
            _believed(pairs, num_pairs, colocated, num_colocated, doubtful),
        )

    def _profile(
        self,
        averages: Averages | None,
        classes: tuple[TrajectoryClass, ...],
        overhead_seconds: float,
        pair_overhead_seconds: float,
    ) -> Profile | None:
        state = self._state
        fixed, per_seq = state.decode_fixed_seconds, state.decode_seconds_per_seq
        per_token = state.prefill_seconds_per_token
        if averages is None or fixed is None or per_seq is None or per_token is None:
            return None
        priors = self._priors
        return Profile(
            _workload(averages, classes, self._batch_size, self._in_flight),
            Platform(
                prefill_seconds_per_token=per_token,
                decode_fixed_seconds=fixed,
                decode_seconds_per_seq=per_seq,
                overhead_seconds=overhead_seconds,
                pair_overhead_seconds=pair_overhead_seconds,
                kv_bytes_per_token=priors.kv_bytes_per_token,
                kv_bytes_per_trajectory=averages.context_tokens * priors.kv_bytes_per_token,
                kv_capacity_bytes=priors.kv_capacity_bytes,
                kv_bandwidth_bytes_per_s=priors.kv_bandwidth_bytes_per_s,
                decode_seconds_per_context_token=state.decode_seconds_per_context_token,
                decode_context_tokens=state.decode_context_tokens,
            ),
        )


def measure(samples: Sequence[TrajectorySample]) -> Averages:
    """Averages of one step; every sample has a turn. The slowest trajectory is the one that lived longest."""
    slowest = max(samples, key=lambda sample: (sample.live_seconds, len(sample.turns)))
    turns = [turn for sample in samples for turn in sample.turns]
    live = sum(sample.live_seconds for sample in samples)
    generating = sum(sample.generate_seconds for sample in samples)
    return Averages(
        num_turns=float(len(slowest.turns)),
        mean_turns=len(turns) / len(samples),
        turn_input_tokens=sum(turn.prefilled_tokens for turn in turns) / len(turns),
        turn_output_tokens=sum(turn.generated_tokens for turn in turns) / len(turns),
        decoding_ratio=generating / live if live > 0 else 1.0,
        env_seconds=slowest.env_seconds,
        context_tokens=sum(turn.new_prompt_tokens + turn.retained_tokens for turn in turns) / len(samples),
        new_prompt_tokens=sum(turn.new_prompt_tokens for turn in turns) / len(turns),
        retained_tokens=sum(turn.retained_tokens for turn in turns) / len(turns),
        slowest_seconds=slowest.live_seconds,
    )


def bubble_ratio(decoding_ratio: float) -> float:
    """theta = (1 - f) / f."""
    if decoding_ratio <= 1.0 / (1.0 + MAX_BUBBLE_RATIO):
        return MAX_BUBBLE_RATIO
    return max(0.0, (1.0 - decoding_ratio) / decoding_ratio)


def _workload(
    averages: Averages, classes: tuple[TrajectoryClass, ...], batch_size: int, in_flight: int
) -> Workload:
    return Workload(
        batch_size=float(batch_size),
        num_turns=averages.num_turns,
        turn_input_tokens=averages.turn_input_tokens,
        turn_output_tokens=averages.turn_output_tokens,
        bubble_ratio=bubble_ratio(averages.decoding_ratio),
        env_seconds=averages.env_seconds,
        mean_turns=averages.mean_turns,
        classes=classes,
        in_flight=float(in_flight),
    )


def _believed(own: float, num_own: int, other: float, num_other: int, doubtful: float) -> float:
    """A mode's overhead from the mean of its own steps and of the other mode's."""
    if not num_own and num_other >= ENOUGH_STEPS:
        return max(0.0, min(other, doubtful))
    missing = max(0, ENOUGH_STEPS - num_own) if num_other else 0
    counted = min(num_own, ENOUGH_STEPS)
    return max(0.0, (counted * own + missing * other) / max(1, counted + missing))


def _follow(
    average: float, deviation: float, value: float, weight: float, *, settled: bool
) -> tuple[float, float]:
    """The next average and its mean absolute deviation."""
    error = abs(value - average)
    if settled and error > JUMP_DEVIATIONS * deviation and error > JUMP_RATIO * abs(average):
        return value, deviation
    return average + weight * (value - average), deviation + weight * (error - deviation)
