"""The training state leaves its devices and comes back, on worlds of one and two ranks."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
from training_worlds import CONFIG, in_world, make_samples, trainer, with_training

from pearl.types.config import Config
from pearl.types.weights import Version
from pearl.workers.memory_offload.host_saver import HostSaver
from pearl.workers.memory_offload.pages import Pages, drop
from pearl.workers.memory_offload.storages import digest, distinct_storages, total_bytes
from pearl.workers.training.control import ControlChannel, Report
from pearl.workers.training.state_offload import TrainingResidency, check, slowest
from pearl.workers.weight_transfer.receiver import Receiver
from pearl.workers.weight_transfer.snapshot_image import SnapshotStore

BIG = msgspec.structs.replace(CONFIG.model, hidden_size=256, ffn_size=1024)
"""Tensors of many pages each."""
WITH_REFERENCE = with_training(msgspec.structs.replace(CONFIG, model=BIG), kl_coefficient=0.1)
CPU = torch.device("cpu")


def steps(config: Config, root: Path, lends: bool) -> list[Any]:
    """Two steps, with the state away and back between them or not -> losses, versions, digest of the state."""
    own = trainer(config, root)
    residency = TrainingResidency(own, ControlChannel(), CPU, verify=True)
    own.begin(0, ())
    found: list[Any] = []
    for step in (0, 1):
        result = own.train(step, make_samples(8, seed=step))
        found.append((result.metrics["loss"], result.metrics["grad_norm"]))
        if lends:
            for reports in (residency.offload(), residency.restore()):
                check(reports, "was not handed over")
    return [*found, digest(distinct_storages(own.state()))]


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("config", [CONFIG, WITH_REFERENCE], ids=["tiny", "with reference"])
def test_training_goes_on_as_if_its_state_had_never_left(
    tmp_path: Path, config: Config, num_ranks: int
) -> None:
    config = with_training(config, num_ranks=num_ranks)
    plain = in_world(num_ranks, steps, config, tmp_path / "plain", False)
    lent = in_world(num_ranks, steps, config, tmp_path / "lent", True)
    assert lent == plain


def away(config: Config, root: Path) -> dict[str, Any]:
    own = trainer(config, root)
    residency = TrainingResidency(own, ControlChannel(), CPU, verify=True)
    own.begin(0, ())
    own.train(0, make_samples(8))
    storages = distinct_storages(own.state())
    before = digest(storages)
    reports = residency.offload()
    again = residency.offload()
    back = residency.restore()
    residency.restore()
    return {
        "total": total_bytes(storages),
        "tensors": len(storages),
        "reports": reports,
        "again": again,
        "back": back,
        "same": digest(storages) == before and digest(distinct_storages(own.state())) == before,
    }


def test_every_rank_frees_its_part_and_reports_it(tmp_path: Path) -> None:
    config = msgspec.structs.replace(CONFIG, model=BIG)
    found = in_world(2, away, config, tmp_path)
    reports: list[Report] = found[0]["reports"]
    assert reports == found[1]["reports"]
    for rank, own in enumerate(found):
        assert own["same"]
        assert own["tensors"] >= 3 * 20  # weights and two moments of each
        assert reports[rank].released_bytes >= 0.9 * own["total"]  # norms are smaller than a page
        assert own["again"][rank].released_bytes == 0
    assert set(slowest(reports)) == {"backup", "release", "verify"}
    assert set(slowest(found[0]["back"])) == {"restore", "verify"}
    assert slowest(reports)["backup"] == max(report.parts["backup"] for report in reports)


def stubborn(config: Config, root: Path) -> list[Any]:
    """Rank 1's pages stay, or have no room to come back to."""
    is_second = dist.get_rank() == 1
    free = 1 << 40

    def keep(pages: Pages) -> None:
        if not is_second:
            drop(pages)

    own = trainer(config, root)
    channel = ControlChannel()
    own.begin(0, ())
    own.train(0, make_samples(8))
    before = digest(distinct_storages(own.state()))
    kept = TrainingResidency(own, channel, CPU, True, HostSaver(drop_pages=keep))
    errors = [failure(kept.offload(), "did not leave")]
    kept.restore()
    roomless = TrainingResidency(own, channel, CPU, True, HostSaver(free_bytes=lambda: free))
    check(roomless.offload(), "did not leave")
    free = 0 if is_second else free
    errors.append(failure(roomless.restore(), "did not come back"))
    free = 1 << 40
    check(roomless.restore(), "did not come back")
    return [errors, digest(distinct_storages(own.state())) == before]


def failure(reports: list[Report], what: str) -> str:
    try:
        check(reports, what)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.scenario("MH-01", "MH-02")
def test_a_rank_that_fails_is_named_and_the_world_can_try_again(tmp_path: Path) -> None:
    for errors, is_same in in_world(2, stubborn, msgspec.structs.replace(CONFIG, model=BIG), tmp_path):
        assert is_same
        assert errors[0].startswith("the training state did not leave: rank 1: training state: ")
        assert "are still in memory" in errors[0]
        assert errors[1].startswith("the training state did not come back: rank 1: ")
        assert "whoever has the memory must release it first" in errors[1]


def serve_while_away(config: Config, root: Path) -> bool:
    own = trainer(config, root)
    residency = TrainingResidency(own, ControlChannel(), CPU, verify=False)
    own.begin(0, ())
    store = SnapshotStore(1, 0, "here", 1 << 16)
    snapshot = own.publish(store)
    assert snapshot is not None
    check(residency.offload(), "did not leave")
    with Receiver(1, 1).receive(snapshot, deadline_s=5.0) as received:  # verifies every bucket
        is_whole = received.snapshot.version == Version(0, 0)
    check(residency.restore(), "did not come back")
    return is_whole


def test_the_snapshot_is_served_while_the_state_is_away(tmp_path: Path) -> None:
    assert in_world(1, serve_while_away, CONFIG, tmp_path) == [True]
