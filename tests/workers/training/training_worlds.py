"""Training worlds of a few gloo ranks in processes of their own, and samples to train them on."""

import multiprocessing
import tempfile
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist

from pearl.types.config import Config, DataConfig, ModelConfig, RolloutConfig, TrainingConfig, WarmStartConfig
from pearl.types.messages.training import Demonstration, Sample
from pearl.workers.training.checkpoint import CheckpointStore
from pearl.workers.training.rank_commands import Progress
from pearl.workers.training.trainer import Trainer

CONTEXT = multiprocessing.get_context("forkserver")
# torch and transformers are imported once, before the server has any thread: a rank then starts in milliseconds.
CONTEXT.set_forkserver_preload(
    [
        "pearl.workers.training.trainer",
        "pearl.workers.weight_transfer.receiver",
        "pearl.workers.weight_transfer.sender",
    ]
)
ANSWER_TIMEOUT_S = 40.0
VOCABULARY = 16
MODEL = ModelConfig(
    num_layers=2, hidden_size=32, num_heads=2, num_kv_heads=1, head_dim=16, ffn_size=48, device="cpu"
)
CONFIG = Config(
    model=MODEL,
    data=DataConfig(batch_size=64, group_size=4),
    rollout=RolloutConfig(temperature=1.0),
    training=TrainingConfig(max_grad_norm=1e9),  # so that Adam's first moment tells the gradient
    warm_start=WarmStartConfig(num_steps=0),
)

World = Callable[..., Any]


def in_world(num_ranks: int, work: World, *arguments: Any) -> list[Any]:
    """``work(*arguments)`` on every rank of a fresh world -> what each rank returned."""
    with tempfile.TemporaryDirectory() as directory:
        rendezvous = f"file://{directory}/store"
        ends = []
        for rank in range(num_ranks):
            mine, theirs = CONTEXT.Pipe()
            process = CONTEXT.Process(
                target=_rank, args=(theirs, rendezvous, rank, num_ranks, work, arguments), daemon=True
            )
            process.start()
            theirs.close()
            ends.append((process, mine))
        try:
            answers = [_answer(end) for _, end in ends]
        finally:
            for process, _ in ends:
                process.kill()
                process.join()
    for kind, answer in answers:
        if kind == "error":
            raise RuntimeError(answer)
    return [answer for _, answer in answers]


def _answer(end: Connection) -> tuple[str, Any]:
    if not end.poll(ANSWER_TIMEOUT_S):
        return "error", f"a rank did not answer within {ANSWER_TIMEOUT_S} s"
    try:
        kind, answer = end.recv()
    except EOFError:
        return "error", "a rank died"
    return kind, answer


def _rank(
    end: Connection, rendezvous: str, rank: int, num_ranks: int, work: World, arguments: Sequence[Any]
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=num_ranks)
    try:
        end.send(("answer", work(*arguments)))
    except Exception as error:  # noqa: BLE001  the test's process raises it
        end.send(("error", f"rank {rank}: {error!r}"))
    if end.poll(ANSWER_TIMEOUT_S):  # leave only when nobody needs this rank any more: the parent kills it
        end.recv()


def trainer(config: Config, root: Path) -> Trainer:
    store = CheckpointStore(root / "checkpoints", keep=config.training.keep_checkpoints)
    return Trainer(config, VOCABULARY, torch.device("cpu"), store, Progress())


def with_training(config: Config = CONFIG, **changes: Any) -> Config:
    return msgspec.structs.replace(config, training=msgspec.structs.replace(config.training, **changes))


def make_samples(count: int, seed: int = 0, group_size: int = 4, longest: int = 40) -> tuple[Sample, ...]:
    """Of very unequal lengths, a third of the tokens generated, binary rewards, plausible rollout log-probs."""
    rng = np.random.default_rng(seed)
    samples = []
    for trajectory in range(count):
        length = int(rng.integers(4, 8 if trajectory % 3 else longest))
        mask = rng.random(length) < 0.33
        mask[0], mask[-1] = False, True
        logprobs = np.where(mask, rng.normal(-2.5, 0.3, length), 0.0)
        samples.append(
            make_sample(
                trajectory,
                trajectory // group_size,
                float(rng.integers(0, 2)),
                rng.integers(0, VOCABULARY, length).tolist(),
                mask.tolist(),
                logprobs.tolist(),
            )
        )
    return tuple(samples)


def make_sample(
    trajectory: int,
    group: int,
    reward: float,
    ids: Sequence[int],
    mask: Sequence[bool],
    logprobs: Sequence[float],
    masked: bool = False,
) -> Sample:
    flags = np.array(mask, np.uint8).tobytes()
    return Sample(
        trajectory,
        group,
        reward,
        masked,
        len(ids),
        np.array(ids, "<i4").tobytes(),
        flags,
        np.array(logprobs, "<f4").tobytes(),
        flags,
    )


def make_demonstrations(count: int, seed: int = 0) -> tuple[Demonstration, ...]:
    """Counting upwards: something that can be learnt."""
    rng = np.random.default_rng(seed)
    demonstrations = []
    for _ in range(count):
        length = int(rng.integers(4, 12))
        ids = (int(rng.integers(0, VOCABULARY)) + np.arange(length)) % VOCABULARY
        weights = np.ones(length)
        weights[:2] = 0.0
        demonstrations.append(Demonstration(ids.astype("<i4").tobytes(), weights.astype("<f4").tobytes()))
    return tuple(demonstrations)
