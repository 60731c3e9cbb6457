"""Which allocations a budget of workers allows (paper §4.2).

The decode workers of a disaggregated allocation must hold the KV cache of the whole batch. That is the only hard cut:
a prefill pool that is too small is priced by the makespan, and colocated workers queue what they cannot hold.
"""

from collections.abc import Iterator

from pearl.types.plan import Allocation
from pearl.types.profile import Profile


def allocations(num_workers: int) -> Iterator[Allocation]:
    """Colocation first, then every split with a worker on both sides; nothing for no workers."""
    if num_workers > 0:
        yield Allocation(colocated=num_workers)
    for prefill in range(1, num_workers):
        yield Allocation(prefill=prefill, decode=num_workers - prefill)


def is_feasible(profile: Profile, allocation: Allocation) -> bool:
    """B * K_seq <= N_D * H_max, when disaggregated."""
    if allocation.is_colocated:
        return allocation.colocated > 0
    batch_bytes = profile.workload.batch_size * profile.platform.kv_bytes_per_trajectory
    return batch_bytes <= allocation.decode * profile.platform.kv_capacity_bytes
