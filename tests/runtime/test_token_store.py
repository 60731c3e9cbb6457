"""Tokens come back exactly as they were generated, over restarts of the process too."""

from array import array
from collections.abc import Iterable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pearl.runtime import wal
from pearl.runtime.token_store import TokenStore
from pearl.runtime.trajectory_tokens import Span
from pearl.types.trajectory import VersionRun
from pearl.types.weights import Version

V1, V2 = Version(0, 1), Version(0, 2)


def ids(*values: int) -> bytes:
    return array("i", values).tobytes()


def logprobs(*values: float) -> bytes:
    return array("f", values).tobytes()


def run(version: Version, count: int, kv_version: Version | None = None) -> VersionRun:
    return VersionRun(version, count, kv_version or version)


def two_turns(store: TokenStore, trajectory: int = 7) -> None:
    store.append(trajectory, "prompt", 0, ids(1, 2, 3))
    store.append(trajectory, "generated", 0, ids(4), logprobs(-1), (run(V1, 1),))
    store.append(trajectory, "generated", 0, ids(5), logprobs(-2), (run(V1, 1),))
    store.append(trajectory, "observation", 0, ids(6, 7))
    store.append(trajectory, "generated", 1, ids(8, 9), logprobs(-3, -4), (run(V2, 1, V1), run(V2, 1)))


def segment_files(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_a_view_holds_what_a_training_sample_needs(tmp_path: Path) -> None:
    store = TokenStore(tmp_path)
    two_turns(store)
    view = store.view(7)
    assert view.num_tokens == store.length(7) == 9
    assert view.ids == store.context(7) == ids(1, 2, 3, 4, 5, 6, 7, 8, 9)
    assert store.context(7, 4) == ids(1, 2, 3, 4)
    assert view.mask == bytes([0, 0, 0, 1, 1, 0, 0, 1, 1])
    assert view.logprobs == logprobs(0, 0, 0, -1, -2, 0, 0, -3, -4)
    assert view.runs == (run(V1, 2), run(V2, 1, V1), run(V2, 1))
    assert view.spans[1] == Span("generated", 0, 2)
    assert (view.prompt, view.actions, view.observations) == (
        ids(1, 2, 3),
        (ids(4, 5), ids(8, 9)),
        (ids(6, 7),),
    )
    assert view.current(V1) == bytes([0, 0, 0, 1, 1, 0, 0, 0, 0])
    assert view.current(V2) == bytes([0, 0, 0, 0, 0, 0, 0, 0, 1])
    store.close()


def test_an_empty_answer_still_counts_as_answered(tmp_path: Path) -> None:
    store = TokenStore(tmp_path)
    store.append(1, "prompt", 0, ids(1))
    store.append(1, "generated", 0, ids(2), logprobs(-1), (run(V1, 1),))
    store.append(1, "observation", 0, b"")
    store.truncate(1, 2)
    assert store.view(1).observations == (b"",)
    store.truncate(1, 1)
    assert (store.view(1).actions, store.view(1).observations, store.view(1).runs) == ((), (), ())


def test_flushed_tokens_survive_and_unflushed_ones_do_not(tmp_path: Path) -> None:
    store = TokenStore(tmp_path)
    two_turns(store)
    store.flush()
    expected = store.view(7)
    store.append(7, "observation", 1, ids(10))
    assert TokenStore(tmp_path).view(7) == expected


def test_restart_truncate_and_forget_survive_too(tmp_path: Path) -> None:
    store = TokenStore(tmp_path)
    for trajectory in (1, 2, 3):
        two_turns(store, trajectory)
    store.restart(1)
    store.append(1, "prompt", 0, ids(42))
    store.truncate(2, 4)
    store.forget(3)
    store.forget(99)
    store.close()
    again = TokenStore(tmp_path)
    assert again.trajectories() == store.trajectories() == [2, 1]
    assert again.context(1) == ids(42)
    assert again.view(2).actions == (ids(4),)
    assert again.view(2).runs == (run(V1, 1),)
    assert again.length(3) == 0
    again.close()


def test_segments_without_live_trajectories_are_deleted_in_order(tmp_path: Path) -> None:
    store = TokenStore(tmp_path, segment_bytes=1)  # a segment a flush
    for trajectory in (1, 2, 3):
        store.append(trajectory, "prompt", 0, ids(trajectory))
        store.flush()
    store.forget(2)
    store.flush()
    assert segment_files(tmp_path)[0] == "000001.msgpack"
    store.forget(1)
    store.flush()
    assert segment_files(tmp_path) == ["000003.msgpack", "000004.msgpack", "000005.msgpack"]
    store.close()
    again = TokenStore(tmp_path, segment_bytes=1)
    assert again.trajectories() == [3]
    again.forget(3)
    again.close()
    assert segment_files(tmp_path) == ["000006.msgpack"]


@pytest.mark.scenario("CK-04")
def test_a_crash_at_any_byte_of_the_last_flush(tmp_path: Path) -> None:
    store = TokenStore(tmp_path / "whole")
    two_turns(store)
    store.flush()
    path = wal.segment_path(tmp_path / "whole", 1)
    before, expected = path.stat().st_size, store.view(7)
    store.truncate(7, 2)
    store.append(8, "prompt", 0, ids(1))
    store.close()
    whole = path.read_bytes()
    for size in range(before, len(whole)):
        crashed = tmp_path / str(size)
        crashed.mkdir()
        wal.segment_path(crashed, 1).write_bytes(whole[:size])
        again = TokenStore(crashed)
        assert (again.torn_bytes, again.trajectories(), again.view(7)) == (size - before, [7], expected)
        again.append(7, "observation", 1, ids(11))
        again.close()
        assert TokenStore(crashed).length(7) == 10


def test_counts_that_disagree_are_refused_and_nothing_is_added(tmp_path: Path) -> None:
    store = TokenStore(tmp_path)
    with pytest.raises(ValueError, match="3 bytes are no int32"):
        store.append(1, "prompt", 0, b"abc")
    with pytest.raises(ValueError, match="4 bytes of log-probs for 2 generated"):
        store.append(1, "generated", 0, ids(1, 2), logprobs(0), (run(V1, 2),))
    with pytest.raises(ValueError, match="version runs"):
        store.append(1, "generated", 0, ids(1, 2), logprobs(0, 0), (run(V1, 1),))
    with pytest.raises(ValueError, match="version runs"):
        store.append(1, "observation", 0, ids(1), b"", (run(V1, 1),))
    with pytest.raises(ValueError, match="has 0 tokens, not 1"):
        store.truncate(1, 1)
    assert store.trajectories() == []


Step = tuple[str, int, int]


def take(store: TokenStore, steps: Iterable[Step]) -> None:
    for operation, trajectory, amount in steps:
        match operation:
            case "generate":
                packed = ids(*range(amount)), logprobs(*map(float, range(amount)))
                store.append(trajectory, "generated", amount, *packed, (run(V1, amount),))
            case "truncate":
                store.truncate(trajectory, min(amount, store.length(trajectory)))
            case "restart":
                store.restart(trajectory)
            case "forget":
                store.forget(trajectory)
            case _:
                store.flush()


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["generate", "generate", "truncate", "restart", "forget", "flush"]),
            st.integers(0, 3),
            st.integers(0, 5),
        ),
        max_size=40,
    )
)
@pytest.mark.scenario("CK-04")
def test_a_reopened_store_equals_the_one_that_was_closed(
    tmp_path_factory: pytest.TempPathFactory, steps: list[Step]
) -> None:
    directory = tmp_path_factory.mktemp("store")
    store = TokenStore(directory, segment_bytes=64)
    take(store, steps)
    store.close()
    again = TokenStore(directory, segment_bytes=64)
    assert sorted(again.trajectories()) == sorted(store.trajectories())
    for trajectory in store.trajectories():
        assert again.view(trajectory) == store.view(trajectory)


def test_what_others_did_to_the_segments_is_known(tmp_path: Path) -> None:
    store = TokenStore(tmp_path, segment_bytes=1)  # a segment for each flush
    for trajectory in range(3):
        two_turns(store, trajectory)
        store.flush()
    assert store.damage() == ""
    first, second, third = (wal.segment_path(tmp_path, number) for number in (1, 2, 3))
    whole = third.read_bytes()
    third.write_bytes(whole[:-1])
    assert f"has {len(whole) - 1} bytes, {len(whole)} were written" in store.damage()
    third.write_bytes(whole)
    assert store.damage() == ""
    second.rename(tmp_path / "aside")
    assert "segments [2] are missing" in store.damage()
    (tmp_path / "aside").rename(second)
    first.unlink()
    assert store.damage() == f"{first} was deleted"


def test_segments_that_nobody_needs_any_more_are_not_missed(tmp_path: Path) -> None:
    store = TokenStore(tmp_path, segment_bytes=1)
    for trajectory in range(3):
        two_turns(store, trajectory)
        store.flush()
    store.forget(0)
    store.flush()
    assert not wal.segment_path(tmp_path, 1).exists()
    assert store.damage() == ""
    store.close()
    assert TokenStore(tmp_path).damage() == ""
