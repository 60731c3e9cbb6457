"""Whole steps on worlds of one and more ranks."""

import math
import os
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
import torch
from training_worlds import (
    CONFIG,
    VOCABULARY,
    in_world,
    make_demonstrations,
    make_sample,
    make_samples,
    trainer,
    with_training,
)

from pearl.runtime.errors import FinalError
from pearl.types.config import Config
from pearl.types.messages.training import Sample
from pearl.types.weights import Snapshot
from pearl.workers.model import build_model
from pearl.workers.training.checkpoint import CheckpointStore
from pearl.workers.weight_transfer.snapshot_image import SnapshotStore

FIRST_MOMENT = 1 - CONFIG.training.betas[0]
Arrays = dict[str, npt.NDArray[np.float32]]


def run_steps(
    config: Config, root: Path, batches: list[tuple[Sample, ...]], restore_step: int | None = None
) -> list[dict[str, float]]:
    """On every rank: fresh or restored, then a step and a checkpoint a batch -> the metrics of each."""
    own = trainer(config, root)
    if restore_step is None:
        own.begin(0, ())
    else:
        own.restore(1, restore_step)
    found = []
    for samples in batches:
        result = own.train(own.version.step, samples)
        assert own.save()
        gap = {"max_gap": result.max_logprob_gap, "gap_tokens": float(result.logprob_gap_tokens)}
        found.append({**result.metrics, **gap})
    return found


def part(root: Path, step: int, name: str) -> Arrays:
    with CheckpointStore(root / "checkpoints", keep=2).open(step).reader(name) as read:
        return {tensor: read(tensor).numpy().copy() for tensor in sorted(read.names())}


def gradients(root: Path) -> Arrays:
    """Of the first step, told by Adam's first moment."""
    return {
        name: moment / FIRST_MOMENT
        for name, moment in part(root, 1, "optimizer").items()
        if name.startswith("exp_avg.")
    }


def largest_difference(one: Arrays, other: Arrays) -> float:
    assert one.keys() == other.keys()
    return max(float(np.abs(one[name] - other[name]).max()) for name in one)


# against a straightforward implementation


def plain_logprobs(model: torch.nn.Module, sample: Sample) -> torch.Tensor:
    ids = torch.from_numpy(np.frombuffer(sample.ids, "<i4").astype(np.int64))
    logprobs = model(input_ids=ids[None], use_cache=False).logits[0].log_softmax(-1)
    return torch.cat((torch.zeros(1), logprobs[:-1].gather(1, ids[1:, None])[:, 0]))


def plain_grpo(config: Config, samples: list[Sample]) -> tuple[torch.nn.Module, list[float]]:
    """One GRPO step, sample by sample -> the model after it, and the loss of each optimizer step."""
    training = config.training
    model = build_model(config.model, VOCABULARY, config.run.seed)
    optimizer = torch.optim.AdamW(
        model.parameters(), training.learning_rate, training.betas, weight_decay=training.weight_decay
    )
    old = [plain_logprobs(model, sample).detach() for sample in samples]
    groups = sorted({sample.group for sample in samples})
    losses = []
    for update in range(training.updates_per_step):
        first, end = (len(groups) * edge // training.updates_per_step for edge in (update, update + 1))
        chosen = [index for index, sample in enumerate(samples) if sample.group in groups[first:end]]
        tokens = sum(samples[index].mask.count(1) for index in chosen)
        loss = torch.zeros(())
        for index in chosen:
            sample = samples[index]
            rewards = np.array([other.reward for other in samples if other.group == sample.group])
            advantage = float((sample.reward - rewards.mean()) / (rewards.std() + 1e-6))
            rollout = torch.from_numpy(np.frombuffer(sample.logprobs, "<f4").copy())
            mask = torch.from_numpy(np.frombuffer(sample.mask, np.uint8).copy())
            ratio = (plain_logprobs(model, sample) - old[index]).exp()
            clipped = ratio.clamp(1 - training.clip_low, 1 + training.clip_high)
            weight = (old[index] - rollout).exp().clamp(max=training.tis_cap)
            gain = torch.minimum(ratio * advantage, clipped * advantage)
            loss = loss - (mask * weight * gain).sum() / tokens
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), training.max_grad_norm)
        optimizer.step()
        losses.append(loss.item())
    return model, losses


@pytest.mark.parametrize(
    "changes", [{}, {"updates_per_step": 2, "max_grad_norm": 0.05, "learning_rate": 0.01}]
)
def test_a_step_is_that_of_a_straightforward_implementation(tmp_path: Path, changes: dict[str, Any]) -> None:
    config = with_training(**changes)
    samples = make_samples(12)
    [[metrics]] = in_world(1, run_steps, config, tmp_path, [samples])
    model, losses = plain_grpo(config, list(samples))
    expected = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    del expected["model.embed_tokens.weight"]  # tied
    assert metrics["loss"] == pytest.approx(sum(losses) / len(losses), abs=1e-6)
    assert largest_difference(part(tmp_path, 1, "model"), expected) < 2e-5
    assert metrics["updates"] == len(losses)


# however it is cut


def run_all(runs: list[tuple[Config, Path, list[tuple[Sample, ...]]]]) -> list[list[dict[str, float]]]:
    """Several runs one after another in one world."""
    return [run_steps(*run) for run in runs]


@pytest.mark.scenario("GR-03")
def test_the_update_does_not_depend_on_the_cut(tmp_path: Path) -> None:
    shuffled = tuple(make_samples(12)[index] for index in (5, 0, 11, 3, 9, 1, 7, 2, 10, 4, 8, 6))
    whole = tmp_path / "whole"
    [[expected]] = in_world(1, run_steps, CONFIG, whole, [make_samples(12)])
    for num_ranks, budgets in ((1, (1, 64)), (2, (1, 8192)), (4, (64,))):
        roots = [tmp_path / f"{num_ranks}-{budget}" for budget in budgets]
        configs = [with_training(tokens_per_micro_batch=budget) for budget in budgets]
        runs = [(config, root, [shuffled]) for config, root in zip(configs, roots, strict=True)]
        for rank in in_world(num_ranks, run_all, runs):
            for [metrics] in rank:
                assert metrics == pytest.approx(expected, abs=1e-5)
        for root in roots:
            assert largest_difference(gradients(root), gradients(whole)) < 1e-5


@pytest.mark.scenario("GR-04")
def test_sample_counts_that_ranks_do_not_divide(tmp_path: Path) -> None:
    counts = (13, 3, 1)
    config = with_training(normalize_by_std=False, kl_coefficient=0.1)
    ranks = {}
    for num_ranks in (1, 4):
        runs = [(config, tmp_path / f"{num_ranks}-{count}", [make_samples(count)]) for count in counts]
        ranks[num_ranks] = in_world(num_ranks, run_all, runs)[0]
    for count, [metrics] in zip(counts, ranks[4], strict=True):
        assert metrics["samples_trained"] == count
        assert metrics["tokens_trained"] == sum(sample.mask.count(1) for sample in make_samples(count))
        assert (
            largest_difference(gradients(tmp_path / f"4-{count}"), gradients(tmp_path / f"1-{count}")) < 1e-5
        )


# samples that must not count


@pytest.mark.scenario("LP-02")
def test_masked_samples_are_as_if_they_had_never_been(tmp_path: Path) -> None:
    good = make_samples(10, group_size=5)
    bad = make_samples(14, seed=3, group_size=5)[10:]
    broken = (
        msgspec.structs.replace(bad[0], group=0, masked=True, reward=100.0),
        msgspec.structs.replace(
            bad[1], group=0, logprobs=np.full(bad[1].num_tokens, np.nan, "<f4").tobytes()
        ),
        msgspec.structs.replace(bad[2], group=1, reward=math.inf),
        msgspec.structs.replace(bad[3], group=1, logprobs=b""),
    )
    clean, dirty = tmp_path / "clean", tmp_path / "dirty"
    runs = [(CONFIG, clean, [good]), (CONFIG, dirty, [good + broken])]
    [[_, [metrics]]] = in_world(1, run_all, runs)
    assert largest_difference(gradients(dirty), gradients(clean)) == 0.0
    assert (metrics["samples_masked"], metrics["samples_invalid"]) == (4, 3)
    assert all(math.isfinite(value) for value in metrics.values())


@pytest.mark.scenario("GR-06")
def test_a_member_without_tokens_counts_in_the_baseline_only(tmp_path: Path) -> None:
    end_only = make_sample(0, 0, 1.0, [1, 2, 3], [False, False, True], [0, 0, -2.0])
    empty = make_sample(1, 0, 0.0, [1, 2], [False, False], [0, 0])
    alone, pair = tmp_path / "alone", tmp_path / "pair"
    [[metrics]] = in_world(1, run_steps, with_training(normalize_by_std=False), pair, [(end_only, empty)])
    assert (metrics["samples_trained"], metrics["samples_empty"], metrics["tokens_trained"]) == (1, 1, 1)
    # Its advantage is 1 - 0.5 and its ratio 1; without the sibling the advantage would be 0.
    assert metrics["policy_loss"] == pytest.approx(-0.5 * metrics["tis_mean"], rel=1e-6)
    [[metrics]] = in_world(1, run_steps, with_training(normalize_by_std=False), alone, [(end_only,)])
    assert metrics["policy_loss"] == 0.0


@pytest.mark.scenario("GR-01")
def test_equal_rewards_have_zero_gradient(tmp_path: Path) -> None:
    samples = tuple(msgspec.structs.replace(sample, reward=0.35) for sample in make_samples(8))
    [[metrics]] = in_world(1, run_steps, CONFIG, tmp_path, [samples])
    assert metrics["grad_norm"] == 0.0


@pytest.mark.scenario("EN-05")
def test_a_batch_of_failures_leaves_the_weights(tmp_path: Path) -> None:
    samples = tuple(msgspec.structs.replace(sample, masked=True) for sample in make_samples(8))
    [[first, second]] = in_world(1, run_steps, CONFIG, tmp_path, [samples, samples])
    assert first["updates"] == second["updates"] == 0
    assert largest_difference(part(tmp_path, 1, "model"), part(tmp_path, 2, "model")) == 0.0


def spoiled_step(config: Config, root: Path) -> list[Any]:
    """A step whose gradient is not finite on the last rank only."""
    own = trainer(config, root)
    own.begin(0, ())
    before = own.policy.clone()
    own.train(0, make_samples(8))
    middle = own.policy.clone()
    backward = own.policy.backward
    is_last = torch.distributed.get_rank() == own.policy.num_ranks - 1
    own.policy.backward = lambda loss: backward(loss * (math.inf if is_last else 1.0))  # type: ignore[method-assign]
    result = own.train(1, make_samples(8, seed=1))
    after = own.policy.clone()

    def same(one: Any, other: Any) -> bool:
        return all(torch.equal(one[name].to_local(), other[name].to_local()) for name in one)

    return [same(before, middle), same(middle, after), result.metrics]


@pytest.mark.scenario("LP-02")
def test_a_gradient_that_is_not_finite_skips_the_update_on_all_ranks(tmp_path: Path) -> None:
    for moved, kept, metrics in in_world(2, spoiled_step, CONFIG, tmp_path):
        assert not moved
        assert kept
        assert metrics["updates_skipped"] == 1
        assert "grad_norm" not in metrics  # nothing that strict JSON lacks


def test_shuffled_advantages_are_another_update_and_repeat(tmp_path: Path) -> None:
    samples = make_samples(16, group_size=8)
    config = with_training(shuffle_advantages=True)
    named = (("plain", CONFIG), ("first", config), ("second", config))
    in_world(1, run_all, [(used, tmp_path / name, [samples]) for name, used in named])
    first = gradients(tmp_path / "first")
    assert largest_difference(first, gradients(tmp_path / "second")) == 0.0
    assert largest_difference(first, gradients(tmp_path / "plain")) > 1e-4


# resuming

RICH = with_training(kl_coefficient=0.05, updates_per_step=2, weight_decay=0.01, learning_rate=3e-3)
BATCHES = [make_samples(12, seed=seed) for seed in range(4)]


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, float]]]:
    root = tmp_path_factory.mktemp("unbroken")
    config = msgspec.structs.replace(
        RICH, training=msgspec.structs.replace(RICH.training, keep_checkpoints=10)
    )
    [metrics] = in_world(1, run_steps, config, root, BATCHES)
    return root, metrics


def test_resuming_is_as_if_it_had_never_stopped(
    tmp_path: Path, unbroken: tuple[Path, list[dict[str, float]]]
) -> None:
    in_world(1, run_steps, RICH, tmp_path, BATCHES[:2])
    [metrics] = in_world(1, run_steps, RICH, tmp_path, BATCHES[2:], 2)
    root, expected = unbroken
    assert metrics == expected[2:]
    assert metrics[1]["kl"] > 0
    for name in ("model", "optimizer", "reference"):
        assert largest_difference(part(tmp_path, 4, name), part(root, 4, name)) == 0.0


def test_resuming_on_another_number_of_ranks(
    tmp_path: Path, unbroken: tuple[Path, list[dict[str, float]]]
) -> None:
    root, expected = unbroken
    in_world(1, run_steps, RICH, tmp_path, BATCHES[:2])
    [metrics, _] = in_world(2, run_steps, RICH, tmp_path, BATCHES[2:], 2)
    assert metrics[1] == pytest.approx(expected[3], abs=1e-4)
    assert largest_difference(part(tmp_path, 4, "model"), part(root, 4, "model")) < 1e-4


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    in_world(1, run_steps, CONFIG, tmp_path, [make_samples(4)])
    other = msgspec.structs.replace(CONFIG, model=msgspec.structs.replace(CONFIG.model, num_layers=1))
    with pytest.raises(RuntimeError, match="other \\[model\\] settings"):
        in_world(1, run_steps, other, tmp_path, [], 1)


def save_on_a_full_disk(config: Config, root: Path) -> list[Any]:
    own = trainer(config, root)
    own.begin(0, ())
    own.train(0, make_samples(4))
    own.save()
    own.train(1, make_samples(4))
    (root / "checkpoints" / ".writing-000002").write_text("in the way")  # cannot be made a directory
    return [own.save(), own.train(2, make_samples(4)).metrics["updates"]]


def test_a_checkpoint_that_cannot_be_written_costs_only_itself(tmp_path: Path) -> None:
    first, second = in_world(2, save_on_a_full_disk, CONFIG, tmp_path)
    assert first == [False, 1.0]
    assert second == [True, 1.0]
    assert CheckpointStore(tmp_path / "checkpoints", keep=2).steps() == [1]


def save_without_room(config: Config, root: Path, free_bytes: int) -> list[str]:
    own = trainer(config, root)
    own.begin(0, ())
    own.train(0, make_samples(4))
    own.save()
    own.train(1, make_samples(4))
    os.statvfs = lambda _: os.statvfs_result((1, 1, 0, 0, free_bytes, 0, 0, 0, 0, 255))  # type: ignore[assignment]
    try:
        own.save()
    except FinalError as error:
        return [str(error)]
    return []


def test_a_full_disk_is_final_and_leaves_the_last_checkpoint(tmp_path: Path) -> None:
    first, second = in_world(2, save_without_room, CONFIG, tmp_path, 16 << 20)
    assert "no room for the checkpoint of step 2" in first[0]
    assert "the checkpoint of step 1 is whole; make room there, then resume the run" in first[0]
    assert second == []  # rank 0 ends, and the launcher with it the world
    store = CheckpointStore(tmp_path / "checkpoints", keep=2)
    assert (store.steps(), store.newest()) == ([1], 1)


def test_a_disk_with_room_takes_the_next_checkpoint(tmp_path: Path) -> None:
    assert in_world(1, save_without_room, CONFIG, tmp_path, 17 << 20) == [[]]
    assert CheckpointStore(tmp_path / "checkpoints", keep=2).steps() == [1, 2]


# warm start


def warm(config: Config, root: Path) -> dict[str, float]:
    own = trainer(config, root)
    metrics = own.begin(0, make_demonstrations(40))
    own.version = msgspec.structs.replace(own.version, step=1)
    own.save()
    return metrics


def test_warm_start_learns_and_does_not_depend_on_the_cut(tmp_path: Path) -> None:
    settings = msgspec.structs.replace(
        CONFIG.warm_start,
        num_steps=30,
        batch_size=16,
        learning_rate=1e-2,
        warmup_steps=5,
        num_demonstrations=40,
    )
    config = msgspec.structs.replace(CONFIG, warm_start=settings)
    one, two = tmp_path / "one", tmp_path / "two"
    [first] = in_world(1, warm, config, one)
    [second, _] = in_world(2, warm, with_training(config, tokens_per_micro_batch=60), two)
    assert first["warm_start_loss_last"] < 0.4 * first["warm_start_loss_first"]
    assert second == pytest.approx(first, abs=1e-3)
    assert part(one, 1, "optimizer") == {}  # reinforcement learning begins with a fresh one


def test_warm_start_without_demonstrations_is_refused(tmp_path: Path) -> None:
    settings = msgspec.structs.replace(CONFIG.warm_start, num_steps=3)
    with pytest.raises(RuntimeError, match="no demonstration with a trained token came"):
        in_world(1, trainer_begins, msgspec.structs.replace(CONFIG, warm_start=settings), tmp_path)


def trainer_begins(config: Config, root: Path) -> None:
    trainer(config, root).begin(0, ())


# publishing


def publish(config: Config, root: Path) -> Snapshot | None:
    own = trainer(config, root)
    own.begin(4, ())
    store = None
    if torch.distributed.get_rank() == 0:
        store = SnapshotStore(1, 0, "host", 1024)
    own.publish(store)
    own.train(0, make_samples(8))
    own.save()
    snapshot = own.publish(store)
    if store is not None and snapshot is not None:
        with store.pinned(snapshot.version) as image:
            assert image is not None
            (root / "image").write_bytes(image.numpy().tobytes())
    return snapshot


@pytest.mark.scenario("WS-02")
def test_ranks_gather_the_snapshot_in_one_order(tmp_path: Path) -> None:
    first, *others = in_world(2, publish, CONFIG, tmp_path)
    assert others == [None]
    assert (first.version.lineage, first.version.step) == (4, 1)
    assert len(first.buckets) > 10
    image = (tmp_path / "image").read_bytes()
    saved = part(tmp_path, 1, "model")
    assert [spec.name for spec in first.tensors] == sorted(saved)
    for spec in first.tensors:
        assert image[spec.offset : spec.offset + spec.num_bytes] == saved[spec.name].tobytes()


def test_snapshots_have_the_dtype_that_engines_serve(tmp_path: Path) -> None:
    model = msgspec.structs.replace(CONFIG.model, dtype="bfloat16")
    [snapshot] = in_world(1, publish, msgspec.structs.replace(CONFIG, model=model), tmp_path)
    assert {spec.dtype for spec in snapshot.tensors} == {"bfloat16"}
    assert {array.dtype for array in part(tmp_path, 1, "model").values()} == {np.dtype(np.float32)}
