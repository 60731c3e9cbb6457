"""Whether capacity that could be had is worth what it costs: the lending gate (paper Eq. 7) and the expansion gate.

Costs are moving averages of what was measured and begin with optimistic priors, since a cost that is never paid is
never measured. For the same reason a refusal does not last: the cost relaxes towards its prior with every step that
was refused, more slowly each time that a new try confirmed the refusal.
"""

import msgspec

from pearl.core.elastic.decision_engine import decide
from pearl.types.config import ElasticConfig
from pearl.types.profile import Profile

MAX_DOUBTS = 6
"""A refusal that was confirmed so often is tried again 2 ** 6 times as rarely; rarer would never notice a change."""
CORRECTION_RANGE = (0.25, 4.0)
"""A measured step may bend the model's makespan so far: beyond, the step was about something else."""


class GateDecision(msgspec.Struct, frozen=True):
    yes: bool
    gain_s: float
    cost_s: float
    reason: str


class GateState(msgspec.Struct):
    """Moving averages; None until the first measurement."""

    activation_s: float | None = None
    return_s: float | None = None
    preparation_s: float | None = None
    finalization_s: float | None = None
    correction_with: float | None = None  # measured over predicted seconds of a step, with borrowing
    correction_without: float | None = None
    refused_steps: int = 0  # in a row
    confirmed_refusals: int = 0  # tries in a row that were followed by a refusal
    is_probing: bool = False  # the latest borrowed step came after refused ones


def best_seconds(profile: Profile, num_workers: int, config: ElasticConfig) -> float:
    """Predicted makespan of the allocation that the policy would choose afresh; needs a worker."""
    seconds = decide(profile, num_workers, None, config, thorough=False).seconds
    assert seconds is not None
    return seconds


class LendingGate:
    """Borrow the idle training GPUs when R / B * (T_ded - T_full) > T_toggle."""

    def __init__(self, state: GateState, config: ElasticConfig) -> None:
        self._state = state
        self._config = config

    def should_borrow(
        self, remaining: int, batch_size: int, profile: Profile | None, num_dedicated: int, num_full: int
    ) -> GateDecision:
        """Changes nothing, so that it may be asked at any time.

        Args:
            remaining: R, trajectories of the batch that are not complete.
            num_dedicated: workers without the borrowed ones; ``num_full`` with them.
        """
        cost = self.toggle_cost_s
        if num_full <= num_dedicated or remaining <= 0:
            return GateDecision(False, 0.0, cost, "nothing to gain: no more workers or no trajectory left")
        if num_dedicated <= 0:
            return GateDecision(True, 0.0, cost, "no dedicated worker: only borrowed ones can serve")
        if profile is None:
            return GateDecision(True, 0.0, cost, "no profile yet: a try will tell")
        dedicated, full = self._makespans(profile, num_dedicated, num_full)
        gain = remaining / batch_size * (dedicated - full)
        compared = f"{remaining}/{batch_size} of {dedicated:.3g} - {full:.3g} s against {cost:.3g} s"
        return GateDecision(gain > cost, gain, cost, compared)

    def _makespans(self, profile: Profile, num_dedicated: int, num_full: int) -> tuple[float, float]:
        """T_ded and T_full, each bent by how the model did in steps of its kind, or of the other when only that is
        known."""
        state = self._state
        known = [c for c in (state.correction_without, state.correction_with) if c is not None]
        default = known[0] if known else 1.0
        without = default if state.correction_without is None else state.correction_without
        borrowed = (
            default
            if state.correction_with is None
            else without + self._fade * (state.correction_with - without)
        )
        return (
            best_seconds(profile, num_dedicated, self._config) * without,
            best_seconds(profile, num_full, self._config) * borrowed,
        )

    @property
    def toggle_cost_s(self) -> float:
        """T_toggle, as it is believed after the steps that were refused."""
        config, state = self._config, self._state
        return self._relaxed(state.activation_s, config.activation_prior_s) + self._relaxed(
            state.return_s, config.return_prior_s
        )

    def _relaxed(self, measured: float | None, prior: float) -> float:
        if measured is None or measured <= prior:
            return prior if measured is None else measured
        return prior + self._fade * (measured - prior)

    @property
    def _fade(self) -> float:
        """Return how much of a measurement is still trusted, 1 to 0."""
        state = self._state
        rate: float = self._config.smoothing / 2.0**state.confirmed_refusals
        return float((1.0 - rate) ** state.refused_steps)

    # what was measured

    def on_activated(self, seconds: float) -> None:
        self._state.activation_s = ema(self._state.activation_s, seconds, self._config.smoothing)

    def on_returned(self, seconds: float) -> None:
        self._state.return_s = ema(self._state.return_s, seconds, self._config.smoothing)

    def on_step(self, seconds: float, predicted_s: float | None, *, borrowed: bool, refused: bool) -> None:
        """A step is over.

        Args:
            seconds: it took, without the costs of activation and return.
            predicted_s: what the model said of its allocation; None when it was not asked.
            borrowed: training GPUs were lent during it.
            refused: this gate kept them from being lent, at least at first.
        """
        if predicted_s is not None and predicted_s > 0 and not (borrowed and refused):
            self._correct(seconds / predicted_s, borrowed)
        if borrowed:
            self._tried()
        elif refused:
            self._refused()

    def _correct(self, factor: float, borrowed: bool) -> None:
        least, most = CORRECTION_RANGE
        factor = min(max(factor, least), most)
        state, weight = self._state, self._config.smoothing
        if borrowed:
            state.correction_with = ema(state.correction_with, factor, weight)
        else:
            state.correction_without = ema(state.correction_without, factor, weight)

    def _tried(self) -> None:
        state = self._state
        state.is_probing = state.refused_steps > 0
        if not state.is_probing:
            state.confirmed_refusals = 0
        state.refused_steps = 0

    def _refused(self) -> None:
        state = self._state
        if state.is_probing and state.refused_steps == 0:
            state.confirmed_refusals = min(state.confirmed_refusals + 1, MAX_DOUBTS)
        state.refused_steps += 1


class ExpansionGate:
    """Start workers on GPUs that arrived when the rest of the run gains more than their admission pauses it."""

    def __init__(self, state: GateState, config: ElasticConfig) -> None:
        self._state = state
        self._config = config

    def should_expand(
        self, remaining_s: float | None, profile: Profile | None, num_now: int, num_new: int
    ) -> GateDecision:
        """``remaining_s`` of the run, as far as known; what is unknown speaks for expanding."""
        state, config = self._state, self._config
        cost = config.finalization_prior_s if state.finalization_s is None else state.finalization_s
        if num_new <= num_now:
            return GateDecision(False, 0.0, cost, "nothing to gain: no more workers")
        if num_now <= 0 or remaining_s is None or profile is None:
            return GateDecision(True, 0.0, cost, "no worker, or nothing known of the run yet")
        preparation = config.preparation_prior_s if state.preparation_s is None else state.preparation_s
        ratio = best_seconds(profile, num_new, config) / best_seconds(profile, num_now, config)
        gain = max(0.0, remaining_s - preparation) * (1.0 - ratio)
        compared = f"{1 - ratio:.1%} of {remaining_s:.3g} - {preparation:.3g} s against {cost:.3g} s"
        return GateDecision(gain > cost, gain, cost, compared)

    def on_expanded(self, preparation_s: float, finalization_s: float) -> None:
        state, weight = self._state, self._config.smoothing
        state.preparation_s = ema(state.preparation_s, preparation_s, weight)
        state.finalization_s = ema(state.finalization_s, finalization_s, weight)


def ema(average: float | None, value: float, weight: float) -> float:
    """Exponential moving average; the first value is taken whole."""
    return value if average is None else average + weight * (value - average)
