"""Profiles for tests: shipped ones, and one with numbers to calculate with by hand."""

from pathlib import Path

from pearl.core.elastic.profile_file import read_profile
from pearl.types.profile import Platform, Profile, Workload

SHIPPED = Path(__file__).parents[3] / "launch" / "profiles"


def shipped(name: str, *overrides: str) -> Profile:
    return read_profile((SHIPPED / f"{name}.json").read_bytes(), overrides)


HAND = Profile(
    Workload(
        batch_size=8.0,
        num_turns=10.0,
        turn_input_tokens=100.0,
        turn_output_tokens=20.0,
        bubble_ratio=1.0,
        env_seconds=7.0,
    ),
    Platform(
        prefill_seconds_per_token=1e-3,
        decode_fixed_seconds=0.01,
        decode_seconds_per_seq=0.005,
        overhead_seconds=0.3,
        kv_bytes_per_token=10.0,
        kv_bytes_per_trajectory=1000.0,
        kv_capacity_bytes=4000.0,
        kv_bandwidth_bytes_per_s=20_000.0,
    ),
)
