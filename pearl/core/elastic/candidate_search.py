"""How long each allocation of a budget of workers would take: of all of them, or of as many as it takes to find the
least.

Over the number of prefill workers a makespan falls as long as prefill holds it up, then rises as decode does. So the
least is found by going downhill, and a model that takes a millisecond an allocation is asked a handful of times,
however many workers there are.
"""

from collections.abc import Callable, Sequence

import msgspec

from pearl.core.elastic.capacity import is_feasible
from pearl.core.elastic.makespan import Model, Prediction, Terms, closed_form
from pearl.types.plan import Allocation
from pearl.types.profile import Profile


class Candidate(msgspec.Struct, frozen=True):
    allocation: Allocation
    seconds: float  # over both, where training GPUs are lent for a part of the time
    terms: Terms  # of the allocation alone
    feasible: bool


class Lending(msgspec.Struct, frozen=True):
    """So many workers more, on training GPUs, are there for this share of the time."""

    num_workers: int = 0
    share: float = 0.0


NOTHING_LENT = Lending()


class CandidateSearch:
    def __init__(
        self, profile: Profile, possible: Sequence[Allocation], model: Model, lending: Lending = NOTHING_LENT
    ) -> None:
        """``possible``: of one budget; its splits have consecutive numbers of prefill workers."""
        self._profile = profile
        self._possible = possible
        self._model = model
        self._lending = lending
        self._predictions: dict[Allocation, Prediction] = {}
        self._found: dict[Allocation, Candidate] = {}

    def evaluate(self, allocation: Allocation) -> Candidate:
        if allocation not in self._found:
            prediction = self._predict(allocation)
            self._found[allocation] = Candidate(
                allocation,
                self._mean_seconds(allocation, prediction.seconds),
                prediction.terms,
                is_feasible(self._profile, allocation),
            )
        return self._found[allocation]

    def evaluate_all(self) -> None:
        for allocation in self._possible:
            self.evaluate(allocation)

    def search_splits(self, splits: Sequence[Allocation]) -> None:
        """Evaluate those of the consecutive ``splits`` that lie on the way to the least of them."""
        if splits:
            total, first, last = splits[0].total, splits[0].prefill, splits[-1].prefill
            start = _argmin_unimodal(
                lambda p: closed_form(self._profile, _split(total, p)).seconds, first, last
            )
            least = _argmin_unimodal(lambda p: self.evaluate(_split(total, p)).seconds, first, last, start)
            self.evaluate(_split(total, least))  # not yet, where it is the only one

    @property
    def found(self) -> tuple[Candidate, ...]:
        """Return the candidates evaluated so far, in the order of ``possible``."""
        return tuple(self._found[a] for a in self._possible if a in self._found)

    def _predict(self, allocation: Allocation) -> Prediction:
        if allocation not in self._predictions:
            self._predictions[allocation] = self._model(self._profile, allocation)
        return self._predictions[allocation]

    def _mean_seconds(self, allocation: Allocation, alone_s: float) -> float:
        """Return the mean seconds of batches that have the lent workers for their share of the time."""
        more, share = self._lending.num_workers, self._lending.share
        if not more or not share:
            return alone_s
        return 1.0 / ((1.0 - share) / alone_s + share / self._together(allocation, more))

    def _together(self, allocation: Allocation, more: int) -> float:
        """The makespan with the best roles for the lent workers beside it."""
        if allocation.is_colocated:
            return self._predict(Allocation(colocated=allocation.colocated + more)).seconds
        total, first = allocation.total + more, allocation.prefill

        def seconds(prefill: int) -> float:
            return self._predict(_split(total, prefill)).seconds

        return seconds(_argmin_unimodal(seconds, first, first + more))


def _split(total: int, prefill: int) -> Allocation:
    return Allocation(prefill=prefill, decode=total - prefill)


def _argmin_unimodal(value: Callable[[int], float], first: int, last: int, start: int | None = None) -> int:
    """Return where ``value``, which falls and then rises, is least within first..last; the first of equals."""

    def rises(at: int) -> bool:
        return at >= last or value(at + 1) >= value(at)

    low, high = first, last
    here = (first + last) // 2 if start is None else start
    stride = 1
    if rises(here):
        high = here
        while low < high:
            here = max(low, high - stride)
            if not rises(here):
                low = here + 1
                break
            high, stride = here, 2 * stride
    else:
        low = here + 1
        while low < high:
            here = min(high, low + stride)
            if rises(here):
                high = here
                break
            low, stride = here + 1, 2 * stride
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if rises(middle) else (middle + 1, high)
    return low
