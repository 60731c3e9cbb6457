"""A batch simulated turn by turn, to judge makespan models by something that shares no formula with them.

Prefill is first come, first served, one prompt at a time. Decoding sequences of a worker share its iterations. On a
colocated worker a prefill stops decoding while it lasts. A turn goes to the least loaded worker of each pool.
"""

import heapq
from random import Random

from pearl.types.plan import Allocation
from pearl.types.profile import Profile


class Pool:
    """Workers with sequences that decode at a common pace, and prompts that wait to be prefilled."""

    def __init__(self, size: int, profile: Profile) -> None:
        self._platform = profile.platform
        self.decoding: list[dict[int, float]] = [{} for _ in range(size)]  # tokens left
        self.prompts: list[list[tuple[int, float]]] = [
            [] for _ in range(size)
        ]  # seconds left; the first is served

    def least_loaded(self) -> int:
        return min(range(len(self.decoding)), key=lambda w: len(self.decoding[w]) + len(self.prompts[w]))

    def _pace(self, worker: int) -> float:
        """Seconds a token."""
        platform = self._platform
        return platform.decode_fixed_seconds + platform.decode_seconds_per_seq * len(self.decoding[worker])

    def next_seconds(self) -> float:
        """Until anything is done here."""
        times = [queue[0][1] for queue in self.prompts if queue]
        for worker, sequences in enumerate(self.decoding):
            if sequences and not self.prompts[worker]:
                times.append(min(sequences.values()) * self._pace(worker))
        return min(times, default=float("inf"))

    def advance(self, seconds: float) -> tuple[list[tuple[int, int]], list[int]]:
        """(trajectory, worker) whose prompts, and trajectories whose answers, are done."""
        prefilled, decoded = [], []
        for worker, queue in enumerate(self.prompts):
            if queue:
                trajectory, left = queue[0]
                queue[0] = (trajectory, left - seconds)
                if left - seconds < 1e-12:
                    queue.pop(0)
                    prefilled.append((trajectory, worker))
            elif sequences := self.decoding[worker]:
                tokens = seconds / self._pace(worker)
                for trajectory in list(sequences):
                    sequences[trajectory] -= tokens
                    if sequences[trajectory] < 1e-9:
                        del sequences[trajectory]
                        decoded.append(trajectory)
        return prefilled, decoded


def simulate(profile: Profile, allocation: Allocation, seed: int) -> float:
    """Seconds until the last trajectory is done."""
    rng, load = Random(seed), profile.workload
    turns = _turns(profile, rng)
    prefill_s = load.turn_input_tokens * profile.platform.prefill_seconds_per_token
    kv_bytes = load.turn_input_tokens * profile.platform.kv_bytes_per_token
    transfer_s = kv_bytes / profile.platform.kv_bandwidth_bytes_per_s
    env_s = load.env_seconds / load.num_turns
    first = Pool(allocation.colocated or allocation.prefill, profile)
    second = first if allocation.is_colocated else Pool(allocation.decode, profile)
    waking = [(0.0, trajectory) for trajectory in turns]  # in the environment, until then
    moving: list[tuple[float, int]] = []  # between the pools
    pools = [first] if first is second else [first, second]
    now = link_free = 0.0

    def decode(trajectory: int, worker: int) -> None:
        second.decoding[worker][trajectory] = load.turn_output_tokens * rng.uniform(0.5, 1.5)

    while True:
        heads = [heap[0][0] - now for heap in (waking, moving) if heap]
        seconds = max(0.0, min(heads + [pool.next_seconds() for pool in pools], default=float("inf")))
        if seconds == float("inf"):
            return now
        now += seconds
        for pool in pools:
            prefilled, decoded = pool.advance(seconds)
            for trajectory, worker in prefilled:
                if first is second:
                    decode(trajectory, worker)
                else:
                    link_free = max(link_free, now) + transfer_s
                    heapq.heappush(moving, (link_free, trajectory))
            for trajectory in decoded:
                turns[trajectory] -= 1
                if turns[trajectory]:
                    heapq.heappush(waking, (now + env_s * rng.uniform(0.5, 1.5), trajectory))
        while waking and waking[0][0] <= now:
            first.prompts[first.least_loaded()].append((heapq.heappop(waking)[1], prefill_s))
        while moving and moving[0][0] <= now:
            decode(heapq.heappop(moving)[1], second.least_loaded())


def _turns(profile: Profile, rng: Random) -> dict[int, int]:
    """Uniform up to the slowest's, which one trajectory has."""
    most = round(profile.workload.num_turns)
    turns = {trajectory: rng.randint(1, most) for trajectory in range(int(profile.workload.batch_size))}
    turns[0] = most
    return turns
