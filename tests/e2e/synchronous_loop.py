"""GRPO as one would write it on a page: no engine, no cache, no scheduler, no processes.

    python tests/e2e/synchronous_loop.py RUN_DIR     prints the losses of the run's settings as a JSON list

Only the trainer's step is shared with PEARL; what is checked is all that happens around it.
"""

import asyncio
import json
import sys
import tempfile
from pathlib import Path

import msgspec
import numpy as np
import torch
import torch.distributed as dist

from pearl.envs.loader import load_environment
from pearl.envs.protocol import Environment
from pearl.service.trajectory_seeds import trajectory_seed
from pearl.types.config import Config
from pearl.types.ids import TrajectoryId
from pearl.types.messages.training import Demonstration, Sample
from pearl.types.splitmix import splitmix64
from pearl.workers.model import build_model
from pearl.workers.rollout.torch_engine.sampler import key_uniform
from pearl.workers.training import fsdp
from pearl.workers.training.checkpoint import CheckpointStore
from pearl.workers.training.rank_commands import Progress
from pearl.workers.training.trainer import Trainer


def next_token(model: torch.nn.Module, ids: list[int], seed: int, temperature: float) -> tuple[int, float]:
    """One id by inverse transform from the whole context, computed afresh, and its log-prob."""
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0, -1].double() / temperature
    logprobs = logits.log_softmax(-1)
    uniform = key_uniform(np.array([splitmix64(seed)], np.uint64), np.array([len(ids)], np.int64))[0]
    chosen = int(torch.searchsorted(logprobs.exp().cumsum(-1), uniform, right=True))
    return chosen, float(logprobs[chosen])


async def play(config: Config, environment: Environment, model: torch.nn.Module, trajectory: int) -> Sample:
    rollout = config.rollout
    stops = environment.describe().stop_ids
    group = trajectory // config.data.group_size
    seed = trajectory_seed(config.run.seed, TrajectoryId(trajectory))
    episode = environment.episode("train", group)
    ids = list(await episode.reset())
    mask, logprobs = [0] * len(ids), [0.0] * len(ids)
    reward = 0.0
    for _ in range(config.environment.max_turns):
        action: list[int] = []
        while len(action) < rollout.max_new_tokens_per_turn and not (action and action[-1] in stops):
            token, logprob = next_token(model, ids, seed, rollout.temperature)
            action.append(token)
            ids.append(token)
            mask.append(1)
            logprobs.append(logprob)
        seen = await episode.step(action, action[-1] not in stops)
        reward = seen.reward
        ids += seen.ids
        mask += [0] * len(seen.ids)
        logprobs += [0.0] * len(seen.ids)
        if seen.done:
            break
    return Sample(
        trajectory,
        group,
        reward,
        False,
        len(ids),
        np.array(ids, np.int32).tobytes(),
        np.array(mask, np.uint8).tobytes(),
        np.array(logprobs, np.float32).tobytes(),
        np.array(mask, np.uint8).tobytes(),
    )


def demonstrations(config: Config, environment: Environment) -> list[Demonstration]:
    made = environment.demonstrations(config.run.seed, 0, config.warm_start.num_demonstrations)
    return [
        Demonstration(np.array(ids, np.int32).tobytes(), np.array(weights, np.float32).tobytes())
        for ids, weights in made
    ]


def run(config: Config, directory: Path) -> list[float]:
    environment = load_environment(config.environment.name, config.environment.options)
    vocabulary = environment.describe().vocabulary_size
    trainer = Trainer(config, vocabulary, torch.device("cpu"), CheckpointStore(directory, 2), Progress())
    trainer.begin(0, demonstrations(config, environment))
    model = build_model(config.model, vocabulary, config.run.seed)
    losses = []
    for step in range(config.run.num_steps):
        weights = {name: fsdp.full_tensor(tensor).clone() for name, tensor in trainer.policy.tensors()}
        model.load_state_dict(weights, strict=False)
        first = step * config.data.batch_size
        samples = [
            asyncio.run(play(config, environment, model, first + i)) for i in range(config.data.batch_size)
        ]
        losses.append(trainer.train(step, samples).metrics["loss"])
    return losses


def main() -> None:
    config = msgspec.json.decode((Path(sys.argv[1]) / "config.json").read_bytes(), type=Config)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=0, world_size=1)
        sys.stdout.write(json.dumps(run(config, Path(directory) / "checkpoints")) + "\n")
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
