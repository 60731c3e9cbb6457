"""Events a second through ``Coordinator.handle``, on a recorded event mix.

A run of 16 workers on the virtual clock (pearl/testing/world.py: token frames, environment steps, weight updates,
training) is recorded, then fed to fresh cores. The peer in the same run is the cheapest thing that could stand for a
core: decoding and encoding the same events as the journal does. Needs 2 cores and under a minute.

    python benchmarks/core_events.py
"""

import sys
import time

import msgspec

from pearl.core.coordinator import Coordinator
from pearl.testing.world import World
from pearl.types.config import Config, DataConfig, EnvironmentConfig, RolloutConfig, RunConfig
from pearl.types.events import AnyEvent

REQUIRED_EVENTS_PER_S = 50_000
ROUNDS = 5


def record() -> tuple[Config, list[tuple[float, AnyEvent]]]:
    config = Config(
        run=RunConfig(num_steps=12),
        data=DataConfig(batch_size=256, group_size=16),
        environment=EnvironmentConfig(num_evaluation_tasks=0, max_turns=8),
        rollout=RolloutConfig(num_workers=16, max_requests_per_worker=32, max_new_tokens_per_turn=24),
    )
    world = World(config, seed=1)
    world.run(2_000_000)
    return config, [(now, event) for now, event, _ in world.entries]


def time_core(config: Config, entries: list[tuple[float, AnyEvent]]) -> float:
    core = Coordinator(config)
    handle = core.handle
    begin = time.perf_counter()
    for now, event in entries:
        handle(event, now)
    return time.perf_counter() - begin


def time_codec(entries: list[tuple[float, AnyEvent]]) -> float:
    encoder, decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(AnyEvent)
    begin = time.perf_counter()
    for _, event in entries:
        decoder.decode(encoder.encode(event))
    return time.perf_counter() - begin


def main() -> int:
    config, entries = record()
    kinds: dict[str, int] = {}
    for _, event in entries:
        kinds[type(event).__name__] = kinds.get(type(event).__name__, 0) + 1
    print(
        f"{len(entries)} events: "
        + ", ".join(f"{n} {k}" for k, n in sorted(kinds.items(), key=lambda x: -x[1]))
    )
    rates, ratios = [], []
    for _ in range(ROUNDS):
        core, codec = time_core(config, entries), time_codec(entries)
        rates.append(len(entries) / core)
        ratios.append(core / codec)
    best = max(rates)
    print(f"handle: best {best:,.0f} events/s, median {sorted(rates)[ROUNDS // 2]:,.0f} events/s")
    print(f"handle / (encode + decode) of the same events: {sorted(ratios)[ROUNDS // 2]:.1f}x")
    passed = best >= REQUIRED_EVENTS_PER_S
    print(f"{'PASS' if passed else 'FAIL'}: needs {REQUIRED_EVENTS_PER_S:,} events/s")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
