"""Prefill-decode pairs: transfers that share a link, by hand numbers, and turns that two engines share."""

import msgspec
import pytest
from test_engine_timing import SPEED

from pearl.sim.clock import VirtualClock
from pearl.sim.engine import Engine
from pearl.sim.pairs import Pairs
from pearl.sim.requests import Progress, Request
from pearl.sim.transfers import SharedLink
from pearl.types.ids import AttemptId

FAST = msgspec.structs.replace(SPEED, kv_bytes_per_token=1000.0, kv_bandwidth_bytes_per_s=1e6)


def run(clock: VirtualClock) -> None:
    while clock.next_time() is not None:
        clock.step()


def test_transfers_share_the_bandwidth_equally() -> None:
    clock = VirtualClock()
    link = SharedLink(clock, 100.0)
    arrived: dict[str, float] = {}

    def send(name: str, num_bytes: float) -> None:
        link.send(num_bytes, lambda: arrived.__setitem__(name, clock.now))

    clock.at(0.0, lambda: send("a", 100.0))
    clock.at(0.5, lambda: send("b", 100.0))
    clock.at(0.5, lambda: send("c", 25.0))
    run(clock)
    # a moves 50 alone; then three share 100 a second: c needs 25 each, 0.75 s; then a (25 left) and b (75 left) share.
    assert arrived == pytest.approx({"c": 1.25, "a": 1.75, "b": 2.25})


def test_a_cancelled_transfer_leaves_its_bandwidth_to_the_others() -> None:
    clock = VirtualClock()
    link = SharedLink(clock, 100.0)
    arrived: list[float] = []
    link.send(100.0, lambda: arrived.append(clock.now))
    gone = link.send(100.0, lambda: arrived.append(-1.0))
    clock.at(1.0, lambda: link.cancel(gone))
    clock.at(5.0, lambda: link.cancel(gone))
    run(clock)
    assert arrived == pytest.approx([1.5])


class Worker:
    def __init__(self, clock: VirtualClock, pairs: Pairs) -> None:
        self.ended: list[tuple[float, Progress]] = []
        self.link = pairs.make_link()
        self.engine = Engine(clock, FAST, lambda ended: self._on_ended(clock, pairs, ended))

    def _on_ended(self, clock: VirtualClock, pairs: Pairs, ended: list[Progress]) -> None:
        for one in ended:
            self.ended.append((clock.now, one))
            if one.request.part == "prefill" and one.finish is None:
                pairs.prefilled(one.request.attempt)


class Trial:
    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.pairs = Pairs(self.clock, FAST)
        self.prefill = Worker(self.clock, self.pairs)
        self.decode = Worker(self.clock, self.pairs)

    def begin(self, at_s: float, attempt: int, context: int, make: int) -> None:
        request = Request(AttemptId(attempt), 7, 7, 10, context, make, "stop")
        self.clock.at(at_s, lambda: self.pairs.begin(request, self.prefill, self.decode))


def test_a_turn_is_prefilled_sent_and_decoded() -> None:
    trial = Trial()
    trial.begin(0.0, 1, context=50, make=11)
    run(trial.clock)
    # 10 + 5 ms of prefill, 50 KB at 1 MB/s, ten iterations of 10 + 1 ms: the first token comes with the KV.
    [(prefilled_s, half)] = trial.prefill.ended
    assert prefilled_s == pytest.approx(0.015)
    assert (half.made, half.prefilled_tokens, half.finish) == (0, 50, None)
    [(ended_s, whole)] = trial.decode.ended
    assert ended_s == pytest.approx(0.015 + 0.050 + 10 * 0.011)
    assert (whole.made, whole.prefilled_tokens, whole.finish) == (11, 0, "stop")


def test_what_the_decode_worker_made_is_prefilled_again_and_only_the_rest_is_sent() -> None:
    trial = Trial()
    trial.begin(0.0, 1, context=50, make=11)
    trial.begin(1.0, 2, context=71, make=1)
    run(trial.clock)
    assert trial.prefill.ended[1][1].prefilled_tokens == 71 - 50
    # 10 + 2.1 ms of prefill, then 71 - 61 tokens at 1 ms each.
    assert trial.decode.ended[1][0] == pytest.approx(1.0 + 0.0121 + 0.010)


def test_a_decode_half_can_be_aborted_while_it_waits() -> None:
    trial = Trial()
    trial.begin(0.0, 1, context=50, make=11)
    aborted: list[Progress | None] = []
    trial.clock.at(0.040, lambda: aborted.append(trial.pairs.abort(AttemptId(1), trial.decode)))
    trial.clock.at(0.041, lambda: aborted.append(trial.pairs.abort(AttemptId(1), trial.decode)))
    run(trial.clock)
    assert aborted[0] is not None
    assert (aborted[0].made, aborted[0].finish) == (0, "abort")
    assert aborted[1] is None
    assert trial.decode.ended == []


def test_a_prefill_worker_that_dies_while_sending_fails_the_decode_half() -> None:
    trial = Trial()
    trial.begin(0.0, 1, context=50, make=11)
    broken: list[tuple[object, Progress]] = []
    trial.clock.at(0.040, lambda: broken.extend(trial.pairs.break_off(trial.prefill)))
    trial.clock.at(0.041, lambda: broken.extend(trial.pairs.break_off(trial.prefill)))
    trial.clock.step()
    while trial.clock.next_time() is not None and not broken:
        trial.clock.step()
    assert [(one.made, one.finish) for _, one in broken] == [(0, "error")]
    run(trial.clock)
    assert trial.decode.ended == []  # what was on its way never arrives


def test_an_interrupted_decode_costs_its_suffix_and_an_interrupted_prefill_a_full_pass() -> None:
    trial = Trial()
    trial.begin(0.0, 1, context=50, make=101)
    trial.clock.at(0.065 + 20 * 0.011 + 0.001, lambda: trial.decode.engine.abort(AttemptId(1)))
    trial.begin(1.0, 2, context=71, make=10)
    trial.clock.at(1.001, lambda: trial.prefill.engine.abort(AttemptId(2)))
    trial.begin(2.0, 3, context=71, make=10)
    run(trial.clock)
    assert trial.decode.ended[0][1].made == 21
    prefills = {int(one.request.attempt): one for _, one in trial.prefill.ended}
    assert (prefills[2].prefilled_tokens, prefills[2].finish) == (0, "abort")
    assert prefills[3].prefilled_tokens == 71
