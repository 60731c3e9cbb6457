"""Sampler, page accounting, prefix cache, grouping and frames on their own."""

import numpy as np
import numpy.typing as npt
import pytest
import torch
from engine_support import request
from hypothesis import given, settings
from hypothesis import strategies as st

from pearl.types.splitmix import splitmix64
from pearl.types.trajectory import VersionRun
from pearl.types.weights import Version
from pearl.workers.rollout.frame_builder import FrameBuilder
from pearl.workers.rollout.protocol import Delta
from pearl.workers.rollout.torch_engine.layout import GROUP_COST, partition
from pearl.workers.rollout.torch_engine.pages import PagePool
from pearl.workers.rollout.torch_engine.prefix_cache import PrefixCache
from pearl.workers.rollout.torch_engine.request import Request
from pearl.workers.rollout.torch_engine.sampler import key_uniform, sample
from pearl.workers.rollout.torch_engine.scheduler import Scheduler

V = Version(0, 1)
W = Version(0, 2)


def test_uniforms_are_those_worked_out_with_whole_numbers() -> None:
    # splitmix64 of 1234567 begins with this number in its authors' implementation too.
    assert splitmix64(1234567) == 6457827717110365317
    seeds = np.array([0, 0, 0, 1234567, 1234567, 1234567], np.uint64)
    positions = np.array([0, 1, 1000, 0, 1, 1000])
    whole = [
        12035550249420947055,
        12935080325729570654,
        11412949293094596140,
        9709514789577493705,
        13013878896559074743,
        1061557983716998936,
    ]
    assert counter_uniform(seeds, positions).tolist() == [(number >> 11) / 2**53 for number in whole]


def counter_uniform(
    seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.int64]
) -> npt.NDArray[np.float64]:
    return key_uniform(np.array([splitmix64(int(seed)) for seed in seeds], np.uint64), positions)


def test_uniforms_are_evenly_spread_over_seeds_and_positions() -> None:
    for seeds, positions in ((np.arange(20000), np.full(20000, 7)), (np.full(20000, 7), np.arange(20000))):
        counts, _ = np.histogram(counter_uniform(seeds.astype(np.uint64), positions), 20, (0.0, 1.0))
        assert abs(counts - 1000).max() < 160  # five standard deviations


def test_sampling_inverts_the_distribution_and_passes_over_impossible_ids() -> None:
    probabilities = torch.tensor([[0.0, 0.25, 0.0, 0.75, 0.0]]).repeat(5, 1)
    logits = probabilities.clamp_min(1e-300).log().clamp_min(-1e30).float()
    uniforms = np.array([0.0, 0.2499999, 0.2500001, 0.9999, 1 - 2.0**-53])
    found = sample(logits, np.ones(5), uniforms)
    assert found.ids == [1, 1, 3, 3, 3]
    assert found.logprobs == pytest.approx(np.log([0.25, 0.25, 0.75, 0.75, 0.75]).tolist(), abs=1e-6)


def test_sampling_mixes_greedy_rows_temperatures_and_bad_rows() -> None:
    logits = torch.tensor(
        [[0.0, 1.0, 2.0], [0.0, 1.0, 2.0], [0.0, float("nan"), 2.0], [0.0, float("inf"), 1.0]]
    )
    found = sample(logits, np.array([0.0, 0.5, 1.0, 0.0]), np.array([0.0, 0.0, 0.5, 0.5]))
    assert found.ids[:2] == [2, 0]
    assert found.finite == [True, True, False, False]
    assert found.logprobs[0] == pytest.approx(torch.tensor([0.0, 1.0, 2.0]).log_softmax(-1)[2].item())
    assert found.logprobs[1] == pytest.approx(torch.tensor([0.0, 2.0, 4.0]).log_softmax(-1)[0].item())


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(0, 5000)), min_size=1, max_size=40))
def test_groups_hold_each_request_once(sizes: list[tuple[int, int]]) -> None:
    counts = np.array([count for count, _ in sizes])
    contexts = counts + np.array([computed for _, computed in sizes])
    groups = partition(counts, contexts)
    assert sorted(np.concatenate(groups).tolist()) == list(range(len(sizes)))
    for group in groups:
        padded = len(group) * contexts[group].max() * (counts[group].max() + 1)
        assert padded - (contexts[group] * (counts[group] + 1)).sum() <= GROUP_COST * len(group)


def test_equal_requests_are_one_group() -> None:
    assert len(partition(np.ones(64, np.int64), np.full(64, 900))) == 1


def test_an_edge_of_a_page_is_shared_whole_and_a_partial_page_is_copied() -> None:
    pool = PagePool(8)
    cache = PrefixCache(pool, 4)
    pages = [pool.take() for _ in range(3)]
    tokens = np.arange(10, dtype=np.int32)
    cache.insert(tokens, pages)
    for page in pages:
        pool.drop(page)
    assert cache.match(tokens[:8]).pages == pages[:2]
    match = cache.match(tokens)
    assert (match.pages, match.tail, match.tail_tokens) == (pages[:2], pages[2], 2)
    part = cache.match(np.array([0, 1, 2, 3, 4, 5, 99], np.int32))
    assert (part.pages, part.tail, part.tail_tokens) == (pages[:1], pages[1], 2)
    assert cache.match(np.array([5], np.int32)).tail_tokens == 0
    assert pool.num_only_cached == 3
    assert [cache.evict() for _ in range(4)] == [True, True, True, False]
    assert pool.num_free == 8


def test_a_longer_page_takes_the_place_of_what_it_begins_with() -> None:
    pool = PagePool(8)
    cache = PrefixCache(pool, 4)
    page = pool.take()
    for count in (2, 3, 4, 3):
        cache.insert(np.arange(count, dtype=np.int32), [page])
        assert cache.num_pages == 1
    cache.clear()
    assert pool.num_free == 7
    pool.drop(page)
    assert pool.num_free == 8


class Simulation:
    """A scheduler with the engine's part played by a counter."""

    def __init__(self, num_pages: int, page_tokens: int, chunk: int, max_running: int) -> None:
        self.scheduler = Scheduler(num_pages, page_tokens, chunk, max_running)
        self.live: dict[int, Request] = {}
        self.made: dict[int, int] = {}

    def submit(self, attempt: int, context: list[int], count: int) -> None:
        entry = Request(request(attempt, context, count), attempt, self.scheduler.page_tokens)
        if self.scheduler.can_ever_hold(entry.limit):
            self.live[attempt] = entry
            self.made[attempt] = 0
            self.scheduler.add(entry)

    def step(self) -> None:
        works = self.scheduler.plan()
        assert works, "requests wait and none can run"
        seen: set[int] = set()
        for work in works:
            entry = work.request
            assert entry in self.scheduler.running
            assert work.count >= 1
            assert entry.computed + work.count <= len(entry.pages) * entry.page_tokens
            slots = set(entry.slots(entry.computed, entry.computed + work.count).tolist())
            assert not slots & seen, "two requests write to one place"
            assert min(slots) >= entry.page_tokens, "page 0 is written"
            seen |= slots
            if entry.copy_from is not None:
                self.scheduler.copied(entry)
        for work in works:
            self._advance(work.request, work.count)

    def _advance(self, entry: Request, count: int) -> None:
        entry.computed += count
        if entry.computed < entry.num_tokens:
            return
        entry.verified = entry.computed
        if entry.pending_key is not None:
            entry.pending_key = None
            self.scheduler.share(entry)
        entry.ids[entry.num_tokens] = (entry.num_tokens * 7 + entry.attempt) % 3
        entry.num_tokens += 1
        self.made[entry.attempt] += 1
        if entry.num_tokens == entry.limit:
            self.end(entry.attempt)

    def end(self, attempt: int) -> None:
        entry = self.live.pop(attempt, None)
        if entry is not None:
            self.scheduler.remove(entry)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_rx_every_page_comes_back_whatever_happens(data: st.DataObject) -> None:
    draw = data.draw
    simulation = Simulation(
        draw(st.integers(4, 24)),
        draw(st.sampled_from([1, 4, 16])),
        draw(st.integers(1, 20)),
        draw(st.integers(1, 5)),
    )
    wanted: dict[int, int] = {}
    for attempt in range(draw(st.integers(1, 12))):
        # Few different ids, so that prefixes meet.
        context = draw(st.lists(st.integers(0, 1), min_size=1, max_size=40))
        wanted[attempt] = draw(st.integers(1, 20))
        simulation.submit(attempt, context, wanted[attempt])
        for _ in range(draw(st.integers(0, 6))):
            if simulation.live:
                simulation.step()
        if draw(st.integers(0, 5)) == 0:
            simulation.end(attempt)
            wanted.pop(attempt)
        elif draw(st.integers(0, 5)) == 0:
            simulation.scheduler.forget_cache()
    while simulation.live:
        simulation.step()
    assert all(simulation.made.get(a, count) == count for a, count in wanted.items())
    assert simulation.scheduler.pool.num_used == 0
    simulation.scheduler.forget_cache()
    assert simulation.scheduler.pool.num_free == simulation.scheduler.pool.num_pages


def test_frames_hold_all_attempts_merge_runs_and_count_without_a_hole() -> None:
    frames = FrameBuilder()
    frames.add(Delta(1, [5], [-0.5], [VersionRun(V, 1, V)], 7))
    frames.add(Delta(2, [6], [-1.5], [VersionRun(V, 1, V)]))
    frames.add(Delta(1, [7], [-2.5], [VersionRun(V, 1, V)]))
    frames.add(Delta(1, [8], [-3.5], [VersionRun(W, 1, V)], 0, "stop"))
    assert frames.has_finished
    frame = frames.take([])
    assert frame.sequence == 0
    first, second = frame.deltas
    assert np.frombuffer(first.ids, "<i4").tolist() == [5, 7, 8]
    assert np.frombuffer(first.logprobs, "<f4").tolist() == [-0.5, -2.5, -3.5]
    assert first.runs == (VersionRun(V, 2, V), VersionRun(W, 1, V))
    assert (first.prefilled_tokens, first.finish, second.finish) == (7, "stop", None)
    assert not frames
    assert frames.take([]).sequence == 1
